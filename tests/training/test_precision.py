"""Products in bf16 where the device gains by it, and nowhere else."""

import pytest
import torch

from rorqual.ops import cpu
from rorqual.training.precision import gains_by_bf16, reduced_products

CPU = torch.device("cpu")


@pytest.mark.parametrize(("features", "inside"), [(frozenset({"amx-bf16"}), "medium"), (frozenset(), "highest")])
def test_a_cpu_gains_by_its_tiles(monkeypatch: pytest.MonkeyPatch, features: frozenset[str], inside: str) -> None:
    monkeypatch.setattr(cpu, "features", lambda: features)
    assert gains_by_bf16(CPU) == (inside == "medium")
    before = torch.get_float32_matmul_precision()
    assert before == "highest"
    with pytest.raises(RuntimeError, match="stop"), reduced_products(CPU, "auto"):
        assert torch.get_float32_matmul_precision() == inside
        raise RuntimeError("stop")
    assert torch.get_float32_matmul_precision() == before


def test_off_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "features", lambda: frozenset({"amx-bf16"}))
    with reduced_products(CPU, "off"):
        assert torch.get_float32_matmul_precision() == "highest"
