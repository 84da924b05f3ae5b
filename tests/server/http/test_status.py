"""What a server says of itself: models, health, metrics, the page."""

from __future__ import annotations

import re

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.http.running import NAME, Running

LONG = {"prompt": "A", "max_tokens": 120, "stream": True, "ignore_eos": True, "temperature": 1}


def values(text: str) -> dict[str, float]:
    """Return the samples without labels, and those with, by ``name{label}``."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_models(chatting: Running):
    with openai.OpenAI(base_url=f"{chatting.url}/v1", api_key="none") as client:
        [model] = client.models.list().data
        assert (model.id, model.owned_by) == (NAME, "trt_kvcache")
        assert client.models.retrieve(NAME).id == NAME
        with pytest.raises(openai.NotFoundError, match="expected 'tiny', got 'other'"):
            client.models.retrieve("other")


def test_metrics_count_requests_tokens_and_times(chatting: Running):
    with chatting.client() as client:
        before = values(client.get("/metrics").text)
        body = {"prompt": [7, 8, 9, 7, 8, 9], "max_tokens": 6, "ignore_eos": True}
        for _ in range(2):
            assert client.post("/v1/completions", json=body).status_code == 200
        after = values(client.get("/metrics").text)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["trt_kvcache_requests_total{length}"] == 2
    assert grown["trt_kvcache_prompt_tokens_total"] == 6 + 1
    assert grown["trt_kvcache_cached_prompt_tokens_total"] == 5
    assert grown["trt_kvcache_prompt_cache_hits_total"] == 1
    assert grown["trt_kvcache_decode_tokens_total"] == 2 * 5
    assert grown["trt_kvcache_time_to_first_token_seconds_count"] == 2
    assert grown["trt_kvcache_queue_seconds_count"] == 2
    assert after["trt_kvcache_queue_seconds_sum"] <= after["trt_kvcache_time_to_first_token_seconds_sum"]
    assert after["trt_kvcache_clients_waiting"] == 0
    assert grown["trt_kvcache_inter_token_latency_seconds_count"] == 2 * 5
    assert after["trt_kvcache_time_to_first_token_seconds_sum"] <= after["trt_kvcache_request_seconds_sum"]
    assert (after["trt_kvcache_slots"], after["trt_kvcache_requests_waiting"]) == (4, 0)
    assert after["trt_kvcache_kv_cache_reserved_bytes"] == chatting.stats().session.cache_bytes_reserved
    assert grown["trt_kvcache_requests_refused_total"] == 0


def test_used_slots_and_bytes_are_shown_while_a_request_runs(chatting: Running):
    with chatting.client() as client:
        with chatting.held(steps=3), client.stream("POST", "/v1/completions", json={**LONG, "n": 16}) as stream:
            lines = stream.iter_lines()  # while it lives, the stream is open
            next(lines)
            stats = client.get("/stats").json()
        assert stats["config"]["max_num_seqs"] == 4
        assert {slot["state"] for slot in stats["slots"]} <= {"prefilling", "decoding", "finished"}
        assert stats["slots"]
        assert stats["session"]["cache_bytes_live"] > 0
        chatting.wait_until_idle()
        assert client.get("/stats").json()["session"]["cache_bytes_live"] == 0


def test_health(chatting: Running):
    with chatting.client() as client:
        answer = client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_the_page_has_everything_in_itself(chatting: Running):
    with chatting.client() as client:
        answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)[^"']*|@import|url\(""", answer.text) == []


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)])
def test_other_paths_and_methods_are_errors_of_the_same_shape(chatting: Running, method: str, path: str, status: int):
    with chatting.client() as client:
        answer = client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_path_or_a_method_that_is_not_known(chatting):
    with chatting.client() as client:
        answer = client.post("/v1/embeddings", json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith("POST /v1/embeddings: expected a path of this server")
        answer = client.get("/v1/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert answer.json()["error"]["message"] == "GET /v1/completions: expected POST."
        assert client.head("/health").status_code == client.head("/").status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/stats"])
def test_another_method_is_told_all_that_there_are(chatting, path):
    with chatting.client() as client:
        answer = client.delete(path)
        assert client.head(path).status_code == 200
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert answer.json()["error"]["message"] == f"DELETE {path}: expected GET or HEAD."
