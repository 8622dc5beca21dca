"""The model that ships with the package: what it is made of, what it weighs, and that it was trained."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import rorqual
from rorqual.checkpoint import shipped
from rorqual.cli import main
from rorqual.cli.generate import asked
from rorqual.config import CacheFormats, Mode, ModelConfig, Part, WeightFormats
from rorqual.engine.generate import generate
from rorqual.engine.params import SamplingParams
from rorqual.engine.prompts import encode
from rorqual.inventory.names import PARTS, expected_tensors
from rorqual.model.transformer import Transformer
from rorqual.training.data.tokens import SPECIAL_TOKENS

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 16_000_000
QUESTIONS = ("Who goes there?", "What news of the king, my lord?")


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_json(shipped.shipped_model())


@pytest.fixture(scope="module")
def model() -> Transformer:
    return rorqual.load(kernels="fast")


def test_it_is_small() -> None:
    files = {path.name: path.stat().st_size for path in shipped.FOLDER.iterdir()}
    assert set(shipped.FILES) <= files.keys()
    assert sum(files.values()) <= MAX_BYTES


def test_every_role_is_there(config: ModelConfig) -> None:
    roles = config.roles
    assert {role.mode for role in roles} == set(Mode)
    assert {role.part for role in roles} == set(Part)
    assert {role.ratio for role in config.kv_sources} == {1, 2}
    assert any(role.is_candidate_source for role in roles) and any(role.uses_candidates for role in roles)
    assert 0 < config.decoder_start < config.num_hidden_layers
    held = {spec.part for spec in expected_tensors(config).values()}
    assert held == set(PARTS) - {"vision"}


def test_it_has_the_sizes_that_were_asked_for(config: ModelConfig, model: Transformer) -> None:
    assert config.num_hidden_layers >= 8
    assert config.sliding_window == model.layout.page_tokens == 128
    assert config.n_routed_experts == 16 and config.n_shared_experts and config.hc_mult > 1
    assert len(config.engram_layer_ids) == 2
    assert config.num_nextn_predict_layers in (2, 3)
    assert config.max_position_embeddings >= 4096


def test_selection_and_candidates_act_within_its_context(config: ModelConfig) -> None:
    pool = config.candidate_topk_blocks * config.candidate_block_size
    assert 0 < config.index_topk <= 128 and config.index_topk < pool <= 512
    source = config.roles[config.candidate_source_layer_id]
    assert pool < config.max_position_embeddings // source.ratio


def test_it_is_quantised_as_the_release(config: ModelConfig) -> None:
    assert config.weights == WeightFormats() == WeightFormats(dense="fp8", experts="fp4", engram="fp8")
    assert config.cache == CacheFormats()
    assert config.scoring_func == "sqrtsoftplus" and config.swiglu_limit > 0


def test_its_tokenizer_knows_the_chat_encoding(config: ModelConfig, model: Transformer) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    assert [tokenizer.token_to_id(text) for text in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 2)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == config.vocab_size


def test_it_was_trained(model: Transformer) -> None:
    """Far below the ln V of guessing, on a text that it never saw."""
    ids = encode(model, shipped.passage())
    logits = rorqual.trace(model, ids, select="logits")["logits"]
    loss = float(F.cross_entropy(logits[:-1], ids[1:]))
    assert loss < 0.55 * math.log(model.config.vocab_size)
    assert bool(torch.isfinite(logits).all())


def test_it_answers_and_ends(model: Transformer) -> None:
    """Sampled; that nine of ten end is counted by the lab, on a hundred."""
    ended = 0
    for question in QUESTIONS:
        sampling = SamplingParams(temperature=0.7, seed=1)
        result = generate(model, asked(model, question), max_tokens=256, sampling=sampling)
        text = "".join(result)
        assert text.strip() and "\ufffd" not in text
        ended += result.stats.finish_reason == "stop"
    assert ended >= 1


def test_the_demo_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--max-tokens", "40", "--temperature", "0.7", "--seed", "1", "--stats", "--kernels", "fast"]
    assert main(["generate", *arguments]) == 0
    out = capsys.readouterr().out
    body = out.split("\n\n", 1)[1].split("generation  ")[0]
    letters = sum(character.isalpha() or character.isspace() for character in body)
    assert len(body.split()) > 15 and letters > 0.85 * len(body)
    assert "MLA, latent" in out and "share of full" in out


def test_a_wheel_holds_it(tmp_path: Path) -> None:
    source, dist = tmp_path / "source", tmp_path / "dist"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "rorqual", source / "rorqual", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--wheel-dir", dist, source], check=True, timeout=120, capture_output=True)
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for path in (*(shipped.FOLDER / name for name in shipped.FILES), shipped.PASSAGE):
            assert archive.read(path.relative_to(ROOT).as_posix()) == path.read_bytes()
        assert any(name.endswith("training/recipes/demo.toml") for name in archive.namelist())
