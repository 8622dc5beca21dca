"""Who computes and who shares (SPEC 1): the release's 43 layers, one by one, and plans it does not use."""

from __future__ import annotations

import pytest

from rorqual.config import LayerRole, Mode, ModelConfig, Part, presets

RELEASE = presets.load("v4.1-flash")
FULL = {2, 8, 14, 20}
REINDEX = {24, 28, 32, 36}


def expected_release_role(layer: int) -> LayerRole:
    """SPEC 1 read off by hand, by ranges rather than by the rule."""
    if layer < 2 or layer >= 40:
        mode, ratio, kv, index = Mode.SWA, 0, None, None
    else:
        mode = Mode.FULL if layer in FULL else Mode.REINDEX if layer in REINDEX else Mode.REUSE
        ratio = 2 if layer < 20 else 1
        kv = 2 if layer < 8 else 8 if layer < 14 else 14 if layer < 20 else 20
        index = kv if layer < 24 else layer // 4 * 4
    return LayerRole(
        layer_id=layer,
        mode=mode,
        ratio=ratio,
        kv_source=kv,
        index_source=index,
        is_candidate_source=layer == 20,
        uses_candidates=layer in REINDEX,
        engram_index={1: 0, 14: 1}.get(layer),
        part=Part.ENCODER if layer < 20 else Part.DECODER if layer < 40 else Part.DRAFT,
        draft_index=layer - 40 if layer >= 40 else None,
    )


def test_there_are_43_roles() -> None:
    assert len(RELEASE.roles) == 43
    assert [len(RELEASE.backbone_roles), len(RELEASE.draft_roles)] == [40, 3]
    counts = [sum(role.mode is mode for role in RELEASE.backbone_roles) for mode in Mode]
    assert counts == [2, 4, 4, 30]


@pytest.mark.parametrize("layer", range(43))
def test_release_role(layer: int) -> None:
    assert RELEASE.roles[layer] == expected_release_role(layer)


def test_layer_20_begins_the_decoder() -> None:
    role = RELEASE.roles[20]
    assert RELEASE.decoder_start == 20
    assert (role.mode, role.ratio, role.kv_source, role.part) == (Mode.FULL, 1, 20, Part.DECODER)
    assert role.is_kv_source
    assert role.is_index_source
    assert RELEASE.roles[19].part is Part.ENCODER
    assert RELEASE.kv_sources == tuple(RELEASE.roles[layer] for layer in (2, 8, 14, 20))


def small(ratios: list[int], kv: list[int], index: list[int], candidate: int = -1) -> ModelConfig:
    """A text model of len(ratios) layers with the tiny preset's widths."""
    base = presets.load("tiny").without("engram", "drafts", "vision", "candidates", "compression")
    return base.replace(
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        kv_source_layer_ids=kv,
        index_source_layer_ids=index,
        candidate_source_layer_id=candidate,
    )


def test_a_model_without_sources_is_all_encoder() -> None:
    config = small([0, 0, 0], [], [])
    assert config.decoder_start == 3
    assert {role.mode for role in config.roles} == {Mode.SWA}
    assert {role.part for role in config.roles} == {Part.ENCODER}


def test_the_decoder_begins_at_the_last_source_wherever_it_lies() -> None:
    first = small([4, 4, 0, 4], [0], [0, 3])
    assert first.decoder_start == 0
    assert {role.part for role in first.roles} == {Part.DECODER}
    last = small([1, 1, 1, 4], [0, 3], [0, 1, 3])
    assert last.decoder_start == 3
    assert [role.mode for role in last.roles] == [Mode.FULL, Mode.REINDEX, Mode.REUSE, Mode.FULL]
    assert [role.kv_source for role in last.roles] == [0, 0, 0, 3]
    assert [role.index_source for role in last.roles] == [0, 1, 1, 3]


def test_a_window_layer_between_readers_shares_nothing() -> None:
    config = small([2, 0, 2], [0], [0])
    assert (config.roles[1].mode, config.roles[1].kv_source, config.roles[1].index_source) == (Mode.SWA, None, None)
    assert config.roles[2].kv_source == 0


def test_every_index_source_after_the_candidate_source_uses_the_pool() -> None:
    config = small([1, 1, 1, 1, 1], [0, 3], [0, 1, 3, 4], candidate=1)
    assert [role.is_candidate_source for role in config.roles] == [False, True, False, False, False]
    # Layer 3 has keys of its own and still scores only the pool; layer 2 has no indexer.
    assert [role.uses_candidates for role in config.roles] == [False, False, False, True, True]


def test_roles_are_derived_and_not_part_of_the_value() -> None:
    assert "roles" not in repr(RELEASE)
    assert hash(RELEASE) == hash(RELEASE.replace())
    assert RELEASE.replace(candidate_source_layer_id=-1).roles[24].uses_candidates is False
