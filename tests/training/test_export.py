"""Trained parameters -> a checkpoint in the release's layout -> a model that multiplies with exactly those values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

import rorqual
from rorqual.checkpoint.load import Checkpoint
from rorqual.checkpoint.tokenizer import read_tokenizer, write_byte_tokenizer
from rorqual.config import ModelConfig, WeightFormats
from rorqual.errors import CheckpointError
from rorqual.formats.codec import fake_quantize
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import quantize_weight
from rorqual.inventory.names import expected_tensors, is_quantised_pair
from rorqual.model.ngram import compressed_token_map
from rorqual.training.export import export, parameter_shapes

Parameters = dict[str, Tensor]


def random_parameters(config: ModelConfig, seed: int = 0) -> Parameters:
    """Trained-looking fp32 values, none of them a bf16 number, magnitudes from tile to tile apart."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in parameter_shapes(config).items():
        rows = torch.exp2(torch.randint(-6, 2, (shape[0],), generator=generator).float())
        values = torch.randn(shape, generator=generator) * rows.view(-1, *[1] * (len(shape) - 1))
        found[name] = values * shape[-1] ** -0.5
    return found


@pytest.fixture(scope="module")
def tokenizer(tiny_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), tiny_config)
    assert path is not None
    return read_tokenizer(path)


@pytest.fixture(scope="module")
def config(tiny_config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    folded = int(compressed_token_map(tokenizer, tiny_config.vocab_size).max()) + 1
    return tiny_config.replace(engram_compressed_vocab_size=folded)


@pytest.fixture(scope="module")
def parameters(config: ModelConfig) -> Parameters:
    return random_parameters(config)


@pytest.fixture(scope="module")
def exported(
    parameters: Parameters, config: ModelConfig, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("export") / "checkpoint"
    assert export(parameters, config, tokenizer, folder) == folder
    return folder


def test_three_files_of_the_config_and_its_names(exported: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    assert sorted(path.name for path in exported.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert ModelConfig.from_json(exported) == config
    assert Checkpoint.open(exported, config).stored.keys() == expected_tensors(config).keys()
    written = read_tokenizer(exported / "tokenizer.json")
    assert written.get_vocab(with_added_tokens=True) == tokenizer.get_vocab(with_added_tokens=True)


def test_weights_expand_to_the_fake_quantised_parameters(
    exported: Path, config: ModelConfig, parameters: Parameters
) -> None:
    checkpoint = Checkpoint.open(exported, config)
    scope = checkpoint.scope()
    kinds = set()
    for name, spec in expected_tensors(config).items():
        if name not in parameters:
            continue
        value = parameters[name]
        if not is_quantised_pair(spec):
            kinds.add(spec.dtypes[0])
            stored = checkpoint.tensor(name)
            assert stored.equal(value.to(torch.bfloat16 if spec.dtypes[0] == "BF16" else torch.float32)), name
        elif spec.part == "engram_tables":
            kinds.add("table")
            rows = scope.table(name.removesuffix(".weight")).rows(torch.arange(value.shape[0]))
            assert rows.equal(fake_quantize(value, E4M3_E8M0_32)), name
        else:
            kind = "fp4" if spec.dtypes[0] == "I8" else "fp8"
            kinds.add(kind)
            weight = scope.weight(name.removesuffix(".weight"))
            assert weight.expand().equal(quantize_weight(value, kind).expand()), name
    assert kinds == {"BF16", "F32", "table", "fp4", "fp8"}


def test_the_model_runs(exported: Path, config: ModelConfig) -> None:
    model = rorqual.load(exported, page_tokens=16, kernels="plain")
    logits = rorqual.trace(model, list(range(40)), select="logits")["logits"]
    assert model.tokenizer is not None
    assert logits.shape == (40, config.vocab_size) and bool(logits.isfinite().all())


def test_plain_is_bf16_of_every_parameter(
    parameters: Parameters, config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = export(parameters, config, tokenizer, tmp_path / "plain", quantised=False)
    plain = config.replace(weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16"))
    assert ModelConfig.from_json(folder) == plain
    checkpoint = Checkpoint.open(folder, plain)
    assert checkpoint.stored.keys() == parameters.keys() == expected_tensors(plain).keys()
    for name, spec in expected_tensors(plain).items():
        wanted = parameters[name].to(torch.float32 if spec.dtypes[0] == "F32" else torch.bfloat16)
        assert checkpoint.tensor(name).equal(wanted), name
    rorqual.load(folder, page_tokens=16, kernels="plain")


def test_a_plain_config_keeps_its_own_format(tiny_config: ModelConfig, tmp_path: Path) -> None:
    formats = WeightFormats(dense="fp32", experts="fp32", engram="fp32")
    config = tiny_config.without("engram", "vision", "drafts").replace(weights=formats)
    parameters = random_parameters(config)
    folder = export(parameters, config, None, tmp_path / "fp32", quantised=False)
    assert ModelConfig.from_json(folder).weights == formats and not (folder / "tokenizer.json").exists()
    name = "layers.0.ffn.experts.1.w2.weight"
    assert Checkpoint.open(folder, config).tensor(name).equal(parameters[name])


def test_parameters_of_a_module_are_taken_as_they_are(
    config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Gradients, bf16 values and strides are no matter."""
    parameters: Parameters = dict(random_parameters(config))
    name = "layers.1.attn.wq_a.weight"
    parameters[name] = torch.nn.Parameter(parameters[name].T.contiguous()).T
    folder = export(parameters, config, tokenizer, tmp_path / "out")
    stored = Checkpoint.open(folder, config).scope().weight(name.removesuffix(".weight"))
    assert stored.expand().equal(quantize_weight(parameters[name].contiguous(), "fp8").expand())


NAME = "layers.0.attn.wq_a.weight"


def renamed(parameters: Parameters) -> None:
    parameters["layers.0.attn.wq_x.weight"] = parameters.pop(NAME)


def with_a_scale(parameters: Parameters) -> None:
    parameters["layers.0.attn.wq_a.scale"] = torch.ones(1)


def misshapen(parameters: Parameters) -> None:
    parameters[NAME] = parameters[NAME].T


def packed(parameters: Parameters) -> None:
    name = "layers.0.ffn.experts.0.w1.weight"
    parameters[name] = parameters[name][:, ::2]


def of_integers(parameters: Parameters) -> None:
    parameters["norm.weight"] = torch.ones(96, dtype=torch.int64)


def not_finite(parameters: Parameters) -> None:
    parameters[NAME] = parameters[NAME].clone()
    parameters[NAME][3, 5] = float("inf")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            renamed,
            f"{NAME} is missing from the parameters; they hold layers.0.attn.wq_x.weight, which the config does not "
            r"name \(1 missing, 1 unexpected in all\)",
        ),
        (with_a_scale, r"layers.0.attn.wq_a.scale is not a parameter of this config \(1 such"),
        (misshapen, rf"{NAME} is float32 \[96, 64\]; the config asks for float32 \[64, 96\]"),
        (packed, r"layers.0.ffn.experts.0.w1.weight is float32 \[64, 48\]; the config asks for float32 \[64, 96\]"),
        (of_integers, r"norm.weight is int64 \[96\]"),
        (not_finite, f"{NAME} holds NaN or Inf"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(
    edit: Callable[[Parameters], None],
    message: str,
    parameters: Parameters,
    config: ModelConfig,
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    changed = dict(parameters)
    edit(changed)
    with pytest.raises(CheckpointError, match=message):
        export(changed, config, tokenizer, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_is_not_the_configs_is_refused(
    parameters: Parameters, config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="tokenizer: none given; Engram's compressed vocabulary"):
        export(parameters, config, None, out)
    other = read_tokenizer(_saved(tokenizer, tmp_path))
    other.add_tokens(["leviathan"])
    with pytest.raises(CheckpointError, match=r"tokenizer: has 513 tokens, the config's vocab_size is 512"):
        export(parameters, config, other, out)
    folded = config.engram_compressed_vocab_size
    with pytest.raises(CheckpointError, match=rf"fold into {folded}, the config's .* is {folded + 1}"):
        export(parameters, config.replace(engram_compressed_vocab_size=folded + 1), tokenizer, out)
    assert not out.exists()


def _saved(tokenizer: Tokenizer, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_folder_in_use_is_left_alone(
    parameters: Parameters, config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not empty \(it holds notes.txt\)"):
        export(parameters, config, tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_interrupted_export_leaves_nothing(
    parameters: Parameters,
    config: ModelConfig,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rorqual.training.export.quantize_weight", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(parameters, config, tokenizer, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
