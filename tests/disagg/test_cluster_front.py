"""A front over workers in this process: it answers as an engine does, whatever becomes of the workers."""

from __future__ import annotations

import time

import pytest
import torch
from clusters import PROMPTS, SECONDS, assert_nothing_held, here, right, run, until
from models import tiny_folder
from PIL import Image

from rorqual.disagg.cluster.config import DeadlineSection
from rorqual.disagg.cluster.front import Front
from rorqual.engine.engine import Engine
from rorqual.engine.images import read_images
from rorqual.engine.params import Constraint, SamplingParams
from rorqual.engine.text_model import WithoutWeights
from rorqual.errors import CapacityError, InputError
from rorqual.model.load import load
from rorqual.model.vision.image import image_token_ids

CONFIG = """
[model]
replay = "exact"
kernels = "fast"
[prefill]
slots = 4
[decode]
workers = 2
slots = 4
[deadlines]
silent = 60
restart = 60
"""


def test_texts_are_those_of_one_engine() -> None:
    params = [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, temperature=0.8, seed=3, n=2, logprobs=2),
        SamplingParams(max_tokens=40, stop="the"),
    ]
    with here(CONFIG) as (front, _):
        names = [front.submit(prompt, own, salt="t") for prompt, own in zip(PROMPTS, params, strict=True)]
        for output, prompt, own in zip(run(front, *names), PROMPTS, params, strict=True):
            alone = right(prompt, own)
            assert [(d.text, d.token_ids, d.finish_reason) for d in output.completions] == [
                (d.text, d.token_ids, d.finish_reason) for d in alone.completions
            ]
            assert output.logprobs == alone.logprobs
            assert output.prompt_token_ids == alone.prompt_token_ids
            assert output.counts.new == alone.counts.new
            assert output.times.to_first_token is not None
        assert_nothing_held(front)
        assert front.stats().finished == 3


def test_log_probabilities_of_a_prompt_are_computed_whole() -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    with here(CONFIG) as (front, _):
        (output,) = run(front, front.submit(PROMPTS[0], params))
        assert output.prompt_logprobs == right(PROMPTS[0], params).prompt_logprobs


def test_images_go_through_it() -> None:
    """Two pictures of one size are not one prefix; the front encodes none."""
    folder = tiny_folder()
    pictures = [Image.new("RGB", (60, 50), colour) for colour in ("red", "blue")]
    alone = Engine(load(folder, kernels="fast"), slots=2, replay="exact", speculative=False)
    (one, _) = read_images(alone.model, pictures)
    span = image_token_ids(one.grid, alone.model.config.image_token_id)
    ids = torch.cat((torch.arange(20, 40), span, torch.arange(50, 57)))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with here(CONFIG.replace("[model]", f"[model]\npath = '{folder}'")) as (front, _):
        # While no prefill worker has answered, a decode worker computes the prompt.
        until(front, lambda: all(post.up for post in front.posts))
        for picture in pictures:
            wanted = alone.output(alone.submit(ids, params, images=[picture]))
            while not wanted.finished:
                alone.step()
            (output,) = run(front, front.submit(ids, params, images=[picture], speculative=False))
            assert output.token_ids == wanted.token_ids
            assert output.counts.handed == len(ids)
        with pytest.raises(InputError, match="its 0 images need 0"):
            front.submit(ids, params)
        assert_nothing_held(front)


def test_what_an_engine_refuses_is_refused_at_once() -> None:
    with here(CONFIG) as (front, _):
        limit = front.max_model_len
        for prompt, params, told in [
            ("", SamplingParams(), "prompt: empty"),
            ([10**6], SamplingParams(), "id 1000000 is outside the vocabulary"),
            ([1] * limit, SamplingParams(), f"do not fit the model's {limit} positions"),
            ("a", SamplingParams(n=5), "n: 5 completions at once need as many slots"),
            ("a", SamplingParams(stop_ids=[10**6]), "stop_ids: id 1000000 is outside"),
            ("a", SamplingParams(constraint=Constraint(kind="regex", value="(")), "constraint: "),
        ]:
            with pytest.raises(InputError, match=told):
                front.submit(prompt, params)
        with pytest.raises(InputError, match="prefill: 'half'"):
            front.submit("a", prefill="half")
        assert front.live == [] and not front.has_work


def test_a_worker_that_dies_is_not_noticed() -> None:
    """Greedy, drawn, several completions: the text goes on where it was, on the other worker or a fresh one."""
    params = [
        SamplingParams(max_tokens=60, ignore_eos=True),
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.9, seed=11, n=2),
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.9, seed=12, logprobs=1),
    ]
    with here(CONFIG) as (front, handles):
        names = [front.submit(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
        outputs = [front.output(name) for name in names]
        until(front, lambda: all(len(output.token_ids) >= 5 for output in outputs))
        for handle in (handles["decode-0"], handles["decode-1"]):
            handle.kill()
        run_on = [name for name in names if name in front]
        assert run_on
        run(front, *run_on)
        for output, prompt, own in zip(outputs, PROMPTS, params, strict=True):
            alone = right(prompt, own)
            assert [(d.text, d.token_ids, d.logprobs) for d in output.completions] == [
                (d.text, d.token_ids, d.logprobs) for d in alone.completions
            ]
        assert_nothing_held(front)


def test_a_request_that_loses_one_worker_after_the_other_ends_in_an_error() -> None:
    with here(CONFIG.replace("workers = 2", "workers = 1") + "losses = 2\n") as (front, handles):
        handle, post = handles["decode-0"], front.posts[-1]
        handle.deaf = handle.risen = frozenset(["decode", "poll"])
        output = front.output(front.submit(PROMPTS[0], SamplingParams(max_tokens=5)))
        for _ in range(3):
            until(front, lambda: post.runs)
            handle.kill()
            until(front, lambda: not post.runs)
        until(front, lambda: output.finished)
        assert output.finish_reason == "error"
        assert "3 workers in a row were lost" in str(output.completions[0].stopped_by)


def test_without_any_worker_a_request_ends_within_its_bound() -> None:
    config = CONFIG.replace("workers = 2", "workers = 1").replace("restart = 60", "restart = 0.5")
    with here(config) as (front, handles):
        handles["decode-0"].die()
        output = front.output(front.submit(PROMPTS[0], SamplingParams(max_tokens=5)))
        began = time.monotonic()
        until(front, lambda: output.finished)
        assert time.monotonic() - began > 0.4
        assert str(output.completions[0].stopped_by) == "cluster: no decode worker for 0.5 s"
        handles["decode-0"].rise()
        until(front, lambda: front.posts[-1].up)
        (output,) = run(front, front.submit(PROMPTS[0], SamplingParams(max_tokens=5)))
        assert output.text == right(PROMPTS[0], SamplingParams(max_tokens=5)).text


def test_a_silent_worker_is_killed_and_its_requests_go_on() -> None:
    config = CONFIG.replace("workers = 2", "workers = 1").replace("silent = 60", "silent = 3")
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with here(config) as (front, handles):
        name = front.submit(PROMPTS[0], params)
        output = front.output(name)
        until(front, lambda: len(output.token_ids) >= 3)
        handles["decode-0"].deaf = frozenset(["poll"])
        until(front, lambda: output.finished)
        assert handles["decode-0"].kills == 1
        assert output.text == right(PROMPTS[0], params).text


def test_a_job_that_never_arrives_is_sent_again() -> None:
    """The call is lost, though the worker answers all others."""
    config = CONFIG.replace("workers = 2", "workers = 1").replace("silent = 60", "silent = 2")
    with here(config) as (front, handles):
        handle = handles["decode-0"]
        handle.deaf = frozenset(["decode"])
        name = front.submit(PROMPTS[0], SamplingParams(max_tokens=5))
        until(front, lambda: handle.calls["decode"] == 1)
        handle.deaf = frozenset()
        (output,) = run(front, name)
        assert output.text == right(PROMPTS[0], SamplingParams(max_tokens=5)).text
        assert handle.calls["decode"] == 2 and handle.kills == 0


def test_a_prefill_worker_that_sends_nothing_is_done_without() -> None:
    """Its parcel is waited for, once; from then on it gets no work until it answers again."""
    config = CONFIG + "handover = 1\n"
    with here(config) as (front, handles):
        handle, post = handles["prefill-0"], front.posts[0]
        until(front, lambda: post.up)
        handle.deaf = frozenset(["prefill", "hello"])
        for calls in (1, 1):
            (output,) = run(front, front.submit(PROMPTS[0], SamplingParams(max_tokens=5)))
            assert output.text == right(PROMPTS[0], SamplingParams(max_tokens=5)).text
            assert (output.counts.handed, handle.calls["prefill"], post.up) == (0, calls, False)
        handle.kill()
        handle.deaf = frozenset()
        post.due = 0.0
        until(front, lambda: post.up)
        (output,) = run(front, front.submit(PROMPTS[0], SamplingParams(max_tokens=5)))
        assert output.counts.handed == output.counts.prompt
        assert_nothing_held(front)


def test_an_aborted_request_leaves_nothing() -> None:
    with here(CONFIG) as (front, _):
        names = [front.submit(prompt, SamplingParams(max_tokens=400, ignore_eos=True)) for prompt in PROMPTS]
        front.abort(names[0])
        outputs = [front.output(name) for name in names[1:]]
        until(front, lambda: all(output.token_ids for output in outputs))
        for name in names[1:]:
            assert front.abort(name).finish_reason == "abort"
        assert front.live == []
        assert_nothing_held(front)
        with pytest.raises(InputError, match="not live"):
            front.abort(names[0])
        assert front.stats().aborted == 3


def test_a_front_that_is_gone_leaves_nothing() -> None:
    """A worker ends what nobody asks for."""
    config = CONFIG.replace("workers = 2", "workers = 1").replace("silent = 60", "silent = 1")
    with here(config) as (front, _):
        name = front.submit(PROMPTS[0], SamplingParams(max_tokens=1500, ignore_eos=True))
        output = front.output(name)
        until(front, lambda: output.token_ids)
        post = front.posts[-1]
        end = time.monotonic() + SECONDS
        while (stats := post.handle.call("audit").result(SECONDS)).running:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert stats.aborted == 1


def test_nobody_answers_at_the_beginning() -> None:
    with pytest.raises(CapacityError, match="no decode worker answered within"):
        Front(WithoutWeights.read(), [], DeadlineSection(start=0.2))
