"""A device that every machine has: tensors that live "elsewhere", hold their values on the CPU, and refuse to mix.

Under `elsewhere()` whatever is made on, or moved to, its device (by the name of torch's "meta") is such a tensor. An
operation on one of them and on a CPU tensor fails as it would with a GPU, unless that is a scalar, a copy or a move;
what runs gives the CPU's values. So code that is to run on any device is tried on one, where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
_CROSSES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class _There(Tensor):
    """One tensor of the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> _There:
        made: _There = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=None if held.is_sparse else held.stride(),
            storage_offset=None if held.is_sparse else held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.held.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"There({self.held!r})"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [one for one in given if isinstance(one, _There)]
    here = [one for one in given if not isinstance(one, _There) and one.dim()]
    if there and here and func not in _CROSSES:
        shapes = [[tuple(one.shape) for one in some] for some in (there, here)]
        raise AssertionError(f"{func} of {shapes[0]} elsewhere and {shapes[1]} here")
    device = kwargs.get("device")
    stays = bool(there) if device is None else torch.device(device) == DEVICE
    if func is torch.ops.aten.copy_.default:
        stays = isinstance(args[0], _There)
    plain = tree_map(lambda one: one.held if isinstance(one, _There) else one, (args, kwargs))
    if device is not None:
        plain[1]["device"] = torch.device("cpu")
    out = func(*plain[0], **plain[1])
    if not stays:
        return out
    out = tree_map(lambda one: _There(one) if isinstance(one, Tensor) else one, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


class _Values(TorchFunctionMode):
    """Makes tensors of Python values here and moves them: torch makes them on the device, out of a mode's sight."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device) == DEVICE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """While it is entered, the device that it gives has values."""
    with _Operations(), _Values():
        yield DEVICE
