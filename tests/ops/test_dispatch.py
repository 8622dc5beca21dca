from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import numba
import pytest
import torch

from rorqual.errors import ConfigError
from rorqual.formats.codec import quantize
from rorqual.formats.spec import E2M1_E8M0_32
from rorqual.ops import cpu, dispatch
from rorqual.ops.dispatch import Backend, Ops, fast_ops, reference_ops
from rorqual.ops.fast.kernel import Kernel, digest_of
from rorqual.ops.fast.topk import topk_lowest as fast_topk_lowest
from rorqual.ops.paged import PagedRegion

OP_NAMES = [field.name for field in fields(Ops) if field.name not in ("name", "regions")]


@pytest.mark.parametrize("name", OP_NAMES)
def test_twins_have_one_signature(name: str) -> None:
    fast = getattr(fast_ops(), name)
    fast = fast.func if isinstance(fast, partial) else fast
    ours = {key: parameter for key, parameter in inspect.signature(fast).parameters.items() if key != "path"}
    twin = dict(inspect.signature(getattr(reference_ops(), name)).parameters)
    assert list(ours.values()) == list(twin.values())


def test_names_say_what_serves() -> None:
    assert reference_ops().name == "plain"
    assert fast_ops().name == f"fast ({cpu.best_path()})"
    assert fast_ops("plain").name == "fast (plain)"


def test_a_path_that_the_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "features", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    with pytest.raises(ConfigError, match="path 'vnni' needs avx512f, avx512bw, avx512vnni, which this CPU lacks"):
        fast_ops("vnni")
    assert fast_ops("vector").name == "fast (vector)"
    monkeypatch.setattr(cpu, "features", lambda: frozenset())
    assert cpu.missing("vector") == ("avx2", "fma") and not cpu.missing("plain")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    assert not cpu.missing("vector")


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="kernels is 'quick', must be one of auto, fast, plain"):
        Backend("quick")


def test_plain_and_fast_serve_from_the_first_forward() -> None:
    assert Backend("plain").ops().name == "plain"
    assert Backend("fast").ops().name.startswith("fast")


def test_auto_serves_twins_until_all_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = threading.Event()

    def cold_step() -> None:
        # No disk cache holds this one.
        numba.njit("void(int64)")(lambda x: None)
        assert compiled.wait(30)

    done: list[str] = []
    monkeypatch.setattr(dispatch, "_steps", lambda: [cold_step, lambda: done.append("second")])
    backend = Backend("auto")
    with caplog.at_level(logging.INFO, logger="rorqual"):
        assert backend.ops().name == "plain"
        assert backend.ops().name == "plain" and not done
        assert not backend.wait(0.01)
        compiled.set()
        assert backend.wait(30)
        assert backend.ops().name.startswith("fast") and done == ["second"]
        assert backend.ops() is backend.ops()
    said = "kernels are compiling (first run on this machine); the plain ops serve until then"
    assert [record.getMessage() for record in caplog.records].count(said) == 1


def test_auto_serves_kernels_at_once_where_nothing_must_be_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_steps", lambda: [lambda: None])
    with caplog.at_level(logging.INFO, logger="rorqual"):
        assert Backend("auto").ops().name.startswith("fast")
    assert not any("compiling" in record.getMessage() for record in caplog.records)


def test_auto_keeps_the_twins_where_the_kernels_do_not_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(dispatch, "_steps", lambda: [broken])
    backend = Backend("auto")
    assert backend.ops().name == "plain" and backend.wait(30) and backend.ops().name == "plain"
    assert any("no such instruction" in record.getMessage() for record in caplog.records)


def test_warm_compiles_everything_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(dispatch, "_steps", lambda: [partial(done.append, i) for i in range(3)])
    seen: list[tuple[int, int]] = []
    backend = Backend("auto")
    backend.warm(lambda *counts: seen.append(counts))
    assert done == [0, 1, 2] and seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert backend.ops().name.startswith("fast")
    Backend("plain").warm()
    assert done == [0, 1, 2]


def test_steps_cover_every_kernel_of_the_best_path() -> None:
    from rorqual.ops.fast import attention, gather, index_scores, topk

    held = {step.__self__ for step in dispatch._steps() if hasattr(step, "__self__")}
    for module in (attention, gather, index_scores, topk):
        assert held.issuperset(module.kernels(cpu.best_path()))
    assert all(isinstance(kernel, Kernel) for kernel in held) and len(held) > 10


def test_a_kernel_compiles_one_signature_and_refuses_others() -> None:
    kernel = Kernel(lambda x: None, "void(float32[::1])", False)
    assert not kernel.ready
    kernel(torch.zeros(2).numpy())
    assert kernel.ready
    with pytest.raises(TypeError):
        kernel(torch.zeros(2, dtype=torch.float64).numpy())


def test_cached_code_is_not_used_after_an_edit_of_a_part(tmp_path: Path) -> None:
    def digest(folder: str, part: str, other: str) -> str:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "op.py").write_text("from rorqual.ops.fast.middle import f\n")
        (tmp_path / folder / "middle.py").write_text("from rorqual.ops.fast.part import g\n")
        (tmp_path / folder / "part.py").write_text(part)
        (tmp_path / folder / "other.py").write_text(other)
        return digest_of(tmp_path / folder / "op.py")

    assert digest("a", "x = 1", "y = 1") == digest("b", "x = 1", "y = 2") != digest("c", "x = 2", "y = 1")

    def function(x: int) -> None:
        pass

    kernel = Kernel(function, "void(int64)", False)
    kernel.compile()
    held = Path(kernel._dispatcher.stats.cache_path).iterdir()
    assert any(digest_of(Path(__file__)) in file.name for file in held)


# Two threads in parallel regions at once end the process under Numba's workqueue layer, unless the kernels take turns.
# And where few rows are split among threads, their bits must be those of whole rows.
THREADS = """
import threading, numba, torch
from rorqual.ops.fast.attention import sparse_attention
from rorqual.ops.fast.topk import topk_lowest
generator = torch.Generator().manual_seed(0)
scores = torch.randn(64, 4096, generator=generator)
expected = topk_lowest(scores, 9)
wrong = []
def work():
    for _ in range(60):
        if not torch.equal(topk_lowest(scores, 9), expected):
            wrong.append(1)
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
q, held = torch.randn(9, 20, 160, generator=generator), torch.randn(120, 160, generator=generator)
args = (held, 0, 0, 100, None, None, None, torch.zeros(20), 0.1, False)
at = torch.arange(100, 109)
whole = sparse_attention(q, at, *args)
alone = torch.cat([sparse_attention(q[t : t + 1], at[t : t + 1], *args) for t in range(9)])
print(numba.threading_layer(), numba.get_num_threads(), len(wrong), torch.equal(whole, alone))
"""


def test_threads_take_turns_and_share_work_without_a_trace_in_the_bits() -> None:
    env = os.environ | {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", THREADS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["workqueue", "2", "0", "True"]


# The twins' tests and two golden folders on a CPU without AVX512, and on one without any vectors: Numba compiles as if
# it were that CPU.
OTHER_CPUS = {
    "avx2": ("haswell", "sse2,sse3,ssse3,sse4.1,sse4.2,avx,avx2,fma,f16c,bmi,bmi2,popcnt,lzcnt", "avx512vnni"),
    "plain": ("generic", "sse2", "('avx2', 'fma')"),
}

FAMILIES = ("gather", "index_scores", "topk", "attention", "linear", "experts", "hyper", "norm", "window", "fast_codec")


@pytest.mark.full
@pytest.mark.skipif(cpu.platform.machine() != "x86_64", reason="CPU names and features are those of x86")
@pytest.mark.parametrize("other", OTHER_CPUS)
def test_twins_on_another_cpu(other: str) -> None:
    name, features, lacks = OTHER_CPUS[other]
    if not set(features.split(",")) <= cpu.features():
        pytest.skip(f"this CPU cannot run code for {name}")
    wanted = ",".join(f"+{feature}" for feature in features.split(","))
    env = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": wanted}
    tests = [Path(__file__).with_name(f"test_{family}.py") for family in FAMILIES]
    tests.append(Path(__file__).parents[1] / "analysis" / "test_goldens.py")
    chosen = "not test_goldens or (fast and (fp32-text or native-dspark))"
    command = [sys.executable, "-m", "pytest", "-rs", "-k", chosen, *map(str, tests)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert lacks in done.stdout, "the better paths should have been skipped"


MakeRegion = Callable[..., tuple[PagedRegion, torch.Tensor]]


@pytest.mark.parametrize("path", cpu.PATHS)
def test_forced_paths_reach_the_ops(make_region: MakeRegion, path: cpu.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu.missing(path):
        pytest.skip(f"CPU lacks {cpu.missing(path)}")
    from rorqual.ops.fast import index_scores

    ran: list[str] = []

    def spy(path: str) -> Callable[..., None]:
        return lambda *args, **named: ran.append(path)

    monkeypatch.setattr(index_scores, "KERNELS", {name: spy(name) for name in cpu.PATHS})
    region, table = make_region(torch.ones(9, 32), E2M1_E8M0_32)
    q = quantize(torch.ones(1, 16, 32), E2M1_E8M0_32)
    ops = fast_ops(path)
    ops.index_scores(*q, torch.ones(1, 16), region, table, 0, 9, torch.tensor([9]), False)
    ops.index_scores_at(*q, torch.ones(1, 16), region, table, torch.tensor([[3]]), False)
    assert ran == [path, path]
    assert ops.topk_lowest is fast_topk_lowest
