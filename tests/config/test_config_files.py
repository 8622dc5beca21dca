"""Both JSON layouts: equal configs, exact round trips, refusal by name, and folders that hold both files."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rorqual.config import CacheFormats, ModelConfig, WeightFormats, presets
from rorqual.errors import ConfigError

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
HF: dict[str, Any] = json.loads(presets.file("v4.1-flash").read_text(encoding="utf-8"))
INFERENCE: dict[str, Any] = json.loads(presets.file("v4.1-flash", inference=True).read_text(encoding="utf-8"))


def changed(root: dict[str, Any], section: str | None = None, **changes: Any) -> dict[str, Any]:
    out = copy.deepcopy(root)
    (out if section is None else out[section]).update(changes)
    return out


def without(root: dict[str, Any], key: str, section: str | None = None) -> dict[str, Any]:
    out = copy.deepcopy(root)
    del (out if section is None else out[section])[key]
    return out


def write(folder: Path, hf: dict[str, Any], inference: dict[str, Any], name: str = "inference_config.json") -> Path:
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(inference), encoding="utf-8")
    return folder


def test_the_release_files_are_the_published_ones() -> None:
    raw = presets.file("v4.1-flash").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == "8be45ce0476004a3f529fd896115a4a2e800a129ad2d3ec05b16050f52e21879"
    assert len(raw) == 3311


def test_the_release_files_give_equal_configs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rorqual"):
        ours, theirs = ModelConfig.from_json(HF), ModelConfig.from_json(INFERENCE)
    assert ours == theirs
    assert ours.fingerprint() == theirs.fingerprint()
    assert caplog.records == []
    assert ours.weights == WeightFormats(dense="fp8", experts="fp4", engram="fp8")
    assert ours.cache == CacheFormats()


def test_the_release_files_are_written_back_as_they_were() -> None:
    config = ModelConfig.from_json(HF)
    assert config.to_inference_dict() == INFERENCE
    inert = ("initializer_range", "use_cache")
    text = {key: value for key, value in HF["text_config"].items() if key not in inert}
    assert config.to_hf_dict() == {**without(HF, "transformers_version"), "text_config": text}


def test_there_are_golden_configs() -> None:
    assert len(CASES) == 9


@pytest.mark.parametrize("case", CASES)
def test_golden_files_give_equal_configs(case: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = GOLDENS / case
    with caplog.at_level(logging.WARNING, logger="rorqual"):
        ours = ModelConfig.from_json(folder / "config.json")
        theirs = ModelConfig.from_json(folder / "inference_config.json")
        both = ModelConfig.from_json(folder)
    if case == "fp32-edges":
        # Its positions are not trained length x factor, and the inference layout has no key for them.
        assert (ours.max_position_embeddings, theirs.max_position_embeddings) == (512, 4096 * 4)
        theirs = theirs.replace(max_position_embeddings=512)
    assert ours == theirs == both
    assert caplog.records == []


@pytest.mark.parametrize("case", CASES)
def test_golden_configs_round_trip(case: str) -> None:
    config = ModelConfig.from_json(GOLDENS / case)
    assert ModelConfig.from_json(config.to_hf_dict()) == config
    assert ModelConfig.from_json(config.to_inference_dict()) == config
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_hf_dict()))).fingerprint() == config.fingerprint()


def test_golden_weights() -> None:
    assert ModelConfig.from_json(GOLDENS / "fp32-text").weights == WeightFormats.stated("fp32")
    assert ModelConfig.from_json(GOLDENS / "fp32-text").weights.is_plain
    assert ModelConfig.from_json(GOLDENS / "native-text").weights == WeightFormats()
    assert not WeightFormats().is_plain


VARIANTS: dict[str, dict[str, Any]] = {
    "cache formats": {"cache": CacheFormats(main="bf16", index_key="e2m1_unscaled", window="fp32")},
    "mxfp4 main": {"cache": CacheFormats(main="e2m1_e8m0_32")},
    "plain": {"weights": WeightFormats.stated("bf16")},
    "fp8 experts": {"weights": WeightFormats.stated("fp8")},
    "bf16 experts": {"weights": WeightFormats(experts="bf16")},
    "fp4 in plain": {"weights": WeightFormats(dense="fp32", experts="fp4", engram="fp32")},
    "plain engram": {"weights": WeightFormats(engram="bf16")},
    "tokens": {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7},
    "gate": {"gate_temp": 2.0, "norm_topk_prob": False},
    "positions": {"max_position_embeddings": 70_000},
    "no yarn": {"rope_scaling": None},
    "text only": {"vision": None, "image_token_id": -1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_survives_both_layouts(variant: str) -> None:
    release = ModelConfig.from_json(HF)
    config = release.replace(**VARIANTS[variant])
    assert config != release
    assert config.fingerprint() != release.fingerprint()
    assert ModelConfig.from_json(config.to_hf_dict()) == config
    assert ModelConfig.from_json(config.to_inference_dict()) == config


@pytest.mark.parametrize(
    "name", ["deepseek_v4", "deepseek_v3", "deepseek_v41_text", "deepseek_v411", "llama", "", None, 41]
)
def test_other_model_types_are_refused_by_name(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model_type must be exactly deepseek_v41") as caught:
        ModelConfig.from_json(changed(HF, model_type=name))
    assert repr(name) in str(caught.value)


def test_unrecognised_layouts_are_refused() -> None:
    for root in ({}, {"hidden_size": 64, "num_hidden_layers": 2}, HF["text_config"], without(HF, "model_type")):
        with pytest.raises(ConfigError, match=r"^model_type"):
            ModelConfig.from_json(root)
    # An older model's inference file has dim and n_layers too.
    with pytest.raises(ConfigError, match=r"^kv_source_layers is missing: .*deepseek_v41"):
        ModelConfig.from_json(without(INFERENCE, "kv_source_layers"))


CONSTANTS = [
    ("text_config", "model_type", "deepseek_v4_text"),
    ("text_config", "num_key_value_heads", 8),
    ("text_config", "hidden_act", "gelu"),
    ("text_config", "attention_bias", True),
    ("text_config", "attention_bias", 0),
    ("text_config", "tie_word_embeddings", True),
    ("text_config", "topk_method", "greedy"),
    ("quantization_config", "weight_block_size", [128, 128]),
    ("quantization_config", "scale_fmt", "fp32"),
    ("quantization_config", "quant_method", "awq"),
    ("vision_config", "model_type", "clip_vision"),
]


@pytest.mark.parametrize(("section", "key", "value"), CONSTANTS)
def test_settings_that_cannot_be_honoured_are_refused(section: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{section}\.{key} must be"):
        ModelConfig.from_json(changed(HF, section, **{key: value}))


def test_other_rope_types_are_refused() -> None:
    scaling = changed(HF["text_config"]["rope_scaling"], rope_type="linear")
    with pytest.raises(ConfigError, match=r"^rope_scaling\.rope_type must be yarn or default; got 'linear'"):
        ModelConfig.from_json(changed(HF, "text_config", rope_scaling=scaling))
    config = ModelConfig.from_json(changed(HF, "text_config", rope_scaling={"rope_type": "default"}))
    assert config.rope_scaling is None


def test_dtype_is_stated() -> None:
    with pytest.raises(ConfigError, match=r"^dtype must be float32 or bfloat16.*got 'float16'"):
        ModelConfig.from_json(changed(without(HF, "quantization_config"), dtype="float16"))
    with pytest.raises(ConfigError, match=r"^dtype must be one of fp8, bf16, fp32; got None"):
        ModelConfig.from_json(without(INFERENCE, "dtype"))
    with pytest.raises(ConfigError, match=r"^weights\.experts must be one of"):
        ModelConfig.from_json(changed(INFERENCE, expert_dtype="int4"))
    falsy: list[Any] = [0, False, "", []]
    for nothing in falsy:
        with pytest.raises(ConfigError, match=r"^weights\.experts must be one of"):
            ModelConfig.from_json(changed(INFERENCE, expert_dtype=nothing))
    with pytest.raises(ConfigError, match=r"^quantization_config\.quant_method must be 'fp8'; got None"):
        ModelConfig.from_json(changed(HF, quantization_config={}))


def test_unknown_keys_warn(caplog: pytest.LogCaptureFixture) -> None:
    for root in (changed(HF, "text_config", mla_scale=2), changed(INFERENCE, mla_scale=2)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="rorqual"):
            assert ModelConfig.from_json(root) == ModelConfig.from_json(HF)
        assert ["mla_scale" in record.message for record in caplog.records] == [True]


def test_drafts_follow_from_the_ratios() -> None:
    assert len(HF["text_config"]["compress_ratios"]) == 43
    for root in (without(HF, "num_nextn_predict_layers", "text_config"), without(INFERENCE, "n_mtp_layers")):
        assert ModelConfig.from_json(root).num_nextn_predict_layers == 3
    with pytest.raises(ConfigError, match=r"^compress_ratios must have .* 40 \+ 1 entries; got 43"):
        ModelConfig.from_json(changed(HF, "text_config", num_nextn_predict_layers=1))


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^hidden_size is missing \(config\)"):
        ModelConfig.from_json(without(HF, "hidden_size", "text_config"))
    with pytest.raises(ConfigError, match=r"^num_attention_heads is missing \(key n_heads in config\)"):
        ModelConfig.from_json(without(INFERENCE, "n_heads"))
    with pytest.raises(ConfigError, match=r"^text_config must be an object"):
        ModelConfig.from_json(without(HF, "text_config"))
    with pytest.raises(ConfigError, match=r"^vision_config\.patch_size is missing \(key vision_patch_size in config\)"):
        ModelConfig.from_json(without(INFERENCE, "vision_patch_size"))
    with pytest.raises(ConfigError, match=r"^original_seq_len is missing"):
        ModelConfig.from_json(without(INFERENCE, "original_seq_len"))


def test_an_error_names_the_key_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "inference_config.json"
    path.write_text(json.dumps(changed(INFERENCE, window_size=0)), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(path)
    assert str(caught.value) == (
        "sliding_window must be an integer in 1..1048576; got 0 (key window_size in inference_config.json)"
    )


def test_a_folder_with_either_or_both_files(tmp_path: Path) -> None:
    release = ModelConfig.from_json(HF)
    for name in ("inference_config.json", "inference/config.json"):
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        assert ModelConfig.from_json(write(folder, HF, INFERENCE, name)) == release
        (folder / "config.json").unlink()
        assert ModelConfig.from_json(str(folder)) == release
        (folder / name).unlink()
        with pytest.raises(ConfigError, match=r"^config file not found"):
            ModelConfig.from_json(folder)


@pytest.mark.parametrize(
    ("field", "key", "value"),
    [
        ("sliding_window", "window_size", 256),
        ("kv_source_layer_ids", "kv_source_layers", [2, 20]),
        ("vision", "vision_n_layers", 0),
        ("rope_scaling", "beta_fast", 31),
        ("weights", "expert_dtype", None),
        ("num_nextn_predict_layers", "n_mtp_layers", 2),
    ],
)
def test_two_files_that_disagree_are_refused(tmp_path: Path, field: str, key: str, value: Any) -> None:
    folder = write(tmp_path, HF, changed(INFERENCE, **{key: value}))
    with pytest.raises(ConfigError, match=rf"^{field} must be the same in both files"):
        ModelConfig.from_json(folder)


def test_what_one_file_alone_states_is_used(tmp_path: Path) -> None:
    config = ModelConfig.from_json(write(tmp_path, HF, changed(INFERENCE, gate_temp=2)))
    assert config.gate_temp == 2
    # The positions that the inference file implies give way to those the other states.
    hf = changed(HF, "text_config", max_position_embeddings=100_000)
    assert ModelConfig.from_json(write(tmp_path, hf, INFERENCE)).max_position_embeddings == 100_000


def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"does not exist"):
        ModelConfig.from_json(path)
    for text, reason in {
        "": "is not JSON",
        "{": "is not JSON",
        "[1]": "must hold a JSON object; got list",
        "[" * 100_000: "is not JSON",
        '{"model_type": "deepseek_v41", "model_type": "deepseek_v41"}': "^model_type is given twice",
    }.items():
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=reason):
            ModelConfig.from_json(path)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"cannot be read"):
        ModelConfig.from_json(path)


def test_integers_of_json_widen_where_a_float_is_due() -> None:
    assert type(ModelConfig.from_json(HF).rope_theta) is float
    same = ModelConfig.from_json(changed(HF, "text_config", rope_theta=10000.0))
    assert same.fingerprint() == ModelConfig.from_json(HF).fingerprint()
