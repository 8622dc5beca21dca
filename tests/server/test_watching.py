"""`/metrics`, its dashboard, and `/stats`: what they say is what the engine counts."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from apps import asked
from prometheus_client.parser import text_string_to_metric_families
from serving import demo_model

from rorqual.engine.identity import store_identity
from rorqual.server.access import Server
from rorqual.store.opener import open_store

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"
WATCHED = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
prefix_cache_hits_total prompt_tokens_total generation_tokens_total time_to_first_token_seconds_bucket
inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket request_success_total spec_decode_num_drafts_total
spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total
cache_config_info num_preemptions_total"""
PASSAGE = "The whale went down into the sea, and the ship went after it. " * 40


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, its label beside the model's) -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found[sample.name, labels[0] if len(labels) == 1 else ""] = sample.value
    return found


def watched() -> tuple[str, dict[tuple[str, str], float], Server]:
    """Metrics after one prompt asked twice, and a chat that a stop text of the protocol's ends."""

    async def ask() -> tuple[str, Server]:
        async with asked() as (client, server):
            for _ in range(2):
                body = {"prompt": PASSAGE, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            turn = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 20}
            said = (await client.post("/v1/chat/completions", json=turn)).json()["choices"][0]["message"]["content"]
            answer = await client.post("/v1/chat/completions", json=turn | {"stop": [said[2:4]]})
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
            return (await client.get("/metrics")).text, server

    text, server = asyncio.run(ask())
    return text, samples(text), server


def test_metrics_are_what_the_engine_counts() -> None:
    text, found, server = watched()
    stats = server.worker.engine.stats()
    assert {name for name, _ in found} >= {f"vllm:{name}" for name in WATCHED.split()}
    assert found["vllm:prompt_tokens_total", ""] == stats.counts.prompt
    assert found["vllm:generation_tokens_total", ""] == stats.counts.new
    assert found["vllm:prefix_cache_hits_total", ""] == stats.counts.hit > 0
    assert found["rorqual:replayed_tokens_total", ""] == stats.counts.replayed > 0
    assert found["rorqual:layer_tokens_total", ""] == stats.counts.layer_tokens
    assert found["rorqual:engram_rows_read_total", ""] == stats.counts.engram_rows > 0
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"] == stats.counts.accepted[0]
    groups = {group: size for (name, group), size in found.items() if name == "rorqual:cache_bytes"}
    assert groups == stats.bytes_by_group
    assert {"global", "window", "tail"} <= set(groups)
    assert found["vllm:request_success_total", "length"] >= 2
    assert found["vllm:request_success_total", "stop"] >= 1
    assert found["vllm:request_success_total", "abort"] == 0
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert found[f"vllm:{name}_seconds_bucket", "+Inf"] == found[f"vllm:{name}_seconds_count", ""] == 4
    assert PASSAGE[:10] not in text


def test_a_store_is_counted() -> None:
    """By an engine that finds nothing on its device, over what another one has stored."""
    model = demo_model()
    store = open_store(None, store_identity(model), memory_bytes=1 << 30)

    async def ask() -> tuple[str, Server]:
        async with asked(engine={"store": store}) as (client, server):
            body = {"prompt": PASSAGE, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            return (await client.get("/metrics")).text, server

    for turn in range(2):
        text, server = asyncio.run(ask())
        found, stats = samples(text), server.worker.engine.stats()
        assert stats.store is not None
        assert found["rorqual:store_pages", ""] == stats.store.pages > 0
        assert found["rorqual:store_bytes", ""] == stats.store.bytes == stats.store.pages * stats.page_bytes
        assert found["rorqual:store_events_total", "hits"] == stats.store.hits
        assert found["rorqual:restored_tokens_total", ""] == stats.counts.restored
        assert (stats.counts.restored > 0) == (stats.store.hits > 0) == bool(turn)


def test_the_dashboard_names_metrics_that_exist() -> None:
    _, found, _ = watched()
    names = {name for name, _ in found}
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    used = {
        name
        for panel in panels
        for own in panel["targets"]
        for name in re.findall(r"(?:vllm|rorqual):\w+", own["expr"])
    }
    assert used <= names
    assert {name for name in names if name.startswith("rorqual:")} <= used, "what only we have is on it"
    assert {name.removesuffix("_bucket") for name in used} >= {
        f"vllm:{name.removesuffix('_bucket')}" for name in WATCHED.split()
    }


def test_stats_are_the_engines_with_its_layers_and_last_steps() -> None:
    async def ask() -> None:
        async with asked(api_keys={"sesame": "a"}) as (client, server):
            body = {"prompt": "A whale", "max_tokens": 40, "ignore_eos": True, "speculative": False}
            headers = {"x-api-key": "sesame"}
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            assert (await client.get("/stats")).status_code == 401
            found = (await client.get("/stats", headers=headers)).json()
            stats = server.worker.engine.stats()
            assert (found["pages_free"], found["counts"]["new"]) == (stats.pages_free, 40)
            assert len(found["recent"]) == 32 < len(stats.recent)
            roles = server.worker.engine.model.config.roles
            assert [(layer["id"], layer["mode"]) for layer in found["layers"]] == [
                (role.layer_id, str(role.mode)) for role in roles
            ]

    asyncio.run(ask())
