"""Rows of a table on disk (field case 36): exact wherever the scales lie, and bounded in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rorqual.checkpoint import table as table_module
from rorqual.checkpoint.header import read_header
from rorqual.checkpoint.mapping import MappedFile
from rorqual.checkpoint.table import EngramTable
from rorqual.errors import CheckpointError, FormatError
from rorqual.formats.fp8 import E4M3_BY_BYTE, E8M0_BY_BYTE

ROWS, WIDTH = 1000, 64


@pytest.fixture
def stored() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales with no NaN in them."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (ROWS, WIDTH), dtype=torch.uint8, generator=generator)
    codes[(codes & 127) == 127] = 0
    return codes, torch.randint(110, 140, (ROWS, WIDTH // 32), dtype=torch.uint8, generator=generator)


def mapped(path: Path, name: str) -> torch.Tensor:
    return MappedFile(path).view(read_header(path)[name])


def expected(codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    values = E4M3_BY_BYTE[codes[ids].int()].unflatten(-1, (-1, 32))
    return (values * E8M0_BY_BYTE[scales[ids].int()].unsqueeze(-1)).flatten(-2)


@pytest.mark.parametrize("shards", [1, 2])
def test_rows_0_15_16_and_the_last_are_exact(tmp_path, stored, shards):
    codes, scales = stored
    # Names sort so that a megabyte of something else lies between the two.
    parts = {
        "a": codes.view(torch.float8_e4m3fn),
        "m": torch.full((2**20,), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "z": scales.view(torch.float8_e8m0fnu),
    }
    files = [tmp_path / f"{i}.safetensors" for i in range(shards)]
    save_file({name: parts[name] for name in ("a", "m")} if shards == 2 else parts, files[0])
    if shards == 2:
        save_file({"z": parts["z"]}, files[1])
    table = EngramTable(mapped(files[0], "a"), mapped(files[-1], "z"))
    ids = torch.tensor([[0, 15], [16, ROWS - 1]])
    rows = table.rows(ids)
    assert table.shape == (ROWS, WIDTH)
    assert rows.dtype == torch.float32 and rows.shape == (2, 2, WIDTH)
    assert torch.equal(rows.view(torch.int32), expected(codes, scales, ids).view(torch.int32))


@pytest.mark.parametrize("chunk", [1, 7, 16_384])
def test_repeats_order_and_chunks_do_not_matter(stored, monkeypatch, chunk):
    codes, scales = stored
    monkeypatch.setattr(table_module, "CHUNK_ROWS", chunk)
    ids = torch.randint(0, ROWS, (3, 5, 4), generator=torch.Generator().manual_seed(0))
    ids[0, 0] = ids[2, 4]
    assert torch.equal(EngramTable(codes, scales).rows(ids), expected(codes, scales, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_tables(dtype):
    values = torch.randn(50, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids = torch.tensor([49, 0, 0, 7])
    assert torch.equal(EngramTable(values).rows(ids), values[ids].float())


def test_no_rows(stored):
    assert EngramTable(*stored).rows(torch.empty(0, 24, dtype=torch.int64)).shape == (0, 24, WIDTH)


def test_rows_outside_the_table_assert(stored):
    for bad in (-1, ROWS):
        with pytest.raises(AssertionError, match="row ids"):
            EngramTable(*stored).rows(torch.tensor([3, bad]))


def test_a_nan_scale_is_refused_when_its_row_is_read(stored):
    codes, scales = stored
    scales[16, 1] = 255
    table = EngramTable(codes, scales, name="layers.1.engram.embed")
    assert table.rows(torch.tensor([15, 17])).isfinite().all()
    with pytest.raises(CheckpointError, match=r"layers\.1\.engram\.embed\.scale: scale byte 255 \(NaN\) in row 16"):
        table.rows(torch.tensor([15, 16]))


def test_other_shapes_and_dtypes_are_refused(stored):
    codes, scales = stored
    for bad in ((codes, scales[:, :1]), (codes, scales[:-1]), (codes.view(torch.int8), scales), (codes, None)):
        with pytest.raises(FormatError):
            EngramTable(*bad)


def test_working_memory_is_the_chunk(stored, monkeypatch):
    """A thousand times the look-ups, the same rows expanded at once."""
    codes, scales = stored
    monkeypatch.setattr(table_module, "CHUNK_ROWS", 100)
    table = EngramTable(codes, scales)
    sizes = []
    expand = table._expand
    monkeypatch.setattr(table, "_expand", lambda ids: (sizes.append(ids.numel()), expand(ids))[1])
    table.rows(torch.arange(100_000) % ROWS)
    assert max(sizes) <= 100 and len(sizes) == 1000
