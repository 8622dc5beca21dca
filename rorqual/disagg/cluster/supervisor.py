"""Ray under a cluster: started or joined, its actors placed, found again from another process, and taken down.

Ray restarts a worker whose process dies, as often as it dies; a call that was under way fails and is never sent again
by Ray, because only a front knows what its client has already (`rorqual.disagg.cluster.told`).
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from rorqual.disagg.cluster.config import LOCAL, LOOPBACK, ClusterConfig, WorkerSection
from rorqual.disagg.cluster.placing import Post
from rorqual.disagg.cluster.presence import announced, find, refuse_second
from rorqual.errors import CapacityError, InputError
from rorqual.planner.units import parse_bytes

CALLS = 1000
"""That one worker answers at once: polls of fronts and prefills under way, which wait and take no thread."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
"""Nothing is sent anywhere; and an error of a parcel that nobody came for is nobody's."""
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray takes 127.0.0.1 for the node's address only where it is told, on import, that there will be no other node; and
listens there alone."""


class RayHandle:
    """A worker by Ray's means (`Handle`)."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self.actor = ray, actor

    def call(self, method: str, *args: Any) -> Future[Any]:
        try:
            future: Future[Any] = getattr(self.actor, method).remote(*args).future()
        except Exception as error:  # Ray itself is gone, or has too much to do
            future = Future()
            future.set_exception(error)
        return future

    def begin(self, method: str, *args: Any) -> object:
        return getattr(self.actor, method).remote(*args)

    def kill(self) -> None:
        self._ray.kill(self.actor, no_restart=False)


@contextmanager
def up(config: ClusterConfig) -> Iterator[list[Post]]:
    """A cluster while the block runs: its workers, every one of them ready.

    Raises:
        InputError: Ray is missing or not there, a cluster of this name runs already, or the model cannot be loaded.
        CapacityError: Ray has no machine for a worker, or it was not ready in time.
    """
    refuse_second(config.name)
    ray = installed_ray(config.ray.address == LOCAL)
    with ExitStack() as stack:
        token = "" if config.ray.address != LOCAL else secrets.token_hex(32)
        address = stack.enter_context(_local(ray, config, token) if token else _joined(ray, config, config.ray.address))
        master = stack.enter_context(_master(config))
        posts = [_placed(ray, config, worker, master) for worker in config.workers]
        _await(ray, posts, config.deadlines.start)
        stack.enter_context(announced(config.name, address=address, token=token, master=master))
        yield posts


@contextmanager
def connected(config: ClusterConfig) -> Iterator[list[Post]]:
    """The workers of a cluster that runs, while the block does.

    Raises:
        InputError: there is none of this name.
    """
    ray = installed_ray(config.ray.address == LOCAL)
    address, token = config.ray.address, ""
    if address == LOCAL:
        own = find(config.name)
        if own is None:
            raise InputError(f"cluster: none called {config.name!r} runs here; start it with `rorqual cluster up`")
        address, token = own.address, own.token
    with _joined(ray, config, address, token):
        try:
            yield [
                Post(name=name, role=role, handle=RayHandle(ray, ray.get_actor(name, namespace=namespace(config))))
                for name, role, _ in config.workers
            ]
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"cluster: {config.name!r} has other workers than this config, or is not up") from error


def installed_ray(alone: bool) -> Any:
    """The module, imported for one machine or for several. Raises InputError where it is not installed."""
    if find_spec("ray") is None:
        raise InputError("cluster: ray is missing; install with pip install 'rorqual[cluster]'")
    wanted = QUIET | (ALONE if alone else {})
    os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})
    import ray

    if alone and ray._private.ray_constants.ENABLE_RAY_CLUSTER:
        (name,) = ALONE
        raise InputError(f"cluster: ray was imported before, and not for one machine; start with {name}=0 set")
    return ray


def namespace(config: ClusterConfig) -> str:
    """Of the actors' names."""
    return f"rorqual-{config.name}"


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that Ray reads, and hands to what it starts, while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _guarded(ray: Any, token: str) -> Iterator[None]:
    """Ray asks everybody for this token while the block runs. Without one, the user's own setting stands."""
    if not token:
        yield
        return
    with _environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}):
        _read_again(ray)
        yield
    _read_again(ray)


def _read_again(ray: Any) -> None:
    """Ray reads mode and token of the environment once, when it is imported; releases before 2.53 know neither."""
    core = ray._raylet
    if hasattr(core, "AuthenticationTokenLoader"):
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _local(ray: Any, config: ClusterConfig, token: str) -> Iterator[str]:
    """A Ray of our own on loopback; its address. Its processes end with this one, its files with the block."""
    cpus, gpus, resources = config.ray.cpus, 0.0, dict[str, float]()
    for _, _, own in config.workers:
        gpus += own.gpus
        if own.resource:
            resources[own.resource] = resources.get(own.resource, 0.0) + 1
    cpus = cpus or sum(own.cpus for _, _, own in config.workers)
    # A socket's path has room for a hundred characters, and Ray's own are long.
    folder = tempfile.mkdtemp(prefix="rorqual-")
    try:
        with _guarded(ray, token):
            context = ray.init(
                num_cpus=max(1, round(cpus)),
                num_gpus=round(gpus),
                resources=resources or None,
                object_store_memory=parse_bytes(config.ray.object_store, "ray.object_store"),
                _node_ip_address=LOOPBACK,
                _temp_dir=folder,
                **_common(config),
            )
            try:
                address: str = context.address_info["gcs_address"]
                if not address.startswith(f"{LOOPBACK}:"):
                    raise InputError(
                        f"cluster: Ray listens at {address}, as it was imported before; start a fresh process"
                    )
                yield address
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _joined(ray: Any, config: ClusterConfig, address: str, token: str = "") -> Iterator[str]:
    """A Ray that runs already. token: that it asks for, if it is ours; else the user's own setting stands."""
    local = {"_node_ip_address": LOOPBACK} if token else {}
    with _guarded(ray, token):
        try:
            ray.init(address=address, **local, **_common(config))
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(f"cluster: no Ray at {address} ({str(error).split(chr(10))[0]})") from error
        try:
            yield address
        finally:
            ray.shutdown()


def _common(config: ClusterConfig) -> dict[str, Any]:
    return {
        "namespace": namespace(config),
        "include_dashboard": False,
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }


def _placed(ray: Any, config: ClusterConfig, worker: tuple[str, str, WorkerSection], master: str) -> Post:
    """A worker, begun."""
    from rorqual.disagg.cluster.actors import ROLES

    name, role, own = worker
    threads = {"OMP_NUM_THREADS": str(own.threads), "NUMBA_NUM_THREADS": str(own.threads)} if own.threads else {}
    actor = (
        ray.remote(ROLES[role])
        .options(
            name=name,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=CALLS,
            num_cpus=own.cpus,
            num_gpus=own.gpus,
            resources={own.resource: 1.0} if own.resource else None,
            runtime_env={"env_vars": {**QUIET, **threads}},
        )
        .remote(config, name, master)
    )
    return Post(name=name, role=role, handle=RayHandle(ray, actor))


def _await(ray: Any, posts: list[Post], seconds: float) -> None:
    """Until every worker has said what it is."""
    end = time.monotonic() + seconds
    calls = [(post, post.handle.call("hello")) for post in posts]
    for post, call in calls:
        try:
            post.facts, post.stats = call.result(max(0.0, end - time.monotonic()))
            post.up = True
        except TimeoutError:
            free = {name: count for name, count in ray.available_resources().items() if name.isalpha()}
            raise CapacityError(
                f"cluster: {post.name} is not ready after {seconds:g} s; what Ray has free for it: {free}"
            ) from None
        except ray.exceptions.RayError as error:
            raise InputError(f"cluster: {post.name} cannot start: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """The line of an error of Ray's that says what went wrong in the worker: the last one of its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@contextmanager
def _master(config: ClusterConfig) -> Iterator[str]:
    """The host:port of Mooncake's master, where the config wants a store of it; one of our own where it says so."""
    own = config.store
    if own.kind != "mooncake":
        yield ""
    elif own.master != LOCAL:
        yield own.master
    else:
        from rorqual.store.local_pool import LocalPool

        with LocalPool(parse_bytes(own.memory, "store.memory"), host=LOOPBACK) as pool:
            yield pool.master
