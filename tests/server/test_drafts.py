"""Speculative decoding of all requests of an engine for event loops: the answers are those without drafts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.eagle3 import write_head
from tests.server.engines import MODEL, alone, answers, request, run, running, source
from tests.server.guidance.grammars import guided
from tests.server.needs_libraries import need_libraries
from trt_kvcache import AsyncSession
from trt_kvcache.errors import ConfigError
from trt_kvcache.server.http.metrics import Metrics
from trt_kvcache.session import decode_steps
from trt_kvcache.session.draft_plan import plan_drafts

need_libraries("psutil")

REPEATS = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]

#: Makes the answers repeat some tokens.
FEW = {"logit_bias": {5: 30.0, 6: 30.0}}


def test_answers_of_several_clients() -> None:
    wanted = [
        request([*REPEATS, last], 40, **FEW, temperature=heat, seed=3, repetition_penalty=penalty)
        for last, heat, penalty in [(7, 0.0, 1.0), (9, 0.9, 1.0), (8, 0.0, 1.2), (7, 0.4, 1.0), (6, 0.0, 1.0), (5, 0.2, 1.0)]
    ]

    async def main() -> Any:
        async with running(2, draft="ngram") as engine:
            found = await asyncio.gather(*(answers(engine, one) for one in wanted))
            return found, (await engine.stats()).session, await engine.stats()

    found, counts, stats = run(main)
    assert [(answer["token_ids"], answer["text"]) for [answer] in found] == [alone(one) for one in wanted]
    assert 0 < counts.accepted_tokens <= counts.draft_tokens
    assert stats.together([stats, stats]).session.draft_tokens == 2 * counts.draft_tokens


@pytest.mark.parametrize(
    "grammar", [{"regex": "(abcab ){9}"}, {"json": {"type": "array", "items": {"const": "abcabc"}, "minItems": 4, "maxItems": 4}}]
)
def test_a_grammar_goes_on_after_each_accepted_token(grammar: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def noted(*arguments: Any, **options: Any) -> Any:
        plans.append(plan_drafts(*arguments, **options))
        return plans[-1]

    monkeypatch.setattr(decode_steps, "plan_drafts", noted)

    async def main(**options: Any) -> Any:
        async with running(2, **options) as engine:
            return await answers(engine, guided(grammar, 60))

    plain = run(main)
    assert not any(plans)
    found = run(lambda: main(draft="ngram"))
    assert found == plain
    assert any(plans)
    assert found[0]["finish_reason"] == "stop"


def test_an_eagle3_head(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", MODEL, tokens=range(200), eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    wanted = [request([*REPEATS, last], 40, temperature=0.9, seed=last) for last in range(5)]

    async def main() -> Any:
        async with running(2, draft=head) as engine:
            found = await asyncio.gather(*(answers(engine, one) for one in wanted))
            return found, (await engine.stats()).session

    found, counts = run(main)
    assert [(answer["token_ids"], answer["text"]) for [answer] in found] == [alone(one) for one in wanted]
    assert counts.draft_tokens > 0


def test_metrics_have_the_draft_tokens() -> None:
    async def main() -> Any:
        async with running(2, draft="ngram") as engine:
            await answers(engine, request(REPEATS, 40, **FEW))
            metrics, stats = Metrics(), await engine.stats()
            return metrics.text(engine.config, stats).decode(), stats.session

    text, counts = run(main)
    assert f"trt_kvcache_drafts_total {float(counts.drafts)}" in text
    assert f"trt_kvcache_draft_tokens_total {float(counts.draft_tokens)}" in text
    assert f"trt_kvcache_accepted_draft_tokens_total {float(counts.accepted_tokens)}" in text


def test_an_async_session_takes_a_draft_for_a_request() -> None:
    async def main() -> Any:
        async with AsyncSession(source(2)) as served:
            one = await served.submit(REPEATS, max_new_tokens=40, ignore_eos=True, **FEW, draft="ngram")
            other = await served.submit(REPEATS, max_new_tokens=40, ignore_eos=True, **FEW)
            await one.wait()
            await other.wait()
            with pytest.raises(ConfigError, match="draft: expected 'ngram', 'mtp', 'off'"):
                await served.submit(REPEATS, draft="eagle")
            return one, other

    one, other = run(main)
    assert one.tokens == other.tokens
    assert one.handle.draft_tokens
    assert not other.handle.draft_tokens
