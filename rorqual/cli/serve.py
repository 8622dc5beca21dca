"""`rorqual serve`: a model behind the APIs that clients speak already."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.server.worker import Served

KEYS = "RORQUAL_API_KEYS"
OF_ENGINE = (
    *("model", "max_model_len", "memory", "slots", "numerics", "kernels"),
    *("store", "store_memory", "store_disk", "store_ttl", "fsync"),
)
"""Options of an engine in this process; the workers of a cluster have theirs from its config."""
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "deepseek_recipe", "llguidance")


def command(
    context: typer.Context,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; else the shipped model.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one, which is printed.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help=f"KEY or KEY=TENANT; may be repeated. Also from {KEYS}.")
    ] = None,
    model_name: Annotated[str, typer.Option(help="What clients call the model.")] = "rorqual",
    alias: Annotated[list[str] | None, typer.Option(help="Another name of it; may be repeated.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Think where a request does not say.")] = False,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a request, prompt and new ones.")] = None,
    memory: Annotated[str | None, typer.Option(help="Bytes in all (2GiB) or a share of what is free (50%).")] = None,
    slots: Annotated[int, typer.Option(help="Sequences that run at once.")] = 16,
    store: Annotated[Path | None, typer.Option(help="Folder that keeps pages of the cache for later runs.")] = None,
    store_memory: Annotated[str | None, typer.Option(help="Bytes of them in memory (2GiB).")] = None,
    store_disk: Annotated[str | None, typer.Option(help="Bytes of them on disk at most.")] = None,
    store_ttl: Annotated[float | None, typer.Option(help="Seconds unused after which a page goes.")] = None,
    fsync: Annotated[bool, typer.Option("--fsync", help="Stored pages outlast a power failure too.")] = False,
    numerics: Annotated[str, typer.Option(help="fp32 or native.")] = "fp32",
    kernels: Annotated[str, typer.Option(help="auto, fast or plain.")] = "auto",
    waiting: Annotated[int, typer.Option(help="Requests in the queue at most.")] = 256,
    concurrency: Annotated[int, typer.Option(help="Requests of one tenant at a time.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds of one request.")] = 600.0,
    stream_interval: Annotated[
        float, typer.Option(help="Seconds between two events of a stream, at least; 0 for one each step.")
    ] = 0.02,
    drain: Annotated[float, typer.Option(help="Seconds that running requests have when the server ends.")] = 30.0,
    body_bytes: Annotated[int, typer.Option(help="Bytes of a request's body.")] = 32 << 20,
    messages: Annotated[int, typer.Option(help="Messages of a conversation.")] = 2048,
    tools: Annotated[int, typer.Option(help="Tools of a request.")] = 128,
    completions: Annotated[int, typer.Option(help="n at most.")] = 16,
    prompts: Annotated[int, typer.Option(help="Prompts of a text completion.")] = 64,
    stops: Annotated[int, typer.Option(help="Stop texts of a request.")] = 16,
    images: Annotated[int, typer.Option(help="Images of a request.")] = 16,
    image_bytes: Annotated[int, typer.Option(help="Bytes of one image.")] = 16 << 20,
    image_pixels: Annotated[int, typer.Option(help="Pixels of one image.")] = 64 << 20,
    cluster: Annotated[
        Path | None, typer.Option(help="Config of a cluster that is up; its workers have the model.")
    ] = None,
    image_host: Annotated[list[str] | None, typer.Option(help="Host that images are fetched from; repeatable.")] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's Chat Completions, Completions and Responses, Anthropic's Messages."""
    _check_installed()
    if cluster is not None:
        _check_left_out(context)
    from rorqual.server.app import create_app
    from rorqual.server.serving import address, listen, serve
    from rorqual.server.settings import ServerSettings

    settings = ServerSettings(
        model=model_name,
        aliases=tuple(alias or ()),
        api_keys=read_keys([*re.split(r"[\s,]+", os.environ.get(KEYS, "")), *(api_key or ())]),
        body_bytes=body_bytes,
        messages=messages,
        tools=tools,
        images=images,
        image_bytes=image_bytes,
        image_pixels=image_pixels,
        waiting=waiting,
        concurrency=concurrency,
        timeout=timeout,
        stream_interval=stream_interval,
        completions=completions,
        prompts=prompts,
        stops=stops,
        image_hosts=tuple(image_host or ()),
        thinking=thinking,
    )
    options = {"memory": memory, "slots": slots, "max_model_len": max_model_len, "max_waiting": waiting}
    kept = {"folder": store, "memory": store_memory, "disk": store_disk, "ttl": store_ttl, "fsync": fsync}
    with listen(host, port) as listener, ExitStack() as stack:
        own = _front(cluster) if cluster is not None else _engine(model, numerics, kernels, kept, **options)
        app, where = create_app(stack.enter_context(own), settings), address(listener)
        serve(app, listener, drain, lambda: print(f"rorqual serves {model_name} at {where}", flush=True))


@contextmanager
def _engine(model: Path | None, numerics: str, kernels: str, kept: dict[str, Any], **options: Any) -> Iterator[Served]:
    from rorqual.engine.engine import Engine
    from rorqual.engine.storing import StoreOptions
    from rorqual.model.load import load

    wanted, loaded = StoreOptions(**kept), load(model, numerics=numerics, kernels=kernels)
    with wanted.opened(loaded) as pages:
        yield Engine(loaded, store=pages, **options)


@contextmanager
def _front(path: Path) -> Iterator[Served]:
    from rorqual.disagg.cluster.config import ClusterConfig
    from rorqual.disagg.cluster.session import front_of

    with front_of(ClusterConfig.read(path)) as front:
        yield front


def _check_left_out(context: typer.Context) -> None:
    """Options that would have no effect are refused."""
    given = [name for name in OF_ENGINE if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        spelled = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"serve: {spelled} not legal with --cluster; its config says what the workers run")


def read_keys(given: Iterable[str]) -> dict[str, str]:
    """Key -> tenant, of words KEY or KEY=TENANT. A key without a tenant is one of its own.

    >>> read_keys(["a", "b=blue", "", "c=blue"])
    {'a': 'key-1', 'b': 'blue', 'c': 'blue'}

    Raises:
        InputError: an empty key or tenant; which one is told by number, never by its text.
    """
    found: dict[str, str] = {}
    for number, word in enumerate(filter(None, given), start=1):
        key, equals, tenant = word.partition("=")
        if not key or (equals and not tenant):
            raise InputError(f"api-key: the one at place {number} is not legal; legal: KEY or KEY=TENANT")
        found[key] = tenant or f"key-{number}"
    return found


def _check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(f"serve: {', '.join(missing)} missing; install with pip install 'rorqual[server]'")
