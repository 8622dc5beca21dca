"""Every golden folder, through the plain ops and through the fast kernels."""

from pathlib import Path

import pytest

from rorqual.analysis.verify import verify

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


def test_the_cases_are_all_here() -> None:
    assert len(MODELS) == 9
    assert {"fp32-text", "native-dspark", "fp32-vision-pad", "native-replay"} <= set(MODELS)
