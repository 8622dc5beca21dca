"""The engine's thread and its event loops: a wake-up a step, nothing asked twice, nothing left by the cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from serving import SECONDS, demo_model

from rorqual.engine.engine import Engine
from rorqual.engine.output import Delta, TokenLogprob
from rorqual.engine.params import SamplingParams
from rorqual.server.worker import EngineStopped, EngineWorker, joined

PROMPT = [0, 371, 280, 287]


@contextlib.asynccontextmanager
async def worker(interval: float = 0.0) -> AsyncIterator[EngineWorker]:
    made = EngineWorker(Engine(demo_model(), slots=4, pages=16), interval=interval)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def delta(index: int, *ids: int, end: str | None = None, logprobs: bool = False) -> Delta:
    return Delta(
        request="r",
        index=index,
        text="".join(map(chr, ids)),
        token_ids=ids,
        logprobs=tuple(TokenLogprob(token=one, logprob=-1.0) for one in ids) if logprobs else None,
        finish_reason=end,
        stopped_by=ids[-1] if end == "stop" else None,
    )


def test_what_nobody_read_yet_is_one_delta_a_completion() -> None:
    come = [delta(1, 65), delta(0, 97, 98), delta(1, 66, 67), delta(0, 99, end="stop"), delta(1, 68, end="length")]
    assert joined([*come]) == [delta(1, 65, 66, 67, 68, end="length"), delta(0, 97, 98, 99, end="stop")]


def test_log_probabilities_of_joined_deltas_are_those_of_all_tokens() -> None:
    parts = [delta(0, 65, logprobs=True), delta(0, 66, 67, logprobs=True), delta(0, end="abort")]
    (whole,) = joined([*parts])
    assert isinstance(whole, Delta)
    assert [one.token for one in whole.logprobs or ()] == list(whole.token_ids) == [65, 66, 67]
    assert whole.finish_reason == "abort"


def test_an_end_of_the_engine_comes_behind_what_was_said() -> None:
    stopped = EngineStopped("engine: ended")
    assert joined([delta(0, 65), delta(0, 66), stopped]) == [delta(0, 65, 66), stopped]


def test_a_step_wakes_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with worker() as made:
            loop, wakes = asyncio.get_running_loop(), 0
            waken = loop.call_soon_threadsafe

            def counted(*arguments: Any, **options: Any) -> Any:
                nonlocal wakes
                wakes += 1
                return waken(*arguments, **options)

            monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
            ticket = await made.submit(PROMPT, SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=12))
            texts = dict.fromkeys(range(3), "")
            async for one in ticket:
                texts[one.index] += one.text
            found = wakes
            steps = (await made.call(made.engine.stats)).steps
            # One for the answer to `submit`, and one for each step that gave anything.
            assert 2 <= found <= 1 + steps
            assert ticket.output is not None
            assert [own.text for own in ticket.output.completions] == list(texts.values())

    asyncio.run(ask())


@pytest.mark.parametrize("tokens", [1, 3])
def test_completions_that_end_in_one_step_are_all_told(tokens: int) -> None:
    async def ask() -> None:
        async with worker() as made:
            params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
            ticket = await made.submit(PROMPT, params, speculative=False)
            ends = [one.index async for one in ticket if one.finish_reason == "length"]
            assert sorted(ends) == [0, 1, 2]

    asyncio.run(asyncio.wait_for(ask(), SECONDS))


def test_within_an_interval_deltas_join_and_the_first_and_last_do_not_wait() -> None:
    async def ask() -> None:
        async with worker(interval=1000.0) as made:
            ticket = await made.submit(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
            found = [one async for one in ticket]
            steps = (await made.call(made.engine.stats)).steps
            assert ticket.output is not None
            assert "".join(one.text for one in found) == ticket.output.text
            assert [token for one in found for token in one.token_ids] == ticket.output.token_ids
            # The first one's tokens came alone, though far fewer than all.
            assert len(found) == 2 < steps
            assert 0 < len(found[0].token_ids) < 20
        async with worker(interval=0.001) as made:
            ticket = await made.submit(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
            # A timer wakes the reader while the engine goes on.
            assert len([one async for one in ticket]) > 2

    asyncio.run(ask())


def test_what_has_ended_is_not_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with worker() as made:
            asked: list[Callable[[], Any]] = []
            ticket = await made.submit(PROMPT, SamplingParams(max_tokens=4))
            call = made.call

            async def counted(command: Callable[[], Any]) -> Any:
                asked.append(command)
                return await call(command)

            monkeypatch.setattr(made, "call", counted)
            async for _ in ticket:
                pass
            await ticket.abort()
            assert not asked
            cut = await made.submit(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
            await cut.abort()
            await cut.abort()
            assert len(asked) == 2
            stats = await call(made.engine.stats)
            assert (stats.finished, stats.aborted, stats.running) == (1, 1, 0)

    asyncio.run(ask())


def test_who_is_cancelled_while_submitting_leaves_nothing() -> None:
    async def ask() -> None:
        async with worker() as made:
            tasks = [
                asyncio.ensure_future(made.submit(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True)))
                for _ in range(6)
            ]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*tasks, return_exceptions=True)
            )
            live = await made.call(lambda: made.engine.live)
            assert live == []
            await made.call(made.engine.check_integrity)

    asyncio.run(ask())


def test_a_failing_command_fails_whoever_asked_alone() -> None:
    async def ask() -> None:
        async with worker() as made:
            with pytest.raises(ZeroDivisionError):
                await made.call(lambda: 1 // 0)
            assert made.alive
            assert await made.call(lambda: 2) == 2

    asyncio.run(ask())


def test_readers_and_askers_hear_of_the_end() -> None:
    async def ask() -> None:
        async with worker() as made:
            ticket = await made.submit(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True))
            made.stop()
            with pytest.raises(EngineStopped):
                async for _ in ticket:
                    pass
            await ticket.abort()
            with pytest.raises(EngineStopped):
                await made.call(lambda: 1)

    asyncio.run(ask())
