"""Reading what engines print, and naming the mistake that a figure equals (field case 4)."""

from __future__ import annotations

from fractions import Fraction

import pytest

from rorqual.config import presets
from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.check_log import LogCheck, check_log
from rorqual.planner.engine_log import EngineLog, read_log
from rorqual.planner.mistakes import known_figures, spread_fixed
from rorqual.planner.storage import row_format

RELEASE = KVLayout(presets.load("v4.1-flash"))
PACKED = row_format(RELEASE, "packed")
GIB = 2**30

VLLM = """\
INFO 11-02 10:00:00 [engine.py:1] cache_config=CacheConfig(block_size=64, gpu_memory_utilization=0.9)
INFO 11-02 10:00:01 [worker.py:1] Available KV cache memory: 47.17 GiB
INFO 11-02 10:00:02 [kv_cache_utils.py:1] GPU KV cache size: 56,908,288 tokens
INFO 11-02 10:00:02 [kv_cache_utils.py:1] Maximum concurrency for 131,072 tokens per request: 422.98x
INFO 11-02 10:00:03 [executor.py:1] # GPU blocks: 889,192, # CPU blocks: 0
"""
SGLANG = """\
[2026-11-02 10:00:00] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000000, K size: 38.15 GB, V size: 38.14 GB
[2026-11-02 10:00:01] max_total_num_tokens=1000000, chunked_prefill_size=8192, max_running_requests=2048
"""


def check(text: str, cache_bytes: int = 0) -> LogCheck:
    return check_log(RELEASE, PACKED, read_log(text.splitlines()), cache_bytes)


def test_vllm_lines() -> None:
    log = read_log(VLLM.splitlines())
    assert log == EngineLog(
        engine="vLLM",
        tokens=56_908_288,
        memory=Fraction(4717, 100) * GIB,
        memory_error=Fraction(GIB, 200),
        blocks=889_192,
        block_size=64,
        request_tokens=131_072,
        concurrency=Fraction(42_298, 100),
        lines=4,
    )


def test_sglang_lines() -> None:
    log = read_log(SGLANG.splitlines())
    assert (log.engine, log.tokens, log.lines) == ("SGLang", 1_000_000, 2)
    assert log.memory == Fraction(7629, 100) * GIB
    assert log.memory_error == 2 * Fraction(GIB, 200)
    one = read_log(["KV Cache is allocated. #tokens: 5,000, KV size: 3 GB"])
    assert (one.tokens, one.memory, one.memory_error) == (5000, 3 * GIB, Fraction(GIB, 2))
    assert read_log(["KV Cache is allocated. #tokens: 5000"]).memory is None


def test_the_last_figure_counts_and_blocks_become_tokens() -> None:
    twice = read_log(["GPU KV cache size: 10 tokens", "GPU KV cache size: 2,000 tokens"])
    assert (twice.tokens, twice.lines) == (2000, 2)
    assert read_log(["block_size=16", "# GPU blocks: 1,000, # CPU blocks: 4"]).tokens == 16_000


@pytest.mark.parametrize("lines", [[], ["hello"], ["loading weights took 3 s", "block_size=16"]])
def test_a_log_without_a_known_line_is_refused(lines: list[str]) -> None:
    with pytest.raises(InputError, match=r"no line that is known; known are GPU KV cache size: N tokens; .*max_total"):
        read_log(lines)


def test_a_log_that_agrees() -> None:
    # 47.17 GiB / 56,908,288 tokens = 890.01 bytes.
    found = check(VLLM)
    assert found.from_log
    assert found.agrees
    assert [figure.name for figure in found.matches] == ["packed"]
    assert found.request_bytes == Fraction(4717, 100) * GIB / Fraction(42_298, 100)
    assert found.verdict.startswith("the storage 'packed' (890 B")


@pytest.mark.parametrize(
    ("claimed", "mistake"),
    [
        (10_324, "every layer counted as storing its own global KV"),
        (81_920, "a key and a value in bf16 in every layer"),
        (20_480, "the latent in FP8 in every layer, without scales"),
        (800, "codes without their scales"),
        (5_242_880, "a bf16 key and value of every head in every layer"),
        (1490, "fp8-uniform, FP4 index key"),
        (1650, "fp8-uniform, FP8 index key"),
        (1630, "v4-rows, FP4 index key"),
        (1790, "v4-rows, FP8 index key"),
        (3200, "bf16"),
    ],
)
def test_known_figures_are_recognised(claimed: int, mistake: str) -> None:
    memory = 50 * GIB
    found = check(f"Available KV cache memory: 50.00 GiB\nGPU KV cache size: {memory // claimed} tokens")
    assert [figure.name for figure in found.matches] == [mistake]
    assert not found.agrees
    known = "the storage" if claimed in (1490, 1650, 1630, 1790, 3200) else "a known mistake"
    assert found.verdict.startswith(f"{known} '{mistake}'")


def test_an_unknown_figure_names_the_nearest() -> None:
    found = check(f"Available KV cache memory: 50.00 GiB\nGPU KV cache size: {50 * GIB // 6400} tokens")
    assert found.matches == ()
    assert (
        found.verdict == "no known figure; 0.62 times 'every layer counted as storing its own global KV', the nearest"
    )


def test_fixed_bytes_spread_over_the_length_planned_for() -> None:
    """Field case 1, seen in a log: 890 + 3,085,504 / 16,384 = 1,078.3 bytes."""
    figure = spread_fixed(RELEASE, 16_384)
    assert figure.bytes_per_token == 890 + Fraction(3_085_504, 16_384)
    tokens = int(50 * GIB / figure.bytes_per_token)
    found = check(
        f"Available KV cache memory: 50.00 GiB\nGPU KV cache size: {tokens} tokens\n"
        "Maximum concurrency for 16,384 tokens per request: 3038.5x"
    )
    assert [match.name for match in found.matches] == [figure.name]
    assert not found.agrees


def test_without_the_logs_memory_the_plans_is_taken() -> None:
    found = check("max_total_num_tokens=1000000", cache_bytes=900_000_000)
    assert not found.from_log
    assert found.implied == 900
    assert found.agrees
    # A looser tolerance: two storages that are 1.2 % apart are both named, the nearest first.
    names = [figure.name for figure in check("max_total_num_tokens=1000000", cache_bytes=1_632_000_000).matches]
    assert names == ["v4-rows, FP4 index key", "fp8-uniform, FP8 index key"]


def test_logs_that_say_too_little() -> None:
    with pytest.raises(InputError, match=r"how many tokens .* gives blocks but no block_size"):
        check("# GPU blocks: 1,000, # CPU blocks: 0", 10)
    with pytest.raises(InputError, match=r"how many tokens .* gives no size in tokens"):
        check("Available KV cache memory: 1.00 GiB", 10)
    with pytest.raises(InputError, match=r"^neither the log nor the plan has memory"):
        check("GPU KV cache size: 10 tokens")


def test_known_figures_of_other_configs() -> None:
    no_kv = known_figures(KVLayout(presets.load("v4.1-flash").without("compression")))
    assert [figure.bytes_per_token for figure in no_kv if not figure.wrong] == [0] * 6
    assert 81_920 in {figure.bytes_per_token for figure in no_kv if figure.wrong}
