"""Every golden folder, through the plain ops and through the fast kernels; two of them through every path of these."""

from pathlib import Path

import pytest

from rorqual.analysis.verify import PAGE_TOKENS, verify
from rorqual.bench.clocked import Given
from rorqual.model.load import load
from rorqual.ops import cpu
from rorqual.ops.dispatch import fast_ops

GOLDENS = Path(__file__).parents[1] / "goldens"
PARTS = ("formats", "sinkhorn", "engram-hash")
MODELS = tuple(sorted(p.name for p in GOLDENS.iterdir() if p.name not in PARTS))


@pytest.mark.parametrize("case", PARTS)
def test_parts_are_bit_exact(case: str) -> None:
    report = verify(GOLDENS / case)
    assert report.outcomes and not report.failed, [o for o in report.outcomes if not o.ok]
    if case != "sinkhorn":
        assert all(o.error == 0 for o in report.outcomes)


@pytest.mark.parametrize("kernels", ["plain", "fast"])
@pytest.mark.parametrize("case", MODELS)
def test_every_stored_tensor_agrees(case: str, kernels: str) -> None:
    report = verify(GOLDENS / case, kernels=kernels)
    assert len(report.outcomes) > 40
    assert not report.failed, [o for o in report.outcomes if not o.ok]


@pytest.mark.parametrize("path", ["vector", "plain"])
@pytest.mark.parametrize("case", ["fp32-text", "native-dspark"])
def test_stored_tensors_agree_on_every_kernel_path(case: str, path: cpu.Path) -> None:
    """The others than the best of this CPU; `test_twins_on_another_cpu` compiles them for a CPU that has no other."""
    if cpu.missing(path):
        pytest.skip(f"this CPU lacks {cpu.missing(path)}")
    folder = GOLDENS / case
    model = load(folder, numerics=case.partition("-")[0], page_tokens=PAGE_TOKENS, kernels="fast")
    model.backend = Given(fast_ops(path))
    report = verify(folder, model=model)
    assert model.backend.ops().name == f"fast ({path})" and len(report.outcomes) > 40
    assert not report.failed, [o for o in report.outcomes if not o.ok]


def test_the_cases_are_all_here() -> None:
    assert len(MODELS) == 9
    assert {"fp32-text", "native-dspark", "fp32-vision-pad", "native-replay"} <= set(MODELS)
