"""The example cluster under a real Ray: one prefill worker, two that decode, each a process that may die any time.

One cluster serves all of these tests: starting Ray and three workers takes longer than any of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from clusters import assert_nothing_held, right, until

from rorqual.checkpoint.shipped import passage
from rorqual.cli.app import main
from rorqual.disagg.cluster.config import ClusterConfig
from rorqual.disagg.cluster.front import Front
from rorqual.disagg.cluster.placing import Post
from rorqual.disagg.cluster.presence import find, presence_file
from rorqual.disagg.cluster.session import front_of
from rorqual.engine.output import RequestOutput
from rorqual.engine.params import SamplingParams

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `cluster`")

MINUTES, FULL_MINUTES = 1.0, 10.0
"""Of traffic with kills."""
START, END = 400.0, 180.0
"""Seconds that nothing takes: until all workers are there, and for everything else."""
ENVIRONMENT = "XDG_RUNTIME_DIR"
RORQUAL = (sys.executable, "-c", "import sys; from rorqual.cli import main; sys.exit(main())")
NAME = "kills"
EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.toml"
DEADLINES = """
[deadlines]
start = 390
silent = 60
restart = 150
"""


@dataclass
class Up:
    """A cluster in a process of its own. said: its lines so far."""

    config: Path
    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.said)

    def wait_for(self, word: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while word not in self.text:
            assert self.process.poll() is None and time.monotonic() < end, self.text
            time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("cluster")
    config = folder / "cluster.toml"
    text = EXAMPLE.read_text(encoding="utf-8").replace('name = "loopback"', f'name = "{NAME}"')
    config.write_text(text + DEADLINES, encoding="utf-8")
    before = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = str(folder)
    process = subprocess.Popen(
        [*RORQUAL, "cluster", "up", str(config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    own = Up(config, process)
    assert process.stdout is not None
    reader = threading.Thread(target=lambda out: own.said.extend(out), args=(process.stdout,), daemon=True)
    reader.start()
    try:
        own.wait_for("is up", START)
        yield own
    finally:
        stop(process)
        if before is None:
            del os.environ[ENVIRONMENT]
        else:
            os.environ[ENVIRONMENT] = before


def stop(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C; as kill -9 where that does not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END)
        process.kill()


@contextlib.contextmanager
def served(config: Path) -> Iterator[str]:
    """`rorqual serve --cluster` on a free port; its address."""
    command = [*RORQUAL, "serve", "--port", "0", "--cluster", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        watchdog = threading.Timer(END, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("rorqual serves rorqual at http://127.0.0.1:"), line
            yield line.split()[-1]
        finally:
            watchdog.cancel()
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END)
            process.kill()
            process.stdout.close()


def test_up_says_what_runs_and_status_finds_it(cluster: Up) -> None:
    own = find(NAME)
    assert own is not None and own.pid == cluster.process.pid and own.address.startswith("127.0.0.1:")
    assert presence_file(NAME).stat().st_mode & 0o777 == 0o600
    told = subprocess.run(
        [*RORQUAL, "cluster", "status", str(cluster.config)], capture_output=True, text=True, timeout=END
    )
    assert told.returncode == 0, told.stdout + told.stderr
    for text in (cluster.text, told.stdout):
        assert all(name in text for name in ("prefill-0", "decode-0", "decode-1"))
    assert "no answer" not in told.stdout


def test_a_server_answers_for_it_while_a_worker_is_killed(cluster: Up) -> None:
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    body = {"prompt": "The whale", "max_tokens": 300, "ignore_eos": True, "temperature": 0, "stream": True}
    with served(cluster.config) as address, httpx.Client(base_url=address, timeout=END) as client:
        text, killed = "", False
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if len(text) > 20 and not killed:
                    killed = True
                    for pid in pids_of_decoders():
                        os.kill(pid, signal.SIGKILL)
        assert text == right("The whale", params).text
        wrong = client.post("/v1/completions", json={**body, "stream": False, "logit_bias": {"99999999": 1}})
        assert wrong.status_code == 400, wrong.text
        stats = client.get("/stats").json()
        assert (stats["finished"], stats["slots"], stats["running"]) == (1, 8, 0)
        assert b"vllm:num_requests_running" in client.get("/metrics").content
    cluster.wait_for("decode-0 has begun anew", END)
    cluster.wait_for("decode-1 has begun anew", END)


def test_a_second_of_its_name_is_refused(cluster: Up, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "up", str(cluster.config)]) == 2
    assert f"'{NAME}' runs already, as process {cluster.process.pid}" in capsys.readouterr().err


def test_options_of_an_engine_are_refused_beside_a_cluster(cluster: Up, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--cluster", str(cluster.config), "--slots", "4", "--memory", "1GiB"]) == 2
    assert "--memory, --slots not legal with --cluster" in capsys.readouterr().err


def pids_of_decoders() -> list[int]:
    """By their titles, which Ray sets."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                title = (folder / "cmdline").read_bytes()
                if title.startswith(b"ray::DecodeActor") and ours(int(folder.name)):
                    found.append(int(folder.name))
    return found


def ours(pid: int) -> bool:
    """A process of this cluster's, by the variable that it has from its parents."""
    with contextlib.suppress(OSError):
        return f"{ENVIRONMENT}={os.environ[ENVIRONMENT]}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


@dataclass(frozen=True)
class Asked:
    """A request that the traffic is made of, and what is right."""

    prompt: str
    params: SamplingParams
    speculative: bool
    texts: tuple[str, ...]


def repertoire(draw: random.Random) -> list[Asked]:
    """Prompts of any length, alike at their beginnings or not; greedy and drawn; one or more texts."""
    text, found = passage(), []
    for number in range(12):
        start = 0 if number % 2 else draw.randrange(2000)
        prompt = text[start : start + draw.choice([1, 40, 300, 700, 1500])]
        drawn = {"temperature": 0.8, "seed": draw.randrange(99)} if draw.random() < 0.5 else {}
        params = SamplingParams(max_tokens=draw.randrange(5, 90), n=draw.choice([1, 1, 2]), ignore_eos=True, **drawn)
        speculative = draw.random() < 0.7
        done = right(prompt, params, speculative=speculative)
        found.append(Asked(prompt, params, speculative, tuple(own.text for own in done.completions)))
    return found


class Traffic:
    """Random requests, a few at a time, some of them aborted. wrong: what ended neither right nor in a clear error."""

    def __init__(self, front: Front, draw: random.Random) -> None:
        self.front, self.draw = front, draw
        self.asked = repertoire(draw)
        self.live: dict[str, tuple[Asked, RequestOutput, float]] = {}
        self.right = self.errors = self.aborted = 0
        self.wrong: list[str] = []

    def step(self, more: bool) -> None:
        if more and len(self.live) < 6:
            own = self.draw.choice(self.asked)
            name = self.front.submit(own.prompt, own.params, speculative=own.speculative)
            patience = self.draw.uniform(0, 3) if self.draw.random() < 0.15 else float("inf")
            self.live[name] = own, self.front.output(name), time.monotonic() + patience
        self.front.step()
        for name, (own, output, gone) in list(self.live.items()):
            if output.finished:
                del self.live[name]
                self._judge(own, output)
            elif time.monotonic() > gone:
                del self.live[name]
                self.front.abort(name)
                self.aborted += 1

    def _judge(self, own: Asked, output: RequestOutput) -> None:
        reasons = [done.finish_reason for done in output.completions]
        told = {str(done.stopped_by) for done in output.completions if done.finish_reason == "error"}
        texts = tuple(done.text for done in output.completions)
        if reasons == ["length"] * len(reasons) and texts == own.texts:
            self.right += 1
        elif told and all(text.startswith("cluster: ") for text in told):
            self.errors += 1
        else:
            self.wrong.append(f"{reasons} {told}: {texts!r} for {own.texts!r}")


class Killer:
    """kill -9 of a worker now and then; mostly one that does not leave the others alone."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.kills = draw, 0
        self.due = time.monotonic() + 2

    def step(self, posts: list[Post]) -> None:
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + self.draw.uniform(2, 9)
        up = [post for post in posts if post.up and post.facts is not None]
        # The last one that decodes is killed too, but not so often that nothing gets done.
        if sum(post.role == "decode" for post in up) < 2 and self.draw.random() < 0.7:
            up = [post for post in up if post.role == "prefill"]
        if up:
            post = self.draw.choice(up)
            assert post.facts is not None
            if ours(post.facts.pid):
                os.kill(post.facts.pid, signal.SIGKILL)
                self.kills += 1


def run_traffic(config: Path, minutes: float, seed: int) -> None:
    with front_of(ClusterConfig.read(config)) as front:
        traffic, killer = Traffic(front, random.Random(seed)), Killer(random.Random(seed + 1))
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            traffic.step(more=True)
            killer.step(front.posts)
        last = time.monotonic() + END
        while traffic.live:
            assert time.monotonic() < last, traffic.live
            traffic.step(more=False)
        print(f"{traffic.right} right, {traffic.errors} errors, {traffic.aborted} aborted, {killer.kills} kills")
        assert traffic.wrong == []
        assert traffic.right >= 5 * minutes and traffic.errors <= traffic.right / 4
        assert killer.kills >= 2 * minutes
        until(front, lambda: all(post.up for post in front.posts), END)
        assert_nothing_held(front)
        prefill = front.posts[0]
        until(front, lambda: prefill.handle.call("kept").result(END) == 0, END)


def test_every_request_ends_right_while_workers_are_killed(cluster: Up) -> None:
    run_traffic(cluster.config, MINUTES, seed=8)


@pytest.mark.full
def test_ten_minutes_of_it(cluster: Up) -> None:
    run_traffic(cluster.config, FULL_MINUTES, seed=9)


def test_down_takes_it_all_down(cluster: Up) -> None:
    """Last, as it is the end of them all: no process and no file is left."""
    assert pids_of_decoders()
    assert main(["cluster", "down", str(cluster.config)]) == 0
    assert cluster.process.wait(END) == 0
    end = time.monotonic() + END
    while left := [int(own.name) for own in Path("/proc").iterdir() if own.name.isdecimal() and stray(int(own.name))]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert find(NAME) is None and not presence_file(NAME).exists()
    assert main(["cluster", "down", str(cluster.config)]) == 2


def stray(pid: int) -> bool:
    """A process of the cluster's that is not this one."""
    return pid != os.getpid() and ours(pid) and b"ray" in Path(f"/proc/{pid}/cmdline").read_bytes()
