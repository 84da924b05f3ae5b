"""The next drafts and their verification, enqueued before the host has read a step: the tokens are those without drafts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.helpers import eagle3
from tests.helpers.models import write_model
from tests.helpers.mtp import ring_prompts
from tests.helpers.recording import poison
from tests.helpers.sessions import ahead, by_prompt, draft_lengths, drain
from tests.session.reference_sessions import OPTIONS
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.errors import EngineError, KVCacheError
from trt_kvcache.generation.draft_sampler import DraftSampler
from trt_kvcache.kernels.sampling_rows import BAD_LOGITS, NO_ERROR, ROW_RESULT
from trt_kvcache.session.draft_plan import DraftPlan
from trt_kvcache.session.drafts_ahead import AheadPlan, ChosenTokens
from trt_kvcache.session.head_drafter import HeadDrafter
from trt_kvcache.session.model_drafter import EnqueuedDrafts, ModelDrafter
from trt_kvcache.session.verify_steps import VerifySteps

S = OPTIONS["max_sequence_length"]

KINDS = ["model", "eagle3"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str | Path]]:
    """A model of each kind, and a draft that is right. Weights of a ring, whose next token follows from the last one."""
    folder = tmp_path_factory.mktemp("models")
    model = write_model(folder / "model")
    ring, unlike = eagle3.write_ring_model(folder / "ring"), eagle3.write_model(folder / "unlike")
    return {
        "another model": (model, write_model(folder / "small", seed=8)),
        "another head": (unlike, eagle3.write_head(folder / "unlike_head", unlike, tokens=range(61))),
        "model": (model, model),
        "eagle3": (ring, eagle3.write_ring_head(folder / "head", ring)),
    }


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Scene:
    """A session whose drafts stay on the device, and one without drafts, over the same model."""

    def __init__(self, place: Path, draft: str | Path, **options: Any) -> None:
        given = {**OPTIONS, "max_batch_size": 3, **options}
        self.plain = InferenceSession.from_model(place, **given)
        self.session = ahead(InferenceSession.from_model(place, **given, draft=draft))
        drafter = self.session._drafter
        assert isinstance(drafter, ModelDrafter)
        assert drafter._steps.can_be_on_device
        drafter._steps.on_device = True
        self.drafter = drafter
        #: Steps that were enqueued ahead, and those that were taken.
        self.calls: Counter[str] = Counter()
        self._count(self.session._decode_steps._verify_steps)

    def _count(self, steps: VerifySteps) -> None:
        for name in ("_follow", "run_ahead", "run"):
            setattr(steps, name, self._counted(name, getattr(steps, name)))

    def _counted(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return own(*arguments, **options)

        return counted

    @property
    def dropped(self) -> int:
        return self.calls["_follow"] - self.calls["run_ahead"]

    def expected(self, prompts: Any, params: Any) -> Any:
        return by_prompt(self.plain.generate(prompts, params))

    def poison(self) -> None:
        """Overwrite rows that are not live, unless those of a step ahead are among them."""
        if self.session._runner.uncommitted is None:
            poison(self.session.cache)
        poison(self.drafter._parts.cache)

    def check(self) -> None:
        """The host, the cache and the drafter agree on the tokens of each slot."""
        for runner in (self.session._runner, self.drafter._runner):
            lengths = [slot.length for slot in runner.slots]
            assert list(runner.cache.host_kv_cache_lengths) == lengths
            assert runner.cache.kv_cache_lengths.numpy().tolist() == lengths

    def check_drafter(self) -> None:
        """The drafter has the tokens of each request, none of which goes on from what its slot held."""
        for request, (place, known) in self.drafter._places.items():
            held = self.drafter._batch[place]
            first = self.drafter._firsts[request] + 1 if isinstance(self.drafter, HeadDrafter) else 0
            known = min(known, held.length)
            assert held.row[:known] == [*request.prompt, *request.tokens][first : first + known]

    def close(self) -> None:
        self.session.close()
        self.plain.close()


@pytest.fixture
def opens(places: dict[str, tuple[Path, str | Path]], kind: str) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def open_one(**options: Any) -> Scene:
        scenes.append(Scene(*places[kind], **options))
        return scenes[-1]

    yield open_one
    for scene in scenes:
        scene.close()


def params(*counts: int, **options: Any) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=count, **{"ignore_eos": True, "seed": seed, **options}) for seed, count in enumerate(counts)]


def spoil(monkeypatch: pytest.MonkeyPatch, right: float, *, errors: float = 0.0, seed: int = 0) -> None:
    """Have the tokens of drafts be wrong, or errors, at random."""
    random, sample = Random(seed), DraftSampler.sample

    def spoiled(self: DraftSampler, logits: Any, tokens: Any, *, stream: Any) -> None:
        sample(self, logits, tokens, stream=stream)
        memory, count = logits.memory, len(logits)
        memory.synchronize(stream)
        first = (self._position - 1) * self._slots
        row = self._rows[first : first + count]
        found, ids = row.numpy(), tokens.numpy()
        results = found.view(ROW_RESULT)[:, 0]
        for slot in range(count):
            if random.random() < errors:
                results[slot], ids[slot] = (-1, BAD_LOGITS, 0, np.nan), 0
            elif random.random() >= right and results["error"][slot] == NO_ERROR:
                results["token"][slot] = ids[slot] = (ids[slot] + 1) % 16
        memory.upload(row, found, stream=stream)
        memory.upload(tokens, ids, stream=stream)

    monkeypatch.setattr(DraftSampler, "sample", spoiled)


def waits_of(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every wait of the host for a model is added."""
    found: list[str] = []
    for name, runner in (("model", scene.session._runner), ("draft", scene.drafter._runner)):
        monkeypatch.setattr(runner, "before_wait", lambda name=name: found.append(name))
        monkeypatch.setattr(runner, "synchronize", lambda name=name: found.append(name))
    return found


def test_a_step_waits_once_and_the_next_one_runs_then(opens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opens()
    prompts, asked = ring_prompts(2), params(30, 30)
    expected = scene.expected(prompts, asked)
    waits = waits_of(scene, monkeypatch)
    before = scene.session.statistics.decode_steps
    assert by_prompt(scene.session.generate(prompts, asked)) == expected
    steps = scene.session.statistics.decode_steps - before
    assert waits == ["model"] * (steps + 1), "one for the prompts, and one for each step"
    assert scene.calls["run_ahead"] >= 3
    assert scene.dropped == 0
    assert scene.session.statistics.acceptance_rate == 1
    scene.check()


def test_a_step_whose_large_model_samples_on_the_host_waits_for_the_draft_too(opens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opens()
    scene.session._decode_steps.on_device = False
    waits = waits_of(scene, monkeypatch)
    [*scene.session.generate(ring_prompts(1), params(12))]
    assert scene.session.statistics.drafts
    assert waits.count("draft") == scene.session.statistics.drafts
    assert not scene.calls["run_ahead"]


@pytest.mark.parametrize("right", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "logprobs": 2}], ids=str)
def test_any_number_of_accepted_tokens(opens: Any, monkeypatch: pytest.MonkeyPatch, right: float, options: dict[str, Any]) -> None:
    """Slots accept different numbers, and their drafts have different lengths."""
    scene = opens()
    prompts, asked = ring_prompts(3), params(34, 31, 28, **options)
    expected = scene.expected(prompts, asked)
    draft_lengths(monkeypatch, lambda one: 2 + scene.drafter_lengths.setdefault(id(one), len(scene.drafter_lengths)))
    scene.drafter_lengths = {}
    spoil(monkeypatch, right, seed=3)
    assert by_prompt(scene.session.generate(prompts, asked)) == expected
    assert len(scene.drafter_lengths) == 3
    assert scene.calls["run_ahead"] >= (2 if right == 1 else 4)
    scene.check()


@pytest.mark.parametrize(("kind", "temperature"), [("another model", 3.0), ("another head", 30.0)])
def test_drafts_are_those_without_a_step_ahead(opens: Any, monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """The drafter has read the same tokens and states. Both models are close to uniform here, so some drafts are accepted in part."""
    draft_lengths(monkeypatch, lambda drafting: 3)
    prompts, asked = [[5, 6, 7], [8], [9, 10, 11, 12]], params(30, 30, 30, temperature=temperature)
    found: list[list[list[int]]] = []
    read = DraftPlan.read
    for is_ahead in (True, False):
        scene = opens()
        if not is_ahead:
            monkeypatch.setattr(scene.session._decode_steps._verify_steps, "_next_drafts", lambda *arguments: None)
        drafts: list[list[int]] = []

        def noted(plan: DraftPlan, drafts: list[list[int]] = drafts) -> DraftPlan:
            known = read(plan)
            drafts.extend([*draft.tokens] for draft in known.drafts)
            return known

        with monkeypatch.context() as patch:
            patch.setattr(DraftPlan, "read", noted)
            by_prompt(scene.session.generate(prompts, asked))
        assert (scene.calls["run_ahead"] > 4) == is_ahead
        assert 0.1 < scene.session.statistics.acceptance_rate < 0.9
        found.append(drafts)
    assert len(found[0]) == len(found[1])
    # The last drafts of a request are shorter where the host knows how many tokens it still needs.
    assert all(one[: len(other)] == other[: len(one)] for one, other in zip(*found, strict=True))


def test_lengths_that_change_take_effect_one_step_later(opens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = opens(max_batch_size=1)
    [prompt] = ring_prompts(1)
    lengths, run = [], scene.drafter.run_ahead

    def noted(plan: AheadPlan, chosen: ChosenTokens) -> EnqueuedDrafts:
        lengths.append([one.limit for one in plan.continued.values()])
        return run(plan, chosen)

    monkeypatch.setattr(scene.drafter, "run_ahead", noted)
    expected = scene.expected([prompt], params(40))
    assert by_prompt(scene.session.generate([prompt], params(40))) == expected
    assert lengths[:2] == [[3], [6]], "of the first step, whose length the host knew; then of the second, as long as the engine takes"


def test_an_error_in_a_draft(opens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 0 runs in its place, which the model may choose: it is not counted as accepted."""
    scene = opens()
    prompts, asked = ring_prompts(3), params(34, 30, 26)
    expected = scene.expected(prompts, asked)
    spoil(monkeypatch, 0.9, errors=0.3, seed=1)
    assert by_prompt(scene.session.generate(prompts, asked)) == expected
    assert scene.calls["run_ahead"] > 2
    scene.check()


@pytest.mark.parametrize("place", range(8))
def test_a_stop_token_in_an_accepted_draft(opens: Any, place: int) -> None:
    """The others go on from the step ahead, in which its rows are ignored."""
    scene = opens()
    prompts = ring_prompts(3)
    [(stopped, _, _), *_] = scene.expected(prompts, params(30, 30, 30))
    asked = params(30, 30, 30)
    asked[0] = SamplingParams(max_new_tokens=30, ignore_eos=True, seed=0, stop_token_ids=[stopped[place]])
    expected = scene.expected(prompts, asked)
    assert by_prompt(scene.session.generate(prompts, asked)) == expected
    assert scene.calls["run_ahead"] >= 2
    assert [scene.session.tokens(slot) for slot in range(3)] == [scene.plain.tokens(slot) for slot in range(3)]
    assert [scene.session.pending_tokens(slot) for slot in range(3)] == [scene.plain.pending_tokens(slot) for slot in range(3)]
    scene.check()


def test_a_request_that_has_ended_is_left_out_of_the_next_step_ahead(opens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device it has accepted more than it took, and nothing limits its rows there."""
    scene = opens()
    prompts = ring_prompts(3)
    answers = [tokens for tokens, _, _ in scene.expected(prompts, params(30, 30, 30, temperature=1.2))]
    # A new token of the second step, which is not its last one.
    slot, token = next(
        (slot, answer[place]) for slot, answer in enumerate(answers) for place in (5, 6, 7) if answer[place] not in answer[:place]
    )
    asked = params(30, 30, 30, temperature=1.2)
    asked[slot] = SamplingParams(max_new_tokens=30, ignore_eos=True, seed=slot, temperature=1.2, stop_token_ids=[token])
    running: list[int] = []
    steps = scene.session._decode_steps._verify_steps
    follow = steps._follow

    def noted(verification: Any, planned: Any) -> Any:
        assert steps._rows is not None
        on_device = steps._rows.slots(3).asked.numpy()
        assert {int(one) for one in np.flatnonzero(on_device >= 0)} == set(planned.limits), "the device goes on with those of the host"
        running.append(len(planned.limits))
        return follow(verification, planned)

    monkeypatch.setattr(steps, "_follow", noted)
    assert by_prompt(scene.session.generate(prompts, asked)) == scene.expected(prompts, asked)
    assert scene.dropped == 0
    assert running[0] == 3
    assert set(running[1:]) <= {2, 3}
    assert running.index(2) > 0


@pytest.mark.parametrize("counts", [(9, 40, 13), (5, 6, 7), (2, 30, 30), (17, 17, 17)])
def test_requests_that_end_inside_a_draft(opens: Any, counts: tuple[int, ...]) -> None:
    scene = opens()
    prompts, asked = ring_prompts(3), params(*counts)
    assert by_prompt(scene.session.generate(prompts, asked)) == scene.expected(prompts, asked)
    assert [scene.session.pending_tokens(slot) for slot in range(3)] == [scene.plain.pending_tokens(slot) for slot in range(3)]
    scene.check()


@pytest.mark.parametrize("right", [0.6, 1.0])
@pytest.mark.parametrize("held", [(44, 3, 20), (30, 38, 41), (S - 1, 9, 9), (S, 5, 7)])
def test_slots_that_are_nearly_full(opens: Any, monkeypatch: pytest.MonkeyPatch, held: tuple[int, ...], right: float) -> None:
    scene = opens()
    prompts = [[(start + place) % 16 for place in range(count)] for start, count in enumerate(held)]
    asked = params(S, S, S)
    expected = scene.expected(prompts, asked)
    spoil(monkeypatch, right)
    assert by_prompt(scene.session.generate(prompts, asked)) == expected
    scene.check()


@pytest.mark.parametrize("right", [0.7, 1.0])
def test_a_queue(opens: Any, monkeypatch: pytest.MonkeyPatch, right: float) -> None:
    """Requests are admitted, cancelled and compacted between steps."""
    scene = opens()
    prompts, counts = [*ring_prompts(4), *ring_prompts(4)], (30, 25, 34, 28, 12, 3, 30, 30)
    asked = params(*counts, temperature=0.5)
    expected = [scene.expected([prompt], [one])[0] for prompt, one in zip(prompts, asked, strict=True)]
    spoil(monkeypatch, right, seed=5)
    session = scene.session
    handles = [session.submit(prompt, one) for prompt, one in zip(prompts[:2], asked, strict=False)]
    for _ in range(3):
        session.step()
        scene.check()
        scene.check_drafter()
        scene.poison()
    assert scene.calls["_follow"] > 0
    handles.append(session.submit(prompts[2], asked[2]))
    session.step()
    session.step()
    handles[0].cancel()
    handles += [session.submit(prompt, one) for prompt, one in zip(prompts[3:], asked[3:], strict=True)]
    drain(session)
    scene.check()
    for handle, (tokens, _, _) in zip(handles, expected, strict=True):
        assert list(handle.tokens) == tokens[: len(handle.tokens)]
        assert handle is handles[0] or len(handle.tokens) == len(tokens)
    assert scene.calls["run_ahead"] > 2
    assert scene.dropped > 0
    if right == 1:
        assert session.statistics.acceptance_rate == 1, "after a step that is dropped, drafts go on from all that is known"


@pytest.mark.parametrize("taken", [1, 2, 4, 5, 9, 14])
@pytest.mark.parametrize("then", ["append", "rewind", "snapshot", "decode", "generate"])
def test_what_comes_between_two_steps(opens: Any, tmp_path: Path, taken: int, then: str) -> None:
    scene = opens(prompt_cache_bytes=1 << 20)
    prompts, asked = ring_prompts(2), params(30, 30)
    streams = [one.generate(prompts, asked) for one in (scene.session, scene.plain)]
    events = [[*itertools.islice(stream, taken)] for stream in streams]
    assert [event.token for event in events[0]] == [event.token for event in events[1]]
    found = []
    for one in (scene.session, scene.plain):
        match then:
            case "append":
                found.append(by_prompt(one.generate([[4], [5, 6]], params(12, 12), append=True)))
            case "rewind":
                one.rewind(0, len(prompts[0]) - 1)
                found.append(by_prompt(one.generate([[4], [5, 6]], params(12, 12), append=True)))
            case "snapshot":
                one.save_snapshot(tmp_path / f"{id(one)}.kv", 0)
                found.append(by_prompt(one.resume(tmp_path / f"{id(one)}.kv", max_new_tokens=12, ignore_eos=True)))
            case "decode":
                found.append([int(np.argmax(row)) for row in one.append([[4], []])[:1]])
                found[-1] += by_prompt(one.generate([[4, 5], [3]], params(12, 12), append=True))
            case _:
                found.append(by_prompt(one.generate([prompts[1], prompts[0]], params(12, 12), reuse=True)))
    assert found[0] == found[1]
    scene.check()


class Failing:
    """Makes one of the next enqueues of an engine fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Any, number: int, error: Exception) -> None:
        enqueue, count = engine.enqueue, itertools.count()

        def failing(stream: Any) -> None:
            if next(count) == number:
                raise error
            enqueue(stream)

        monkeypatch.setattr(engine, "enqueue", failing)


@pytest.mark.parametrize("error", [EngineError("no memory"), ZeroDivisionError()], ids=["engine", "other"])
@pytest.mark.parametrize("engine", ["model", "draft"])
@pytest.mark.parametrize("number", range(6))
def test_an_enqueue_that_fails(opens: Any, monkeypatch: pytest.MonkeyPatch, engine: str, number: int, error: Exception) -> None:
    """One of its own step, or of the step ahead, whose turn raises an error of ours. Then all goes on."""
    scene = opens()
    session = scene.session
    prompts, asked = ring_prompts(3), params(30, 27, 33)
    expected = scene.expected(prompts, asked)
    handles = [session.submit(prompt, one) for prompt, one in zip(prompts, asked, strict=True)]
    session.step()
    with monkeypatch.context() as patch:
        Failing(patch, session.engine if engine == "model" else scene.drafter._runner.engine, number, error)
        with pytest.raises(type(error)):
            drain(session)
    scene.check()
    drain(session)
    assert [list(handle.tokens) for handle in handles] == [tokens for tokens, _, _ in expected]
    scene.check()


def test_an_error_of_a_step_ahead_waits_for_its_turn(opens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the step before it are not lost, and the drafter has not run them."""
    scene = opens()
    session = scene.session
    prompts, asked = ring_prompts(2), params(30, 30)
    expected = scene.expected(prompts, asked)
    handles = [session.submit(prompt, one) for prompt, one in zip(prompts, asked, strict=True)]
    session.step()

    def fail(*arguments: Any) -> None:
        raise EngineError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(scene.drafter, "run_ahead", fail)
        session.step()
        assert [len(handle.tokens) for handle in handles] == [5, 5], "a token of the prompt, and four of the step"
        scene.check_drafter()
        with pytest.raises(EngineError, match="no memory"):
            session.step()
    assert [len(handle.tokens) for handle in handles] == [5, 5]
    scene.check()
    scene.check_drafter()
    drain(session)
    assert [list(handle.tokens) for handle in handles] == [tokens for tokens, _, _ in expected]
    assert session.statistics.acceptance_rate == 1


def test_logits_of_a_step_ahead_that_are_not_finite(opens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end all sequences, as without drafts; the tokens before them are not lost."""
    scene = opens()
    session, engine = scene.session, scene.session.engine
    stream = session.generate(ring_prompts(2), params(30, 30))
    enqueue, counts = engine.enqueue, itertools.count()

    def damaged(on: Any) -> None:
        enqueue(on)
        if next(counts) >= 2:
            logits = session._runner._buffers.logits
            session.cache.memory.array(logits)[...] = np.nan

    monkeypatch.setattr(engine, "enqueue", damaged)
    with pytest.raises(KVCacheError, match="finite"):
        by_prompt(stream)
    assert session.cache.active_batch_size == 0


def test_drafts_that_are_not_read_are_waited_for(opens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next drafts write the buffers of the host that they read."""
    scene = opens()
    session = scene.session
    session.submit(ring_prompts(1)[0], params(20)[0])
    session.step()
    with monkeypatch.context() as patch:
        Failing(patch, session.engine, 0, EngineError("no memory"))
        with pytest.raises(EngineError):
            session.step()
    waits = waits_of(scene, monkeypatch)
    session.step()
    assert waits == ["draft", "model"]


@pytest.mark.parametrize("number", range(3))
def test_logits_that_are_not_finite_inside_a_draft_once(opens: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The tokens before them count, and the step ahead, which has begun after them, is dropped."""
    scene = opens()
    prompts, asked = ring_prompts(2), params(30, 30)
    expected = scene.expected(prompts, asked)
    runner, counts = scene.session._runner, itertools.count()
    enqueue = scene.session.engine.enqueue

    def damaged(stream: Any) -> None:
        enqueue(stream)
        if runner._buffers._last[:3] == [0, 1, 2] and next(counts) == number:
            scene.session.cache.memory.array(runner._buffers.logits)[1] = np.nan

    monkeypatch.setattr(scene.session.engine, "enqueue", damaged)
    assert by_prompt(scene.session.generate(prompts, asked)) == expected
    assert next(counts) > number + 1
    assert scene.dropped == 1


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 40))])
def test_random_programs(opens: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random = Random(seed)
    scene = opens(prompt_cache_bytes=1 << 20 if seed % 2 else 0)
    session, plain = scene.session, scene.plain
    spoil(monkeypatch, random.choice([0.5, 0.8, 1.0]), errors=random.choice([0.0, 0.1]), seed=seed)
    for _ in range(6):
        prompts = [random.choice(ring_prompts(4)) for _ in range(random.randint(1, 3))]
        asked = [
            SamplingParams(
                max_new_tokens=random.choice([3, 9, 30]),
                seed=1,
                temperature=random.choice([0.0, 0.6]),
                ignore_eos=True,
                stop_token_ids=[random.randrange(60)],
            )
            for _ in prompts
        ]
        match random.choice(["generate", "leave", "queue", "fail"]):
            case "generate":
                assert by_prompt(session.generate(prompts, asked)) == by_prompt(plain.generate(prompts, asked))
            case "leave":
                count = random.randint(1, 20)
                events = [*itertools.islice(session.generate(prompts, asked), count)]
                for index, (tokens, _, _) in enumerate(scene.expected(prompts, asked)):
                    mine = [event.token for event in events if event.index == index]
                    assert mine == tokens[: len(mine)]
                    assert [*session.tokens(index), *session.pending_tokens(index)] == [*prompts[index], *mine]
                whole = [[*session.tokens(slot), *session.pending_tokens(slot), 5] for slot in range(len(prompts))]
                options = {"max_new_tokens": 9, "ignore_eos": True}
                assert by_prompt(session.generate([[5]] * len(prompts), append=True, **options)) == scene.expected(
                    whole, params(*[9] * len(prompts))
                )
            case kind_of_step:
                expected = [scene.expected([prompt], [one])[0][0] for prompt, one in zip(prompts * 2, asked * 2, strict=True)]
                handles = [session.submit(prompt, one) for prompt, one in zip(prompts * 2, asked * 2, strict=True)]
                for _ in range(random.randrange(5)):
                    session.step()
                    scene.poison()
                if kind_of_step == "fail" and any(not handle.finished for handle in handles):
                    with monkeypatch.context() as patch:
                        Failing(patch, random.choice([session.engine, scene.drafter._runner.engine]), 0, ZeroDivisionError())
                        try:
                            for _ in range(3):
                                session.step()
                        except ZeroDivisionError:
                            pass
                handles[0].cancel()
                drain(session)
                for handle, tokens in zip(handles, expected, strict=True):
                    assert list(handle.tokens) == tokens[: len(handle.tokens)]
                    assert handle is handles[0] or len(handle.tokens) == len(tokens)
        scene.check()
