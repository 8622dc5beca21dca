"""A cluster's TOML: everything has a default, and what is not legal is refused by section and key."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from rorqual.disagg.cluster.config import ClusterConfig
from rorqual.errors import InputError

WHOLE = """
name = "whale"
[model]
replay = "exact"
[prefill]
workers = 2
memory = "1GiB"
cpus = 2
[decode]
workers = 3
resource = "decode"
[handover]
mode = "replay"
[store]
kind = "disk"
folder = "pages"
ttl = 60
[ray]
address = "10.0.0.1:6379"
[deadlines]
losses = 2
"""


def test_nothing_stated_is_one_worker_of_each_role() -> None:
    assert ClusterConfig.parse("") == ClusterConfig()
    assert [name for name, _, _ in ClusterConfig().workers] == ["prefill-0", "decode-0"]


def test_a_whole_config(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(WHOLE, encoding="utf-8")
    config = ClusterConfig.read(path)
    assert (config.name, config.model.replay, config.handover.mode, config.store.ttl) == (
        "whale",
        "exact",
        "replay",
        60.0,
    )
    assert [(name, role) for name, role, _ in config.workers] == [
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
        ("decode-2", "decode"),
    ]
    assert (config.prefill.cpus, config.decode.resource, config.deadlines.losses) == (2.0, "decode", 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name = 3", "name: 3 is not legal; legal: a text"),
        ("name = 'a b'", "name: 'a b' is not legal; legal: letters"),
        ("[prefil]", r"prefil: unknown; legal: name, \[model\], \[prefill\]"),
        ("prefill = 2", r"prefill: 2 is not legal; legal: a section \[prefill\]"),
        ("[prefill]\nworker = 1", "prefill.worker: unknown; legal: workers, memory, slots"),
        ("[prefill]\nworkers = 0", "prefill.workers: 0 is not legal; legal: at least 1"),
        ("[decode]\nworkers = '1'", "decode.workers: '1' is not legal; legal: a whole number"),
        ("[decode]\nworkers = true", "decode.workers: True is not legal; legal: a whole number"),
        ("[decode]\ncpus = -1", "decode.cpus: -1.0 is not legal; legal: at least 0"),
        ("[decode]\ncpus = nan", "decode.cpus: nan is not legal"),
        ("[model]\nreplay = 'none'", "model.replay: 'none' is not legal; legal: bounded, exact"),
        ("[model]\nnumerics = 'bf16'", "model.numerics: 'bf16' is not legal; legal: fp32, native"),
        ("[handover]\nmode = 'stream'", "handover.mode: 'stream' is not legal; legal: replay, streams, rings"),
        ("[handover]\ntransport = 'tcp'", "handover.transport: 'tcp' is not legal; legal: ray, mooncake"),
        ("[handover]\nbytes = '1 page'", "handover.bytes must be a number of bytes"),
        ("[store]\nkind = 'redis'", "store.kind: 'redis' is not legal; legal: none, memory, disk, mooncake"),
        ("[store]\nkind = 'disk'", "store.folder: '' is not legal with kind disk"),
        ("[store]\nfsync = 1", "store.fsync: 1 is not legal; legal: true or false"),
        ("[store]\nmaster = 'here'", "store.master: 'here' is not legal; legal: local, or host:port"),
        ("[ray]\naddress = 'head:0'", "ray.address: 'head:0' is not legal; legal: local, or host:port"),
        ("[ray]\nobject_store = '1MiB'", "ray.object_store: 1048576 is not legal"),
        ("[deadlines]\nsilent = 0", "deadlines.silent: 0.0 is not legal; legal: above 0"),
        ("[deadlines", "not TOML"),
    ],
)
def test_what_is_not_legal_is_named(text: str, told: str) -> None:
    with pytest.raises(InputError, match=f"cluster config: {told}"):
        ClusterConfig.parse(text)


def test_the_documents_configs_are_legal() -> None:
    """The example, and every block of docs/cluster.md; the one of all keys has their defaults."""
    root = Path(__file__).parents[2]
    example = ClusterConfig.read(root / "examples" / "cluster.toml")
    assert (example.prefill.workers, example.decode.workers, example.ray.address) == (1, 2, "local")
    blocks = re.findall(r"```toml\n(.*?)```", (root / "docs" / "cluster.md").read_text(encoding="utf-8"), re.DOTALL)
    every, fleet = (ClusterConfig.parse(block) for block in blocks)
    assert every == ClusterConfig()
    stated = tomllib.loads(blocks[0])
    for section in fields(ClusterConfig):
        if section.name not in ("name", "decode"):
            assert set(stated[section.name]) == {own.name for own in fields(getattr(every, section.name))}
    assert (len(fleet.workers), fleet.handover.protocol, fleet.store.kind) == (12, "rdma", "mooncake")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml cannot be read"):
        ClusterConfig.read(tmp_path / "none.toml")
