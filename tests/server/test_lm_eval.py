"""lm-eval's `local-completions`: the requests that it sends, and the program itself where it is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import SECONDS, demo_model, demo_server

from rorqual.engine.llm import LLM
from rorqual.engine.params import SamplingParams
from rorqual.training.data.tokens import BOS, EOS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients" / "lm-eval.md"
WRITTEN = "http://127.0.0.1:8000"
"""The address on the page."""
PROGRAM = shutil.which("lm_eval")
TEXT = "To be, or not to be, that is the"
CHOICES = (" question", " cucumber", " whale 🐋")


@cache
def llm() -> LLM:
    return LLM(demo_model(), slots=4)


def blocks() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def lines() -> list[dict[str, Any]]:
    """The questions on the page."""
    found = re.search(r"lines\.jsonl <<'END'\n(.*?)\nEND\n", blocks()[0], re.DOTALL)
    assert found is not None
    return [json.loads(line) for line in found[1].splitlines()]


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{demo_server().url}{path}", json=body, timeout=5 * SECONDS)
    assert answer.status_code == 200, answer.text
    assert "x-rorqual-ignored-fields" not in answer.headers
    found: dict[str, Any] = answer.json()
    return found


def encoded(text: str) -> list[int]:
    """As the client's remote tokenizer does."""
    found: list[int] = post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    return found


def likelihoods(prompts: list[list[int]] | list[str] | str, starts: list[int]) -> list[tuple[float, bool]]:
    """What the client makes of the answer: (log-likelihood from a token on, whether a greedy reader says the same)."""
    body = {
        "model": "rorqual",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    found = []
    choices = sorted(post("/v1/completions", body)["choices"], key=lambda choice: int(choice["index"]))
    for choice, start in zip(choices, starts, strict=True):
        told = choice["logprobs"]
        each, tops = told["token_logprobs"][start:-1], told["top_logprobs"][start:-1]
        found.append((sum(each), all(own == max(top.values()) for own, top in zip(each, tops, strict=True))))
    return found


def offline(ids: list[int], start: int) -> tuple[float, bool]:
    """The same of the engine without a server."""
    told = llm().generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1))[0].prompt_logprobs
    assert told is not None
    each = [one for one in told[start:] if one is not None]
    return sum(one.logprob for one in each), all(one.logprob == max(p for _, p in one.top) for one in each)


def test_the_server_says_how_to_tokenize_for_it() -> None:
    found = httpx.get(f"{demo_server().url}/tokenizer_info", timeout=SECONDS).json()
    assert (found["bos_token"], found["eos_token"]) == (BOS, EOS)
    config = demo_model().config
    # The client learns their ids by their spellings.
    assert encoded(found["bos_token"]) == [config.bos_token_id]
    assert encoded(found["eos_token"]) == [config.eos_token_id]
    assert found["model_max_length"] == demo_server().engine.max_model_len


def test_continuations_are_scored_as_the_engine_scores_them() -> None:
    context = encoded(TEXT)
    prompts = [context + encoded(choice) for choice in CHOICES]
    found = likelihoods(prompts, [len(context)] * len(prompts))
    assert found == [offline(ids, len(context)) for ids in prompts]
    assert len({likelihood for likelihood, _ in found}) == len(CHOICES)
    # What a greedy reader says is told as such.
    said = llm().generate([context], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids
    ((_, greedy),) = likelihoods([context + said], [len(context)])
    assert greedy
    demo_server().assert_clean()


def test_a_rolling_likelihood_starts_behind_the_prefix_token() -> None:
    ids = [demo_model().config.bos_token_id, *encoded(TEXT)]
    ((likelihood, _),) = likelihoods([ids], [1])
    assert likelihood == offline(ids, 1)[0] < 0


def test_a_scored_prompt_is_computed_as_a_whole() -> None:
    ids = encoded("All that we see or seem is but a dream within a dream. " * 24)
    body = {"model": "rorqual", "prompt": [ids], "max_tokens": 1, "echo": True, "logprobs": 1}
    assert [post("/v1/completions", body)["usage"]["prompt_cache_hit_tokens"] for _ in range(2)] == [0, 0]


def test_a_text_that_spells_its_beginning_has_no_second_one() -> None:
    context = [demo_model().config.bos_token_id, *encoded(TEXT)]
    ids = context + encoded(CHOICES[0])
    expected = offline(ids, len(context))
    # As `tokenized_requests=False` sends it; a text without one gets one.
    assert likelihoods(BOS + TEXT + CHOICES[0], [len(context)]) == [expected]
    assert likelihoods(TEXT + CHOICES[0], [len(context)]) == [expected]
    body = {"prompt": TEXT + CHOICES[0], "max_tokens": 0, "echo": True, "logprobs": 0, "add_special_tokens": False}
    assert len(post("/v1/completions", body)["choices"][0]["logprobs"]["tokens"]) == len(ids) - 1


@pytest.mark.parametrize("texts", [False, True])
def test_what_is_written_ends_at_a_stop_text(texts: bool) -> None:
    asked: list[Any] = [TEXT, "My kingdom for a"] if texts else [encoded(TEXT), encoded("My kingdom for a")]
    body = {
        "prompt": asked,
        "model": "rorqual",
        "max_tokens": 12,
        "temperature": 0,
        "stop": ["\n", ".", EOS],
        "seed": 1234,
    }
    choices = post("/v1/completions", body)["choices"]
    params = SamplingParams(max_tokens=12, stop=("\n", ".", EOS))
    assert [choice["text"] for choice in choices] == [output.text for output in llm().generate(asked, params)]
    assert not any(stop in choice["text"] for choice in choices for stop in ("\n", ".", EOS))


@pytest.mark.skipif(PROGRAM is None, reason="lm-eval is not installed: pip install 'lm_eval[api]'")
def test_the_program_runs_the_task_on_its_page(tmp_path: Path) -> None:
    script = "set -euo pipefail\n" + "".join(blocks()).replace(WRITTEN, demo_server().url)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "OPENAI_API_KEY")
    }
    offline_only = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    run = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment | offline_only,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    questions = lines()
    for sample in samples(tmp_path, "lines_choice"):
        question = questions[sample["doc_id"]]
        context = encoded(question["text"])
        for choice, told in zip(question["choices"], sample["filtered_resps"], strict=True):
            expected = offline(context + encoded(choice), len(context))
            assert [float(told[0]), str(told[1])] == pytest.approx([expected[0], str(expected[1])])
    bos = demo_model().config.bos_token_id
    for sample in samples(tmp_path, "lines_likely"):
        ids = [bos, *encoded(questions[sample["doc_id"]]["text"])]
        assert float(sample["filtered_resps"][0]) == pytest.approx(offline(ids, 1)[0])
    params = SamplingParams(max_tokens=12, stop=("\n", ".", EOS))
    for sample in samples(tmp_path, "lines_written"):
        output = llm().generate([encoded(questions[sample["doc_id"]]["text"])], params)[0]
        assert sample["filtered_resps"] == [output.text]
    demo_server().assert_clean()


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """What the program wrote of each question."""
    (path,) = folder.glob(f"results/**/samples_{task}_*.jsonl")
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(found) == len(lines())
    return found
