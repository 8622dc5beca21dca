"""`rorqual inspect`: what a config costs before a tensor is loaded. No torch in here."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.cli.output import Facts, print_facts, print_json, print_table
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.config import LayerRole, ModelConfig
    from rorqual.layout import KVLayout

LAYER_COLUMNS = ("layer", "part", "mode", "ratio", "KV source", "index source", "candidates", "engram", "bytes a token")


def command(
    source: Annotated[str, typer.Argument(metavar="DIR|CONFIG.JSON|PRESET", help="What to describe.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    page_tokens: Annotated[
        int | None, typer.Option(help="Tokens a page; a multiple of every ratio and of the candidate span.")
    ] = None,
) -> None:
    """Show the layer table, the parameters by part, and the cache bytes of a config or checkpoint."""
    from rorqual.layout import KVLayout

    config = read_config(source)
    layout = KVLayout(config) if page_tokens is None else KVLayout(config, page_tokens=page_tokens)
    if as_json:
        print_json({"source": source, "fingerprint": config.fingerprint(), **describe(config, layout)})
        return
    print_table(LAYER_COLUMNS, [tuple(row.values()) for row in layers(config, layout)], title=source)
    print()
    for title, facts in (
        ("parameters", parameters(config)),
        ("checkpoint", checkpoint(config)),
        ("cache", cache(layout)),
    ):
        print_facts(title, facts)


def read_config(source: str) -> ModelConfig:
    """The config named by a folder, a config.json, an inference_config.json, or a preset.

    A path that exists wins over a preset of the same name. Raises InputError naming the presets when it is neither.
    """
    from rorqual.config import ModelConfig, presets

    path = Path(source)
    # An empty name would be the folder that we happen to be in.
    if source and path.exists():
        return ModelConfig.from_json(path)
    if source in presets.NAMES:
        return presets.load(source)
    raise InputError(f"'{source}' is neither a folder, a config file, nor a preset ({', '.join(presets.NAMES)})")


def describe(config: ModelConfig, layout: KVLayout) -> dict[str, object]:
    """The document of `--json`; counts of parameters, bytes of everything else."""
    return {
        "layers": layers(config, layout),
        "parameters": parameters(config),
        "checkpoint": checkpoint(config),
        "cache": cache(layout),
    }


def layers(config: ModelConfig, layout: KVLayout) -> list[Facts]:
    """One row a layer, the drafts last, its columns those of `LAYER_COLUMNS`."""
    own_bytes = {source.layer_id: source.bytes_per_token for source in layout.sources}
    return [_layer(role, own_bytes.get(role.layer_id, Fraction(0))) for role in config.roles]


def _layer(role: LayerRole, own_bytes: Fraction) -> Facts:
    return {
        "layer": role.layer_id,
        "part": str(role.part),
        "mode": str(role.mode),
        "ratio": role.ratio,
        "kv_source": role.kv_source,
        "index_source": role.index_source,
        "candidates": "source" if role.is_candidate_source else "user" if role.uses_candidates else None,
        "engram": role.engram_index,
        "bytes_per_token": _plain(own_bytes),
    }


def parameters(config: ModelConfig) -> Facts:
    """Parameters by part, then the sums: everything, the backbone, and what one token is multiplied with."""
    from rorqual.inventory.parameters import active_parameters, backbone_parameters, parameters_by_part

    by_part = parameters_by_part(config)
    active = active_parameters(config)
    return {
        **by_part,
        "total": sum(by_part.values()),
        "backbone": backbone_parameters(by_part),
        "active_decode": active.decode,
        "active_prefill": active.prefill,
        "active_head": active.head,
    }


def checkpoint(config: ModelConfig) -> Facts:
    """What a checkpoint of this config holds, file headers left out."""
    from rorqual.inventory.names import expected_tensors

    tensors = expected_tensors(config).values()
    return {"tensors": len(tensors), "tensor_bytes": sum(tensor.nbytes for tensor in tensors)}


def cache(layout: KVLayout) -> Facts:
    """Bytes of global KV, which grows with tokens, and of a sequence's private state, which does not."""
    return {
        "bytes_per_token": _plain(layout.bytes_per_token),
        "page_tokens": layout.page_tokens,
        "page_bytes": layout.page_bytes,
        "window_row_bytes": layout.window_row_bytes,
        "ring_rows": layout.ring_rows,
        "window_bytes_logical": layout.window_bytes_logical,
        "window_bytes_allocated": layout.window_bytes_allocated,
        "tail_bytes_logical": layout.tail_bytes_logical,
        "tail_bytes_allocated": layout.tail_bytes,
        "draft_window_bytes": layout.draft_window_bytes,
        "history_bytes": layout.history_bytes,
        "sequence_bytes_logical": layout.sequence_bytes_logical,
        "sequence_bytes_allocated": layout.sequence_bytes_allocated,
    }


def _plain(number: Fraction) -> int | float:
    """Whole bytes as an integer; an odd config may have a half or a quarter over."""
    return number.numerator if number.denominator == 1 else float(number)
