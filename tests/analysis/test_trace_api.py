"""`rorqual.trace` and its neighbours as a library: what is held, what is refused, what is left alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import rorqual
from rorqual.analysis.golden import write_golden
from rorqual.analysis.saving import save_tensors
from rorqual.analysis.trace import trace
from rorqual.checkpoint.random import write_random
from rorqual.config import presets
from rorqual.engine.generate import generate
from rorqual.engine.params import SamplingParams
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.errors import CapacityError, ConfigError, FormatError, InputError
from rorqual.model.load import load
from rorqual.model.tap import Recorder
from rorqual.model.transformer import Transformer

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load(GOLDENS / "fp32-dspark", page_tokens=16, kernels="plain")


def test_what_is_not_selected_is_never_held(model: Transformer) -> None:
    tap = Recorder("layers.3.attn_out,decode.logits")
    found = trace(model, list(range(3, 43)), [5, 6, 7], spec=True, tap=tap)
    assert set(found) == set(tap.pieces) == {"layers.3.attn_out", "decode.logits"}
    # Besides, only what the end state is made of: ids, and at most TAIL_ROWS rows a tail.
    held = sum(t.numel() for name, parts in tap.hidden_pieces.items() for t in parts if "tail" in name)
    assert held <= 2 * 8 * model.config.head_dim


def test_select_takes_a_list(model: Transformer) -> None:
    assert set(trace(model, [3, 4, 5], select=["logits", "layers.0.*_out"])) == {
        "logits",
        "layers.0.attn_out",
        "layers.0.ffn_out",
        "layers.0.pre_out",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": ["a"]}, "input_ids: not a list of integers"),
        ({"input_ids": [1.5]}, "input_ids: shape"),
        ({"input_ids": [[1], [2]]}, "input_ids: shape"),
        ({"spec": True}, "forced_ids: none given"),
        ({"stale_decode": True}, "forced_ids: none given"),
        ({"prefill": "some"}, "prefill: 'some' is not one of full, ced"),
        ({"hit": 1}, r"hit: 1 is not legal; legal: 2\.\.3 in steps of 2"),
        ({"chunk": 0}, "chunk: 0 is not at least 1"),
        ({"images": ["x.png"]}, "no vision tower"),
        ({"inject": {"layers.1.topk_idxs": torch.full((3, 8), 10**6)}}, "a group that its query cannot see"),
        ({"inject": {"layers.1.moe_indices": torch.full((3, 2), 999)}}, "names an expert outside 0..5"),
    ],
)
def test_options_that_do_not_fit_are_one_line(model: Transformer, options: dict[str, object], message: str) -> None:
    arguments = {"input_ids": [3, 4, 5]} | options
    with pytest.raises(InputError, match=message) as caught:
        trace(model, **arguments)
    assert "\n" not in str(caught.value)


def test_callers_can_catch_every_error_by_its_root(model: Transformer) -> None:
    with pytest.raises(rorqual.RorqualError):
        rorqual.trace(model, [])


@pytest.mark.parametrize("start", [99, 100])
def test_rewinding_past_the_rings_is_refused_and_up_to_them_exact(model: Transformer, start: int) -> None:
    ids = torch.arange(3, 120)
    whole = Sequence(model, new_cache(model, 128))
    whole.prefill(Prompt(ids=ids[:start]), mode="full")
    expected = whole.append(ids[start : start + 1]).logits
    sequence = Sequence(model, new_cache(model, 128))
    sequence.prefill(Prompt(ids=ids[:start]), mode="full")
    reach = model.config.dspark_block_size
    sequence.append(ids[60 : 60 + reach])
    with pytest.raises(CapacityError, match=rf"position {start - 9} is out of reach; legal: \d+\.\.{start + reach}"):
        sequence.rewind(start - 9)
    with pytest.raises(CapacityError, match="out of reach"):
        sequence.rewind(start + reach + 1)
    sequence.rewind(start)
    assert torch.equal(sequence.append(ids[start : start + 1]).logits, expected)


def test_the_lowest_rewind_is_exact(model: Transformer) -> None:
    ids = torch.arange(3, 103)
    sequence = Sequence(model, new_cache(model, 128))
    sequence.prefill(Prompt(ids=ids[:97]), mode="full")
    with pytest.raises(CapacityError) as caught:
        sequence.rewind(0)
    lowest = int(str(caught.value).split("legal: ")[1].split("..")[0])
    assert 97 - model.config.dspark_block_size <= lowest < 97
    sequence.rewind(lowest)
    fresh = Sequence(model, new_cache(model, 128))
    fresh.prefill(Prompt(ids=ids[:lowest]), mode="full")
    ahead = ids[lowest : lowest + 3]
    torch.testing.assert_close(
        sequence.append(ahead, logits_from=0).logits, fresh.append(ahead, logits_from=0).logits, rtol=1e-4, atol=1e-4
    )


def test_nan_weights_are_not_sampled(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_random(presets.load("tiny"), folder, seed=1)
    damaged = load(folder, page_tokens=16, kernels="plain")
    damaged.backbone.norm = damaged.backbone.norm * float("nan")
    for temperature in (0.0, 1.0):
        with pytest.raises(FormatError, match="logits: NaN or Inf"):
            "".join(generate(damaged, [3, 4], max_tokens=2, sampling=SamplingParams(temperature=temperature)))


def test_a_tiny_temperature_is_greedy(model: Transformer) -> None:
    def ids(temperature: float) -> list[int]:
        result = generate(model, [3, 4, 5], max_tokens=4, sampling=SamplingParams(temperature=temperature, seed=1))
        "".join(result)
        return result.ids

    assert ids(1e-320) == ids(0.0)


def test_engram_tables_that_are_not_their_primes_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_random(presets.load("tiny"), folder, seed=1)
    (folder / "inference_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["engram_vocab_size"] += 10
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"engram_num_embeddings is .* the primes sum to"):
        load(folder, page_tokens=16)


def test_writing_leaves_the_neighbours_alone(tmp_path: Path) -> None:
    for name in ("case.part", "t.safetensors.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("keep")
    write_golden(presets.load("tiny").without("vision"), tmp_path / "case", prompt_tokens=8, decode_steps=1)
    save_tensors({"a": torch.zeros(3)}, tmp_path / "t.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["case", "case.part", "t.safetensors", "t.safetensors.part"]
    assert (tmp_path / "case.part" / "mine").read_text() == "keep"
    assert (tmp_path / "t.safetensors").stat().st_mode & 0o444 == 0o444
    with pytest.raises(InputError, match="cannot be written"):
        save_tensors({"a": torch.zeros(3)}, tmp_path / "nowhere" / "t.safetensors")
    shutil.rmtree(tmp_path / "case")
