"""When Triton's ops serve: on a device that is not the CPU, where Triton is installed."""

from __future__ import annotations

import inspect
from dataclasses import fields
from types import ModuleType

import pytest
import torch

from rorqual.errors import ConfigError
from rorqual.ops import dispatch
from rorqual.ops.dispatch import Backend, Ops, reference_ops, triton_ops
from tests.ops.on_triton import DEVICE

from rorqual.ops.triton import attention, index_scores  # isort: skip

OURS = {"index_scores": index_scores, "index_scores_at": index_scores, "sparse_attention": attention}


def test_three_ops_are_tritons_and_the_others_plain() -> None:
    ours, plain = triton_ops(), reference_ops()
    assert ours.name == "triton"
    for name in (field.name for field in fields(Ops) if field.name not in ("name", "regions")):
        served: ModuleType | None = OURS.get(name)
        expected = getattr(served or plain, name)
        assert getattr(ours, name) is expected
        parameters = [list(inspect.signature(op).parameters.values()) for op in (expected, getattr(plain, name))]
        assert parameters[0] == parameters[1]


@pytest.mark.parametrize(("mode", "name"), [("plain", "plain"), ("fast", "triton"), ("auto", "triton")])
def test_a_device_without_numba_has_tritons_ops(mode: str, name: str) -> None:
    backend = Backend(mode, "cuda")
    backend.warm()
    assert backend.ops().name == name and backend.wait()


@pytest.mark.parametrize("mode", ["auto", "fast", "plain"])
def test_without_triton_auto_is_plain_and_fast_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    if mode == "fast":
        with pytest.raises(ConfigError, match=r"triton is not installed; on Linux: pip install 'rorqual\[triton\]'"):
            Backend(mode, "cuda")
    else:
        assert Backend(mode, "cuda").ops().name == "plain"


@pytest.mark.skipif(DEVICE.type == "cpu", reason="interpreted, Triton takes tensors of the CPU too")
def test_tensors_of_the_cpu_take_the_plain_op() -> None:
    q, held = torch.ones(1, 1, 32), torch.ones(3, 32)
    args = (q, torch.tensor([2]), held, 0, 0, 3, None, None, None, torch.zeros(1), 1.0, False)
    assert torch.equal(attention.sparse_attention(*args), reference_ops().sparse_attention(*args))
