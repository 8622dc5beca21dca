"""`rorqual chat`: talk with a model in the terminal, or by a script of lines."""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.errors import RorqualError

if TYPE_CHECKING:
    from rorqual.cli.conversation import Conversation
    from rorqual.engine.monitor import Monitor

COMMANDS = {
    "/stats": "what the last reply cost, and the pools",
    "/regenerate": "another reply to the last turn",
    "/clear": "forget the conversation",
    "/help": "these commands",
    "/quit": "end, as Ctrl-D does",
}


def command(
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; else the shipped model.")] = None,
    system: Annotated[str, typer.Option(help="Text of a system turn in front.")] = "",
    max_tokens: Annotated[int, typer.Option(help="New tokens of a reply at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled conversation repeatable.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Bytes in all, such as 2GiB, or a share of what is free, such as 50%.")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Folder that keeps pages of the cache for later runs.")] = None,
    store_memory: Annotated[str | None, typer.Option(help="Bytes of them in memory (2GiB).")] = None,
    store_disk: Annotated[str | None, typer.Option(help="Bytes of them on disk at most.")] = None,
    store_ttl: Annotated[float | None, typer.Option(help="Seconds unused after which a page goes.")] = None,
    fsync: Annotated[bool, typer.Option("--fsync", help="Stored pages outlast a power failure too.")] = False,
    no_speculative: Annotated[bool, typer.Option("--no-speculative", help="Without drafts.")] = False,
    prefill: Annotated[str, typer.Option(help="ced (decoder on the last window) or full.")] = "ced",
    replay: Annotated[str, typer.Option(help="What is computed again after a hit: bounded or exact.")] = "bounded",
    numerics: Annotated[str, typer.Option(help="fp32 or native.")] = "fp32",
    kernels: Annotated[str, typer.Option(help="auto, fast or plain.")] = "auto",
) -> None:
    """Talk with a model. Lines that begin with a slash are commands: /help lists them.

    Ctrl-C stops a reply, Ctrl-D ends. What comes by a pipe is taken line by line, a turn each.
    """
    from rorqual.cli.conversation import Conversation
    from rorqual.engine.engine import Engine
    from rorqual.engine.monitor import Monitor
    from rorqual.engine.params import SamplingParams
    from rorqual.engine.storing import StoreOptions
    from rorqual.model.load import load

    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens)
    loaded = load(model, numerics=numerics, kernels=kernels)
    name = "the shipped model" if model is None else model.resolve().name
    kept = StoreOptions(folder=store, memory=store_memory, disk=store_disk, ttl=store_ttl, fsync=fsync)
    with ExitStack() as stack:
        engine = Engine(
            loaded,
            memory=memory,
            slots=1,
            speculative=False if no_speculative else None,
            prefill=prefill,
            replay=replay,
            store=stack.enter_context(kept.opened(loaded)),
        )
        monitor = stack.enter_context(Monitor(engine, name=name))
        conversation = Conversation(engine, params, system, monitor.tick)
        talking = _Talk(conversation, monitor)
        if _is_terminal():
            print(f"{name}, {conversation.limit:,} tokens of context; /help lists the commands")
        for line in _lines():
            if not talking.take(line.rstrip("\n")):
                return


class _Talk:
    """What a line does."""

    def __init__(self, conversation: Conversation, monitor: Monitor) -> None:
        self.conversation, self.monitor = conversation, monitor

    def take(self, line: str) -> bool:
        """One line of the user; False where it ends the talk. A mistake is one line on stderr, and the talk goes on."""
        if line.rstrip() == "/quit":
            return False
        try:
            if line.startswith("/"):
                self._obey(line.rstrip())
            elif line.strip():
                self._show(lambda: self.conversation.ask(line.strip()))
        except RorqualError as error:
            _complain(str(error))
        return True

    def _obey(self, line: str) -> None:
        if line == "/help":
            for name, what in COMMANDS.items():
                print(f"{name:<12} {what}")
            print("Any other line is your turn; a space in front makes one of a line that begins with a slash.")
        elif line == "/clear":
            self.conversation.clear()
        elif line == "/stats":
            from rorqual.cli.chat_stats import print_chat_stats

            print_chat_stats(self.conversation)
        elif line == "/regenerate":
            if self.conversation.params.greedy and self.conversation.last is not None:
                print("(nothing is drawn at temperature 0: expect the same reply; --temperature 1 draws)")
            self._show(self.conversation.again)
        else:
            _complain(f"{line.split()[0]}: no such command; the commands are {', '.join(COMMANDS)}")

    def _show(self, reply: Callable[[], Iterator[str]]) -> None:
        conversation = self.conversation
        with _on_interrupt(conversation.stop):
            for text in reply():
                print(text, end="", flush=True)
        print(flush=True)
        self.monitor.publish()
        last = conversation.last
        if last is not None and last.finish_reason == "length":
            full = len(conversation.ids) > conversation.limit
            which = f"the context's limit of {conversation.limit:,}" if full else "--max-tokens"
            _complain(f"the reply was cut after {last.counts.new:,} tokens, by {which}")
        elif last is not None and last.finish_reason == "error":
            _complain(f"{last.completions[0].stopped_by}; the turn is not kept")


def _lines() -> Iterator[str]:
    if sys.stdin is None or not sys.stdin.isatty():
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # refused by name later, instead of ending the talk
        yield from sys.stdin or ()
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for `input`)
    while True:
        try:
            line = input("> " if _is_terminal() else "")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends)")
            continue
        yield line


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`, so that no step is torn; a second one, before it has, interrupts as ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT) or signal.default_int_handler

    def first(number: int, where: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _complain(message: str) -> None:
    print(f"rorqual: {' '.join(message.split())}", file=sys.stderr, flush=True)
