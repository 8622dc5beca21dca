"""The vision tower: patches -> ViT -> aligner -> the embeddings of an image's positions (SPEC section 10).

An image is encoded whole and once; its positions then enter the language model in chunks of any size, attended
causally. Products run in fp32 whatever `act_dtype`; with bf16 every linear, norm, rotation, attention output, gated
product and residual sum is rounded once, which is what a bf16 model computes.

Shapes: P patches (R x Q of them, row-major), V ViT width, H heads, C head width, F features (cells), T positions of the
image span, d width of the language model, r downsample ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rorqual.config import VisionConfig
from rorqual.config.image_grid import ImageGrid
from rorqual.errors import InputError
from rorqual.model.vision.image import ImageInput

NORM_EPS = 1e-6

# Attention scores held at once, over all heads: 2^24 fp32 numbers are 64 MiB.
SCORE_BUDGET = 2**24

TapFunction = Callable[[str, Tensor], Tensor]


class ParamScope(Protocol):
    """Where weights come from: a checkpoint's scope at the root of the names."""

    def param(self, name: str, dtype: torch.dtype = ...) -> Tensor:
        """A converted copy of the named tensor."""
        ...


def _parameter(scope: ParamScope, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> nn.Parameter:
    """A frozen parameter; whoever trains the tower calls requires_grad_."""
    value = scope.param(name, dtype)
    assert tuple(value.shape) == shape, f"{name}: {tuple(value.shape)}, not {shape}"
    return nn.Parameter(value, requires_grad=False)


class _Linear(nn.Module):
    """x W^T + b: fp32 product and bias, one rounding to the input's dtype."""

    def __init__(
        self, scope: ParamScope, name: str, out_in: tuple[int, int], dtype: torch.dtype, *, bias: bool
    ) -> None:
        super().__init__()
        self.weight = _parameter(scope, f"{name}.weight", dtype, out_in)
        self.bias = _parameter(scope, f"{name}.bias", dtype, out_in[:1]) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)


class _Norm(nn.Module):
    """RMSNorm in fp32 with fp32 weights, one rounding to the input's dtype."""

    def __init__(self, scope: ParamScope, name: str, width: int) -> None:
        super().__init__()
        self.weight = _parameter(scope, f"{name}.weight", torch.float32, (width,))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return (self.weight * (wide * scale)).to(x.dtype)


def rotation_angles(grid: ImageGrid, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [P, C / 2], fp32, of the 2-D RoPE: the first half of the angles turns with the row, the second with
    the column, both by f_j = theta^(-2j / (C / 2))."""
    half = head_dim // 2
    frequency = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    row = torch.arange(grid.patch_rows, dtype=torch.float32).repeat_interleave(grid.patch_cols)
    col = torch.arange(grid.patch_cols, dtype=torch.float32).repeat(grid.patch_rows)
    angles = torch.cat([row[:, None] * frequency, col[:, None] * frequency], dim=-1)
    return angles.cos(), angles.sin()


def rotate_halves(x_HPC: Tensor, cos_PC: Tensor, sin_PC: Tensor) -> Tensor:
    """Turn (t1, t2), the two halves of each head, by the patch's angles: fp32 inside, one rounding."""
    t1, t2 = x_HPC.float().chunk(2, dim=-1)
    return torch.cat([t1 * cos_PC - t2 * sin_PC, t2 * cos_PC + t1 * sin_PC], dim=-1).to(x_HPC.dtype)


def full_attention(q_HPC: Tensor, k_HPC: Tensor, v_HPC: Tensor, score_budget: int = SCORE_BUDGET) -> Tensor:
    """Every patch sees every patch, scaled by C^-.5; fp32 result [H, P, C].

    Query rows go in tiles of at most `score_budget` scores over all heads (but at least one row), so that memory
    grows with P and not with its square. A row's softmax never spans two tiles. Written out: torch's fused CPU kernel
    is twice as fast on the largest images, but approximates exp, and one such error in 10^6 flips a cache code later.
    """
    heads, patches, width = q_HPC.shape
    tile = max(1, score_budget // (heads * patches))
    q, k, v = (x.float() for x in (q_HPC, k_HPC, v_HPC))
    tiles = []
    for i in range(0, patches, tile):
        scores = (q[:, i : i + tile] @ k.transpose(-1, -2)) * width**-0.5
        tiles.append(torch.softmax(scores, dim=-1) @ v)
    return torch.cat(tiles, dim=1)


class _Attention(nn.Module):
    """Full attention within one image. wqkv is q | k | v."""

    def __init__(self, scope: ParamScope, name: str, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.wqkv = _Linear(scope, f"{name}.wqkv", (3 * width, width), dtype, bias=True)
        self.wo = _Linear(scope, f"{name}.wo", (width, width), dtype, bias=True)

    def forward(self, x_PV: Tensor, cos_PC: Tensor, sin_PC: Tensor) -> Tensor:
        q_HPC, k_HPC, v_HPC = self.wqkv(x_PV).view(x_PV.shape[0], 3, self.heads, -1).permute(1, 2, 0, 3)
        q_HPC, k_HPC = (rotate_halves(x, cos_PC, sin_PC) for x in (q_HPC, k_HPC))
        o_HPC = full_attention(q_HPC, k_HPC, v_HPC).to(x_PV.dtype)
        out_PV: Tensor = self.wo(o_HPC.transpose(0, 1).flatten(1))
        return out_PV


class _Mlp(nn.Module):
    """SwiGLU without biases; w1 holds the gate's rows, then the up projection's."""

    def __init__(self, scope: ParamScope, name: str, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.w1 = _Linear(scope, f"{name}.w1", (2 * inner, width), dtype, bias=False)
        self.w2 = _Linear(scope, f"{name}.w2", (width, inner), dtype, bias=False)

    def forward(self, x_PV: Tensor) -> Tensor:
        gate, up = self.w1(x_PV).float().chunk(2, dim=-1)
        out_PV: Tensor = self.w2((F.silu(gate) * up).to(x_PV.dtype))
        return out_PV


class _Block(nn.Module):
    """One pre-norm ViT layer."""

    def __init__(self, scope: ParamScope, name: str, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = _Norm(scope, f"{name}.norm1", config.hidden_size)
        self.attn = _Attention(scope, f"{name}.attn", config, dtype)
        self.norm2 = _Norm(scope, f"{name}.norm2", config.hidden_size)
        self.mlp = _Mlp(scope, f"{name}.mlp", config, dtype)

    def forward(self, x_PV: Tensor, cos_PC: Tensor, sin_PC: Tensor) -> Tensor:
        x_PV = x_PV + self.attn(self.norm1(x_PV), cos_PC, sin_PC)
        out_PV: Tensor = x_PV + self.mlp(self.norm2(x_PV))
        return out_PV


class _Vit(nn.Module):
    """Patches [P, 3, p, p] -> [P, V], final norm included."""

    def __init__(self, scope: ParamScope, name: str, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width, pixels = config.hidden_size, 3 * config.patch_size**2
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        proj = _Linear(scope, f"{name}.patch_embed.proj", (width, pixels), dtype, bias=True)
        self.patch_embed = nn.ModuleDict({"proj": proj})
        self.blocks = nn.ModuleList(
            _Block(scope, f"{name}.blocks.{i}", config, dtype) for i in range(config.num_hidden_layers)
        )
        self.norm = _Norm(scope, f"{name}.norm", width)

    def forward(self, patches: Tensor, grid: ImageGrid) -> Tensor:
        x_PV: Tensor = self.patch_embed["proj"](patches.flatten(1))
        cos_PC, sin_PC = (x.to(x_PV.device) for x in rotation_angles(grid, self.head_dim, self.rope_theta))
        for block in self.blocks:
            x_PV = block(x_PV, cos_PC, sin_PC)
        normed_PV: Tensor = self.norm(x_PV)
        return normed_PV


class _Aligner(nn.Module):
    """The r x r patches of a cell side by side, then d, exact GELU, d: [P, V] -> [F, d].

    A cell's inputs are ordered channel, row, column; cells are padded with zeros at the right and bottom.
    """

    def __init__(self, scope: ParamScope, name: str, ratio: int, widths: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        width, hidden = widths
        self.ratio = ratio
        self.w1 = _Linear(scope, f"{name}.w1", (hidden, width * ratio**2), dtype, bias=True)
        self.w2 = _Linear(scope, f"{name}.w2", (hidden, hidden), dtype, bias=True)

    def forward(self, vit_PV: Tensor, grid: ImageGrid) -> Tensor:
        hidden_Fd = F.gelu(self.w1(self._cells(vit_PV, grid)).float()).to(vit_PV.dtype)
        out_Fd: Tensor = self.w2(hidden_Fd)
        return out_Fd

    def _cells(self, vit_PV: Tensor, grid: ImageGrid) -> Tensor:
        """Pixel-unshuffle: [P, V] -> [F, V * r * r]."""
        r = self.ratio
        below, right = grid.rows * r - grid.patch_rows, grid.cols * r - grid.patch_cols
        map_RQV = F.pad(vit_PV.view(grid.patch_rows, grid.patch_cols, -1), (0, 0, 0, right, 0, below))
        return map_RQV.view(grid.rows, r, grid.cols, r, -1).permute(0, 2, 4, 1, 3).reshape(grid.features, -1)


def _untapped(_name: str, value: Tensor) -> Tensor:
    return value


class VisionTower(nn.Module):
    """ViT, aligner and the three learned delimiters of an image span. Parameters bear their checkpoint names.

    Args:
        config: its `vision` part. hidden_size: width d of the language model.
        scope: weights by their checkpoint names ("vision.blocks.0.norm1.weight", "aligner.w1.bias", "image_start").
        act_dtype: torch.float32, or torch.bfloat16 for native numerics; weights are held in it, norms in fp32.
    """

    def __init__(self, config: VisionConfig, hidden_size: int, scope: ParamScope, act_dtype: torch.dtype) -> None:
        super().__init__()
        self.act_dtype = act_dtype
        self.vision = _Vit(scope, "vision", config, act_dtype)
        widths = (config.hidden_size, hidden_size)
        self.aligner = _Aligner(scope, "aligner", config.downsample_ratio, widths, act_dtype)
        self.image_start = _parameter(scope, "image_start", act_dtype, (hidden_size,))
        self.image_newline = _parameter(scope, "image_newline", act_dtype, (hidden_size,))
        self.image_end = _parameter(scope, "image_end", act_dtype, (hidden_size,))

    def forward(self, image: ImageInput, tap: TapFunction | None = None) -> Tensor:
        """The embeddings [T, d] of an image span, T = `image.grid.tokens`, in `act_dtype`.

        tap: called with ("vit_out", [P, V]) and ("aligner_out", [F, d]); its results are used in their place.
        """
        if tap is None:
            tap = _untapped
        assert image.patches.shape[0] == image.grid.patches
        patches = image.patches.to(self.image_start.device, self.act_dtype)
        vit_PV = tap("vit_out", self.vision(patches, image.grid))
        features_Fd = tap("aligner_out", self.aligner(vit_PV, image.grid))
        return self.assemble(features_Fd, image.grid)

    def assemble(self, features_Fd: Tensor, grid: ImageGrid) -> Tensor:
        """Start, each row's features and a newline, end: [F, d] -> [T, d]."""
        rows = features_Fd.view(grid.rows, grid.cols, -1)
        newline = self.image_newline.expand(grid.rows, 1, -1)
        body = torch.cat([rows, newline], dim=1).flatten(0, 1)
        return torch.cat([self.image_start[None], body, self.image_end[None]])


def merge_image_embeddings(embed_Td: Tensor, is_image_T: Tensor, image_Sd: Tensor) -> Tensor:
    """Token embeddings [T, d] with the image-span positions replaced by `image_Sd`, in order.

    image_Sd holds exactly the span positions among these T: with a chunk that starts or ends inside a span, its part.
    Raises InputError when the two counts differ.
    """
    wanted = int(is_image_T.sum())
    if wanted != image_Sd.shape[0]:
        raise InputError(f"the prompt has {wanted} image positions here, its images fill {image_Sd.shape[0]}")
    merged_Td = embed_Td.clone()
    merged_Td[is_image_T] = image_Sd.to(embed_Td.dtype)
    return merged_Td
