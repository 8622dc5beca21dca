"""How a model is spread over ranks, one device each: what is split, what every rank holds a copy of.

`count` ranks hold one replica of the model. They form `dp_attention` groups of `tp`:

    routed experts     `ep` shards of whole experts; count / ep ranks split the width of each
    Engram tables      by rows over all ranks, when they are on the device
    Wq_b, sink, Wo_a, Wo_b, shared expert, embedding and head     over the tp ranks of a group
    everything else    a copy a rank: Wq_a, Wkv, compressors, indexers, routers, norms, mHC, Engram projections, vision

KV: there is one KV head, so tensor parallelism has nothing to split. Every rank of a group stores all global KV and all
windows of the group's sequences; only groups (`dp_attention`) store different ones. The indexers are copied as well:
split by index heads they would have to add up a score for every key of the context.
"""

from __future__ import annotations

from dataclasses import dataclass

from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.inventory.names import GROUP, PARTS
from rorqual.planner.placement import Placement, TensorKind, home, tensor_kinds

MAX_COUNT = 1 << 16
_BY_HEAD = {"wq_b": 0, "wo_a": 0, "wo_b": 1}  # stem of a linear weight -> the axis that is split
_BY_WIDTH = {"w1": 0, "w3": 0, "w2": 1}
_BY_WORD = {"embed.weight", "head.weight"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """A legal arrangement, made by `arrange`; tp x dp_attention == ep x expert_tp == count."""

    count: int
    tp: int
    dp_attention: int
    ep: int

    @property
    def expert_tp(self) -> int:
        """Ranks that split the width of one routed expert."""
        return self.count // self.ep


def arrange(
    config: ModelConfig,
    count: int = 1,
    *,
    tp: int | None = None,
    dp_attention: int | None = None,
    ep: int | None = None,
) -> Ranks:
    """An arrangement of `count` ranks. By default every rank has its own sequences, and experts are spread widest.

    >>> from rorqual.config import presets
    >>> release = presets.load("v4.1-flash")
    >>> arrange(release, 8)
    Ranks(count=8, tp=1, dp_attention=8, ep=8)
    >>> arrange(release, 8, tp=4), arrange(release, 8, tp=8, ep=1).expert_tp
    (Ranks(count=8, tp=4, dp_attention=2, ep=8), 8)

    Unit: ranks. Source: the config's heads, o_groups and experts, and the 32 x 32 tiles of FP8 weights.
    Raises InputError naming the option and its legal values.
    """
    for name, value in (("count", count), ("tp", tp), ("dp-attention", dp_attention), ("ep", ep)):
        if value is not None and not 1 <= value <= MAX_COUNT:
            raise InputError(f"--{name} must be in 1..{MAX_COUNT}; got {value}")
    if tp is None:
        tp = max(1, count // dp_attention) if dp_attention is not None else 1
    dp_attention = max(1, count // tp) if dp_attention is None else dp_attention
    if tp * dp_attention != count:
        raise InputError(f"--tp x --dp-attention must be --count; got {tp} x {dp_attention}, not {count}")
    divisors = [way for way in range(1, count + 1) if count % way == 0]
    _one_of("tp", tp, [way for way in divisors if _attention_splits(config, way)], _tp_rule(config))
    legal = [way for way in divisors if _experts_split(config, way, count // way)]
    if not legal:
        raise InputError(f"--count must allow an --ep, which is {_ep_rule(config, count)}; {count} allows none")
    _one_of("ep", legal[-1] if ep is None else ep, legal, _ep_rule(config, count))
    return Ranks(count=count, tp=tp, dp_attention=dp_attention, ep=legal[-1] if ep is None else ep)


def rank_share(kind: TensorKind, ranks: Ranks) -> TensorKind:
    """What one rank holds of tensors that are alike: the fullest rank, where rows do not divide evenly.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.placement import tensor_kinds
    >>> release = presets.load("v4.1-flash")
    >>> ranks = arrange(release, 8, tp=4)
    >>> shapes = {kind.spec.name: rank_share(kind, ranks).spec.shape for kind in tensor_kinds(release)}
    >>> shapes["wq_b.weight"], shapes["wo_b.weight"], shapes["attn.attn_sink"]
    ((8192, 1280), (5120, 2048), (16,))

    Unit: as `TensorKind`. Source: the table at the top of this module.
    """
    spec = kind.spec
    if spec.part in ("experts", "draft_experts"):
        assert kind.count % ranks.ep == 0, spec
        shape = _split(spec.shape, _BY_WIDTH[spec.name.partition(".")[0]], ranks.expert_tp)
        return TensorKind(spec=spec._replace(shape=shape), count=kind.count // ranks.ep)
    if spec.part == "engram_tables":
        return TensorKind(spec=spec._replace(shape=_split(spec.shape, 0, ranks.count)), count=kind.count)
    axis = _group_axis(spec.part, spec.name)
    if axis is None:
        return kind
    return TensorKind(spec=spec._replace(shape=_split(spec.shape, axis, ranks.tp)), count=kind.count)


def rank_bytes(config: ModelConfig, ranks: Ranks, placement: Placement) -> dict[str, int]:
    """Bytes of weights that the fullest rank holds on its device, by part.

    >>> from rorqual.config import presets
    >>> release = presets.load("v4.1-flash")
    >>> one = rank_bytes(release, arrange(release, 8), Placement(engram="host"))
    >>> one["experts"], one["attention"], one.get("engram_tables")
    (36097228800, 5069721600, None)
    >>> rank_bytes(release, arrange(release, 8, tp=8), Placement())["attention"]
    955280640

    Source: `rank_share`. An eighth of the experts, all of the attention; with tp 8 Wq_a, Wkv and their
    norms stay whole: 367,503,360 + (5,069,721,600 - 367,503,360) / 8.
    """
    sums = dict.fromkeys(PARTS, 0)
    for kind in tensor_kinds(config):
        if home(kind.spec.part, placement) == "device":
            sums[kind.spec.part] += rank_share(kind, ranks).nbytes
    return {part: count for part, count in sums.items() if count}


def sharing(part: str, ranks: Ranks) -> str:
    """How a part is spread, in words.

    >>> [sharing(part, Ranks(count=8, tp=2, dp_attention=4, ep=8)) for part in ("experts", "attention", "norms")]
    ['8 shards of experts', 'heads over 2 ranks, Wq_a and Wkv a copy each', 'a copy each']

    Unit: none. Source: `rank_share`.
    """
    if ranks.count == 1:
        return "whole"
    if part in ("experts", "draft_experts"):
        width = f", each over {ranks.expert_tp} ranks" if ranks.expert_tp > 1 else ""
        return f"{ranks.ep} shards of experts{width}"
    if part == "engram_tables":
        return f"rows over {ranks.count} ranks"
    if ranks.tp == 1:
        return "a copy each"
    split = {
        "attention": f"heads over {ranks.tp} ranks, Wq_a and Wkv a copy each",
        "draft": f"heads, shared expert and Markov head over {ranks.tp} ranks, the rest a copy each",
        "shared": f"width over {ranks.tp} ranks",
        "embed": f"vocabulary over {ranks.tp} ranks",
        "head": f"vocabulary over {ranks.tp} ranks",
    }
    return split.get(part, "a copy each")


def _group_axis(part: str, name: str) -> int | None:
    """The axis along which a group's tp ranks split a tensor; None for a copy each."""
    stem = name.partition(".")[0]
    if part in ("attention", "draft"):
        if name == "attn.attn_sink":
            return 0
        if stem in _BY_HEAD:
            return _BY_HEAD[stem]
    if part in ("shared", "draft") and stem in _BY_WIDTH:
        return _BY_WIDTH[stem]
    if part in ("embed", "head", "draft") and name in _BY_WORD:
        return 0
    return None


def _split(shape: tuple[int, ...], axis: int, ways: int) -> tuple[int, ...]:
    return (*shape[:axis], -(-shape[axis] // ways), *shape[axis + 1 :])


def _attention_splits(config: ModelConfig, tp: int) -> bool:
    """Whole heads, whole output groups, and whole tiles of FP8 weights for each rank."""
    if config.num_attention_heads % tp or config.o_groups % tp:
        return False
    widths = [config.num_attention_heads * config.head_dim, config.o_groups * config.o_lora_rank]
    if config.n_shared_experts:
        widths.append(config.n_shared_experts * config.moe_intermediate_size)
    tile = GROUP if config.weights.dense == "fp8" else 1
    return tp == 1 or all(width % (tp * tile) == 0 for width in widths)


def _experts_split(config: ModelConfig, ep: int, expert_tp: int) -> bool:
    counts = _expert_counts(config)
    if not counts:
        return ep == 1
    tile = GROUP if config.weights.experts in ("fp4", "fp8") else 1
    whole = expert_tp == 1 or config.moe_intermediate_size % (expert_tp * tile) == 0
    return whole and all(count % ep == 0 for count in counts)


def _expert_counts(config: ModelConfig) -> list[int]:
    drafts = config.dspark_n_routed_experts if config.num_nextn_predict_layers else 0
    return [count for count in (config.n_routed_experts, drafts) if count]


def _tp_rule(config: ModelConfig) -> str:
    heads = f"num_attention_heads ({config.num_attention_heads}) and o_groups ({config.o_groups})"
    return f"a divisor of --count that divides {heads} into whole {GROUP}-wide tiles"


def _ep_rule(config: ModelConfig, count: int) -> str:
    experts = " and ".join(str(number) for number in _expert_counts(config)) or "no"
    width = f"with --count {count} / --ep ranks dividing moe_intermediate_size ({config.moe_intermediate_size})"
    return f"a divisor of --count that divides {experts} routed experts, {width} into whole {GROUP}-wide groups"


def _one_of(name: str, value: int, legal: list[int], rule: str) -> None:
    if value not in legal:
        raise InputError(f"--{name} must be {rule}: {', '.join(map(str, legal)) or 'none is legal'}; got {value}")
