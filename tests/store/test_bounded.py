"""A call that does not return costs its caller the deadline and no more; nothing is lost of those that do."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from rorqual.store.bounded import BoundedCalls, OverdueError

LONG = 60.0
SHORT = 0.05


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def test_results_and_errors_come_back() -> None:
    calls = BoundedCalls(2, "test")
    assert [calls.run(lambda n=n: n * n, LONG) for n in range(20)] == [n * n for n in range(20)]
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0, LONG)
    assert calls.run(lambda: "still here", LONG) == "still here"
    assert calls.close(LONG)


def test_a_late_call_keeps_one_thread_until_it_returns(gate: threading.Event) -> None:
    calls = BoundedCalls(2, "test")
    with pytest.raises(OverdueError):
        calls.run(gate.wait, SHORT)
    assert calls.late == 1
    assert calls.run(lambda: 7, LONG) == 7
    gate.set()
    assert calls.close(LONG)
    assert calls.late == 0


def test_with_every_thread_late_a_call_is_refused_at_once_and_later_taken_again(gate: threading.Event) -> None:
    calls = BoundedCalls(2, "test")
    for _ in range(2):
        with pytest.raises(OverdueError):
            calls.run(gate.wait, SHORT)
    begun = time.monotonic()
    for _ in range(100):
        with pytest.raises(OverdueError):
            calls.run(lambda: 7, LONG)
    assert time.monotonic() - begun < LONG
    gate.set()
    until = time.monotonic() + LONG
    while calls.late and time.monotonic() < until:
        time.sleep(0.01)
    assert calls.run(lambda: 7, LONG) == 7
    assert calls.close(LONG)


def test_a_call_given_up_in_the_queue_never_runs(gate: threading.Event) -> None:
    calls = BoundedCalls(1, "test")
    ran = []
    holder = threading.Thread(target=lambda: calls.run(gate.wait, LONG))
    holder.start()
    with pytest.raises(OverdueError):
        calls.run(lambda: ran.append(1), SHORT)
    gate.set()
    holder.join()
    assert calls.run(lambda: 7, LONG) == 7
    assert ran == [] and calls.late == 0
    assert calls.close(LONG)


def test_close_says_whether_something_still_runs(gate: threading.Event) -> None:
    calls = BoundedCalls(1, "test")
    with pytest.raises(OverdueError):
        calls.run(gate.wait, SHORT)
    assert not calls.close(SHORT)
    with pytest.raises(OverdueError):
        calls.run(lambda: 7, LONG)
    gate.set()
    assert calls.close(LONG)


def test_many_callers_share_few_threads() -> None:
    calls = BoundedCalls(3, "test")
    found: list[int] = []

    def ask(n: int) -> None:
        found.extend(calls.run(lambda i=i: n * 1000 + i, LONG) for i in range(50))  # type: ignore[misc]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(n * 1000 + i for n in range(8) for i in range(50))
    assert calls.close(LONG)


def test_a_call_that_never_returns_does_not_keep_the_process() -> None:
    script = (
        "import threading\n"
        "from rorqual.store import bounded\n"
        "from rorqual.store.bounded import BoundedCalls, OverdueError\n"
        "bounded.EXIT_S = 0.1\n"
        "try:\n"
        "    BoundedCalls(1, 'test').run(threading.Event().wait, 0.05)\n"
        "except OverdueError:\n"
        "    print('late')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG)
    assert (done.stdout, done.returncode) == ("late\n", 0), done.stderr
