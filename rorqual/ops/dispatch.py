"""Which function serves an op: the plain torch twins, or the kernels.

    ops = Backend("auto").ops()        # once a forward: twins and kernels never mix within one

On a CPU the kernels are Numba's (`fast_ops`). On a CUDA device they are Triton's where Triton is installed
(`triton_ops`): the ops that read the packed cache, plain torch for everything else.
    out = ops.sparse_attention(...)

To add an op: write `reference/<family>.py` and its twin `fast/<family>.py` of the same signature, add a field to `Ops`,
name both functions in `reference_ops` and `fast_ops`, and the twin's kernels in `_steps`. A Triton twin goes to
`triton/<family>.py` and is named in `triton_ops`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from rorqual.errors import ConfigError
from rorqual.formats import codec
from rorqual.formats.codec import Packed
from rorqual.formats.spec import FORMATS, NumberFormat
from rorqual.log import logger
from rorqual.ops.reference import attention, experts, gather, hyper, index_scores, linear, norm, pool, rope, topk

if TYPE_CHECKING:
    from rorqual.ops.cpu import Path

Mode = Literal["auto", "fast", "plain"]
Progress = Callable[[int, int], None]
"""Called with (done, total)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regions:
    """Whole stretches of a layer in one kernel, for the few rows of decode and verification.

    Each is the twin of a named function of the model, which runs where there is none, or where somebody watches.

    pack_*: what a layer's weights are handed in, made once; None for weights that the kernel does not read.
    """

    pack_moe: Callable[..., Any]
    moe: Callable[..., Tensor]
    """`model.moe.MoE.forward`."""
    pack_attention: Callable[..., Any]
    latents: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """`model.attention.Attention.latents`."""
    project: Callable[..., Tensor]
    """`model.attention.Attention.project`."""
    pack_mix: Callable[..., Any]
    enter: Callable[..., tuple[Tensor, ...]]
    """`model.layer.Layer.enter_sublayer`."""
    enter_long: Callable[..., tuple[Tensor, ...]]
    """The same of long segments, which need not have the row kernel's bits."""
    leave_long: Callable[..., Tensor]
    """`model.layer.Layer.leave_sublayer` of long segments."""
    window: Callable[..., Tensor | None]
    """`model.kv.PagedKV.window`."""
    pack_engram: Callable[..., Any]
    engram: Callable[..., Tensor | None]
    """`model.engram.Engram.forward`."""
    pack_compressor: Callable[..., Any]
    compress: Callable[..., None]
    """`model.compressor.Compressor.forward`."""
    pack_indexer: Callable[..., Any]
    index_queries: Callable[..., tuple[Tensor, Tensor]]
    """`model.indexer.Indexer.queries`."""
    index_choose: Callable[..., tuple[Tensor, Tensor] | None]
    """`model.indexer.Query`'s `from_all` and `from_pool`."""
    pack_layer: Callable[..., Any]
    place: Callable[..., Any]
    """What the layers of a step share."""
    reads: Callable[..., bool]
    """Whether there is a kernel of whole layers for a cache."""
    begin: Callable[..., Any]
    finish: Callable[..., tuple[Tensor, Tensor]]
    """The two halves of `model.layer.Layer.forward`."""
    pack_head: Callable[..., Any]
    head: Callable[..., Tensor]
    """`model.backbone.Backbone`'s `hidden` and `logits`."""
    mean: Callable[..., Tensor]
    """`model.backbone.copy_mean`."""
    pack_ngrams: Callable[..., Any]
    ngrams: Callable[..., Tensor]
    """`model.forward.ngram_rows`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """One function an op; signatures and meaning are those of `formats.codec` and `ops.reference`."""

    name: str
    quantize: Callable[..., Packed]
    dequantize: Callable[..., Tensor]
    gather_rows: Callable[..., Tensor]
    index_scores: Callable[..., Tensor]
    index_scores_at: Callable[..., Tensor]
    topk_lowest: Callable[..., Tensor]
    pool_groups: Callable[..., Tensor]
    sparse_attention: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    grouped_linear: Callable[..., Tensor]
    experts: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    rotate: Callable[..., Tensor]
    hyper_mix: Callable[..., hyper.Coefficients]
    hyper_collapse: Callable[..., Tensor]
    hyper_expand: Callable[..., Tensor]
    regions: Regions | None = None
    """None where every row goes op by op."""


def reference_ops() -> Ops:
    """The plain torch twins, with torch's own gradients."""
    return Ops(
        name="plain",
        quantize=codec.quantize,
        dequantize=codec.dequantize,
        gather_rows=gather.gather_rows,
        index_scores=index_scores.index_scores,
        index_scores_at=index_scores.index_scores_at,
        topk_lowest=topk.topk_lowest,
        pool_groups=pool.pool_groups,
        sparse_attention=attention.sparse_attention,
        linear=linear.linear,
        grouped_linear=linear.grouped_linear,
        experts=experts.experts,
        rms_norm=norm.rms_norm,
        rotate=rope.rotate,
        hyper_mix=hyper.hyper_mix,
        hyper_collapse=hyper.hyper_collapse,
        hyper_expand=hyper.hyper_expand,
    )


def fast_ops(path: Path | None = None) -> Ops:
    """The kernels; each compiles at its first call unless warmed.

    Args:
        path: of `rorqual.ops.cpu`; None takes the best this CPU runs.

    Raises:
        ConfigError: an unknown path, or one whose CPU features are missing.
    """
    # Numba and LLVM take half a second to import; who asks for plain ops does without.
    from rorqual.ops import cpu
    from rorqual.ops.fast import attention, codec, experts, gather, hyper, index_scores, linear, norm, pool, rope, topk

    path = cpu.best_path() if path is None else cpu.check_path(path)
    return Ops(
        name=f"fast ({path})",
        quantize=codec.quantize_fast,
        dequantize=codec.dequantize_fast,
        gather_rows=partial(gather.gather_rows, path=path),
        index_scores=partial(index_scores.index_scores, path=path),
        index_scores_at=partial(index_scores.index_scores_at, path=path),
        topk_lowest=topk.topk_lowest,
        pool_groups=pool.pool_groups,
        sparse_attention=partial(attention.sparse_attention, path=path),
        linear=partial(linear.linear, path=path),
        grouped_linear=partial(linear.grouped_linear, path=path),
        experts=partial(experts.experts, path=path),
        rms_norm=norm.rms_norm,
        rotate=rope.rotate,
        hyper_mix=partial(hyper.hyper_mix, path=path),
        hyper_collapse=hyper.hyper_collapse,
        hyper_expand=hyper.hyper_expand,
        regions=_regions(path),
    )


def _regions(path: Path) -> Regions | None:
    """Where products are vector products; the plain loops are no faster for being in one kernel."""
    from rorqual.ops.fast import (
        compress_rows,
        engram_rows,
        head_rows,
        hyper_panels,
        hyper_rows,
        index_choice,
        index_rows,
        latent_rows,
        layer_parts,
        layer_rows,
        linear,
        moe_rows,
        ngram_rows,
        window,
    )

    if not linear.has_vectors(path):
        return None
    return Regions(
        pack_moe=moe_rows.MoeRows.of,
        moe=moe_rows.moe_rows,
        pack_attention=latent_rows.AttentionRows.of,
        latents=latent_rows.latents,
        project=latent_rows.project,
        pack_mix=hyper_rows.MixRows.of,
        enter=hyper_rows.enter,
        enter_long=hyper_panels.enter,
        leave_long=hyper_panels.leave,
        window=window.window_rows,
        pack_engram=engram_rows.EngramRows.of,
        engram=engram_rows.engram_rows,
        pack_compressor=compress_rows.CompressRows.of,
        compress=compress_rows.compress_rows,
        pack_indexer=index_rows.IndexRows.of,
        index_queries=index_rows.queries,
        index_choose=partial(index_choice.choose, path=path),
        pack_layer=layer_parts.LayerRows.of,
        place=layer_parts.Placed,
        reads=layer_rows.reads,
        begin=layer_rows.begin,
        finish=layer_rows.finish,
        pack_head=head_rows.HeadRows.of,
        head=head_rows.head,
        mean=head_rows.mean,
        pack_ngrams=ngram_rows.NgramRows.of,
        ngrams=ngram_rows.rows,
    )


def triton_ops() -> Ops:
    """The plain ops with Triton's in the place of those that read the packed cache.

    They take tensors of a CUDA device, or of any where Triton interprets (TRITON_INTERPRET=1 before it is imported);
    each compiles at its first call.

    Raises:
        ConfigError: Triton is not installed.
    """
    if not has_triton():
        raise ConfigError("triton is not installed; on Linux: pip install 'rorqual[triton]'")
    from rorqual.ops.triton import attention, index_scores

    return replace(
        reference_ops(),
        name="triton",
        index_scores=index_scores.index_scores,
        index_scores_at=index_scores.index_scores_at,
        sparse_attention=attention.sparse_attention,
    )


def has_triton() -> bool:
    """Whether the extra is installed; nothing is imported."""
    return find_spec("triton") is not None


def _steps() -> list[Callable[[], None]]:
    """What makes everything that `fast_ops()` runs start at once, step by step."""
    from rorqual.ops import cpu
    from rorqual.ops.fast import (
        attention,
        compress_rows,
        engram_rows,
        experts,
        gather,
        head_rows,
        hyper,
        hyper_panels,
        hyper_rows,
        index_choice,
        index_rows,
        index_scores,
        latent_rows,
        layer_rows,
        linear,
        moe_rows,
        ngram_rows,
        norm,
        pool,
        rope,
        topk,
        window,
    )

    path = cpu.best_path()
    ops = (attention, index_scores, topk, gather, linear)
    regions = (
        hyper_panels,
        hyper_rows,
        latent_rows,
        moe_rows,
        window,
        engram_rows,
        compress_rows,
        index_rows,
        index_choice,
        layer_rows,
        head_rows,
        ngram_rows,
    )
    by_path = (module.kernels(path) for module in (*ops, *regions))
    kernels = itertools.chain(*by_path, experts.kernels(path), norm.KERNELS, hyper.KERNELS, rope.KERNELS, pool.KERNELS)
    return [*(kernel.compile for kernel in kernels), *(partial(_warm_codec, fmt) for fmt in FORMATS.values())]


def _warm_codec(fmt: NumberFormat) -> None:
    """The codec's kernels take their types from their first call."""
    from rorqual.ops.fast.codec import dequantize_fast, quantize_fast

    for dtype in (torch.float32, torch.bfloat16):
        packed = quantize_fast(torch.ones(1, 2 * fmt.width_multiple, dtype=dtype), fmt)
        dequantize_fast(packed.codes, packed.scales, fmt)


class Backend:
    """Gives a forward its ops.

    Args:
        mode: "plain" for the twins; "fast" for the kernels, compiled as they are needed; "auto" for the kernels as soon
            as all of them are compiled, and the twins until then. Kernels that the disk cache holds are loaded before
            the first forward; when one has to be compiled, a thread compiles and the forward goes on.
        device: where the forward runs. On another than the CPU "fast" is `triton_ops`, and "auto" is that or, where
            Triton is not installed, the twins; there is nothing to compile ahead.

    Raises:
        ConfigError: an unknown mode, or "fast" on a device without kernels.
    """

    def __init__(self, mode: str = "auto", device: torch.device | str = "cpu") -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"kernels is '{mode}', must be one of {', '.join(get_args(Mode))}")
        self.mode = mode
        self._plain = reference_ops()
        self._fast: Ops | None = None
        self._compiles = torch.device(device).type == "cpu"
        if not self._compiles and (mode == "fast" or (mode == "auto" and has_triton())):
            self._fast = triton_ops()
        self._starting = threading.Lock()
        self._compiler: threading.Thread | None = None
        # Set when the thread is done, or knows that it will take its time.
        self._settled = threading.Event()

    def ops(self) -> Ops:
        """The ops of one forward."""
        if self.mode == "plain" or not self._compiles:
            return self._fast or self._plain
        if self._fast is None and self.mode == "fast":
            self._fast = fast_ops()
        if self._fast is None:
            self._start()
            self._settled.wait()
        return self._fast or self._plain

    def warm(self, progress: Progress | None = None) -> None:
        """Compile everything, or load it from the disk cache, and return when it is done."""
        if self.mode == "plain" or not self._compiles:
            return
        steps = _steps()
        for done, step in enumerate(steps):
            if progress is not None:
                progress(done, len(steps))
            step()
        if progress is not None:
            progress(len(steps), len(steps))
        self._fast = self._fast or fast_ops()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until `auto` has settled on the kernels or given them up; False when the time ran out."""
        if self._compiler is not None:
            self._compiler.join(timeout_s)
            return not self._compiler.is_alive()
        return True

    def _start(self) -> None:
        with self._starting:
            if self._compiler is None:
                # Not a daemon: one that is killed inside LLVM may take the process with it. It stops between kernels.
                self._compiler = threading.Thread(target=self._compile, name="rorqual-kernels", daemon=False)
                self._compiler.start()

    def _compile(self) -> None:
        started = time.monotonic()
        try:
            from rorqual.ops.fast.kernel import on_compilation

            with on_compilation(self._go_on):
                for step in _steps():
                    if not threading.main_thread().is_alive():
                        return
                    step()
            self._fast = fast_ops()
            logger.info("kernels are ready after %.1f s: %s", time.monotonic() - started, self._fast.name)
        except Exception as error:  # whatever the compiler raises: a machine without kernels still serves
            logger.warning("kernels do not compile on this machine, the plain ops serve: %s", error)
        finally:
            self._settled.set()

    def _go_on(self) -> None:
        if not self._settled.is_set():
            logger.info("kernels are compiling (first run on this machine); the plain ops serve until then")
            self._settled.set()
