"""The prefill side alone: what it loads, what it keeps, and for how long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import GOLDENS, demo, golden, random_ids, tiny_folder
from splits import Clock, assert_worker_clean, encoder_of, poisoned

from rorqual.checkpoint.load import Checkpoint
from rorqual.config import ModelConfig
from rorqual.disagg.prefill import Offer, PrefillWorker
from rorqual.disagg.transport import InProcess
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.errors import CapacityError, CheckpointError, HandoverError, InputError
from rorqual.inventory.names import expected_tensors
from rorqual.model.load import load
from rorqual.model.transformer import of_encoder


def offers_of(worker: PrefillWorker, count: int = 1) -> list[Offer]:
    """Step until so many requests came to an end of their prefill."""
    found: list[Offer] = []
    while len(found) < count:
        found += worker.step()
        worker.check_integrity()
    return found


def test_an_encoder_takes_no_tensor_of_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = GOLDENS / "fp32-dspark", []
    config = ModelConfig.from_json(folder)
    inner = Checkpoint.tensor

    def tensor(self: Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return inner(self, name)

    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    model = load(folder, page_tokens=16, part="encoder")
    names = set(expected_tensors(config))
    wanted = {name for name in names if of_encoder(config, name)}
    seam = f"layers.{config.decoder_start}."
    kept = {name.removeprefix(seam) for name in wanted if name.startswith(seam)}
    assert kept >= {"attn.compressor.wkv.weight", "attn.indexer.wk.weight", "attn_norm.weight"}
    assert not any(name.startswith(("ffn", "attn.wq", "attn.wo", "attn.wkv", "hc_")) for name in kept)
    # An Engram table's rows are read when they are asked for, and so is nothing else of it.
    assert set(read) <= wanted and wanted - set(read) == set()
    assert not any(name.startswith(("head", "norm", "mtp", f"layers.{config.decoder_start + 1}.")) for name in read)
    assert model.draft is None and not model.has_decoder


def test_names_are_checked_though_they_are_not_read(tmp_path: Path) -> None:
    """A checkpoint whose decoder lacks a tensor is refused on the prefill side too."""
    from safetensors.torch import load_file, save_file

    folder = GOLDENS / "fp32-text"
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    last = ModelConfig.from_json(folder).num_hidden_layers - 1
    del tensors[f"layers.{last}.attn.kv_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"layers\.{last}\.attn\.kv_norm\.weight is missing"):
        load(tmp_path, page_tokens=16, part="encoder")


RESIDENT = """
import json, sys
from pathlib import Path
import torch
from rorqual.disagg.prefill import PrefillWorker
from rorqual.disagg.transport import InProcess
from rorqual.model.load import load

folder, part = sys.argv[1:]
model = load(folder, part=part, page_tokens=16, kernels="plain")
worker = PrefillWorker(model, InProcess(), pages=16, slots=1)
worker.submit(torch.arange(3, 131), mode="streams" if part == "encoder" else "rings")
while not worker.step():
    pass
resident, ours = 0, False
for line in Path("/proc/self/smaps").read_text().splitlines():
    if "-" in line.split(" ")[0] and not line.split(" ")[0].endswith(":"):
        ours = line.endswith(".safetensors")
    elif ours and line.startswith("Rss:"):
        resident += int(line.split()[1]) * 1024
print(json.dumps(resident))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not tell what is resident")
def test_what_is_resident_is_the_encoder() -> None:
    """Bytes of the checkpoint's file in memory after a prefill: the encoder's share of it, not the whole."""
    config, found = ModelConfig.from_json(tiny_folder()), {}
    for part in ("encoder", "all"):
        command = [sys.executable, "-c", RESIDENT, str(tiny_folder()), part]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found[part] = json.loads(done.stdout)
    specs = expected_tensors(config).values()
    whole, encoder = (sum(s.nbytes for s in specs if all_ or of_encoder(config, s.name)) for all_ in (True, False))
    # The kernel maps a few pages around what is touched.
    assert found["encoder"] < encoder + (whole - encoder) // 2 < whole
    assert found["encoder"] < found["all"]


def test_an_encoder_gives_no_logits() -> None:
    model = encoder_of("fp32-dspark")
    sequence = Sequence(model, new_cache(model, 32))
    with pytest.raises(InputError, match="model: it was loaded without its decoder, which only prefills"):
        sequence.prefill(Prompt(ids=random_ids(9)))
    with pytest.raises(InputError, match="part: 'decoder' is not legal; legal: all, encoder"):
        load(GOLDENS / "fp32-text", part="decoder")


def test_global_kv_is_that_of_a_whole_model() -> None:
    """Every page but what lies behind the prompt in the last one, to the bit: chunked, several at once."""
    model, prompts = golden("fp32-dspark", "fast"), [random_ids(n, seed=n) for n in (97, 60, 140)]
    worker = poisoned(encoder_of("fp32-dspark"), InProcess())
    names = [worker.submit(ids) for ids in prompts]
    offers_of(worker, 3)
    for name, ids in zip(names, prompts, strict=True):
        sequence = Sequence(model, new_cache(model, len(ids)))
        sequence.prefill(Prompt(ids=ids), chunk=48)
        full = len(ids) // 16
        mine = [worker.cache.pages.pool[page] for page in worker.kv.block_table(name)[:full]]
        assert torch.equal(torch.stack(mine), sequence.cache.pages.pool[sequence.block_table[:full]])
        worker.cancel(name)
    assert_worker_clean(worker)


def test_pages_are_kept_until_done() -> None:
    clock = Clock()
    transport = InProcess(clock=clock)
    worker = poisoned(encoder_of("fp32-dspark"), transport, slots=2, pages=16, hold_s=30, clock=clock)
    names = [worker.submit(random_ids(70, seed=n)) for n in range(3)]
    first, second = offers_of(worker, 2)
    assert worker.state(names[0]) == "offered" and worker.state(names[2]) == "waiting"
    assert worker.kv.slots.free == 0 and worker.kv.pages.used == 10
    assert not worker.step() and worker.has_work
    assert first.ticket is not None and second.ticket is not None
    transport.done(first.ticket)
    (third,) = offers_of(worker)
    assert third.request == names[2] and worker.kv.slots.free == 0
    clock.now = 30
    worker.step()
    assert not worker.has_work and not worker.computing
    assert_worker_clean(worker)


def test_without_credit_it_waits_and_then_says_so() -> None:
    clock = Clock()
    transport = InProcess(credit_parcels=1, clock=clock)
    worker = poisoned(encoder_of("fp32-dspark"), transport, hold_s=30, clock=clock)
    names = [worker.submit(random_ids(20, seed=n)) for n in range(2)]
    (first,) = offers_of(worker)
    assert worker.step() == [] and worker.state(names[1]) == "ready"
    clock.now = 29
    assert first.ticket is not None
    transport.done(first.ticket)
    (second,) = offers_of(worker)
    assert second.ticket is not None and second.request == names[1]
    name = worker.submit(random_ids(20, seed=5))
    while worker.state(name) != "ready":
        worker.step()
    clock.now = 30
    assert worker.step()[0].ticket is not None, "the other one's time is over, and its credit is free"
    other = worker.submit(random_ids(20, seed=6))
    while worker.state(other) != "ready":
        worker.step()
    worker.hold_s = 1
    last = worker.submit(random_ids(20, seed=7))
    while worker.state(last) != "ready":
        worker.step()
    clock.now = 31
    failed = worker.step()
    assert [offer.error for offer in failed] == [f"hand-over of '{last}': no credit for it within 1 s"]
    worker.close()
    assert_worker_clean(worker)


def test_a_parcel_that_never_fits_is_an_error_at_once() -> None:
    worker = poisoned(encoder_of("fp32-dspark"), InProcess(credit_bytes=1000))
    worker.submit(random_ids(20))
    (offer,) = offers_of(worker)
    assert offer.ticket is None and offer.error is not None and "takes 1000 at most" in offer.error
    assert_worker_clean(worker)


@pytest.mark.parametrize("state", ["waiting", "prefill", "ready", "offered"])
def test_cancel_in_every_state(state: str) -> None:
    transport = InProcess(credit_parcels=1)
    worker = poisoned(encoder_of("fp32-dspark"), transport, slots=2)
    other = worker.submit(random_ids(20, seed=1)) if state == "ready" else None
    name = worker.submit(random_ids(130, seed=2))
    while worker.state(name) != state:
        worker.step()
    worker.cancel(name)
    worker.cancel(name)
    assert name not in worker
    if other is not None:
        worker.cancel(other)
    assert_worker_clean(worker)
    assert transport.offered_bytes == 0


def test_a_late_pull_of_pages_that_are_somebody_elses_is_found_damaged() -> None:
    """A transport that still hands out what its sender has let go of: the checksum is of the time of the offer."""
    from rorqual.disagg.parcel import Parcel

    transport = InProcess()
    worker = poisoned(encoder_of("fp32-dspark"), transport)
    worker.submit(random_ids(70, seed=1))
    (offer,) = offers_of(worker)
    assert offer.ticket is not None
    held = transport._offers[offer.ticket.place].parcel
    worker.close()
    worker.drop_cached()
    with pytest.raises(HandoverError, match="part pages is damaged"):
        Parcel.from_bytes(held.to_bytes())


def test_refusals_by_name() -> None:
    worker = poisoned(encoder_of("fp32-dspark"), InProcess(), max_waiting=1, pages=8)
    with pytest.raises(InputError, match="mode: 'rings' needs the decoder"):
        worker.submit([5], mode="rings")
    with pytest.raises(InputError, match="mode: 'all' is not one of replay, streams, rings"):
        worker.submit([5], mode="all")
    with pytest.raises(InputError, match="never fit the cache's 128"):
        worker.submit(random_ids(129))
    worker.submit([5, 6], request="a")
    with pytest.raises(InputError, match="request: 'a' is live already"):
        worker.submit([5, 6], request="a")
    with pytest.raises(CapacityError, match="queue: 1 requests wait already"):
        worker.submit([5, 6], request="b")
    assert worker.live == ["a"]
    worker.close()
    assert_worker_clean(worker)
    for options, told in (({"hold_s": 0}, "hold_s: 0 is not legal"), ({"replay": "none"}, "replay: 'none' is not one")):
        with pytest.raises(InputError, match=told):
            PrefillWorker(demo(), InProcess(), **options)
