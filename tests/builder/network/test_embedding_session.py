"""Sessions over networks with an input for rows, by the interpreter of networks: the logits of the reference engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import assert_close, raises
from tests.helpers.engine_files import PLAN, make_config
from tests.helpers.fake_tensorrt import FakeTensorRT, install
from tests.helpers.models import attentions_of, write_model
from tests.paths import GOLDEN
from tests.sweeps import some
from tests.trt.plugin.on_host import array_at
from trt_kvcache import InferenceSession, build_engine
from trt_kvcache.builder.definition import define_decoder
from trt_kvcache.builder.serialization import make_config as make_builder_config
from trt_kvcache.cache.edge_llm import make_cache
from trt_kvcache.engine.embedding_rows import EMBEDDING_ROWS
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.consistency import check_consistency
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import CapacityError, EngineError, RangeError
from trt_kvcache.sequences.prompt_cache import PromptCache
from trt_kvcache.trt import graph_engine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

from .conftest import MAX_SEQUENCE_LENGTH, SIZES, declared, recording
from .interpreted import AddressedMemory, CapturingMemory, interpreter_of
from .resolved import resolved

pytestmark = pytest.mark.trt

#: Of the largest logit. Seen: 1e-6 and 0.006.
TOLERANCE = {"float32": 2e-5, "float16": 0.05}

#: A plain one, scaled embeddings, a tied head, states, and a packed embedding.
MODELS = ("llama-linear", "gemma2", "granite", "qwen2-tied", "bamba", "falcon_h1")

CAPACITY = 5


@dataclass
class Made:
    """A network with an input for rows on a stand-in of TensorRT."""

    config: EngineFolderConfig
    fake: FakeTensorRT

    def open(self, *, capturing: bool = False, prompt_cache_bytes: int = 0) -> InferenceSession:
        """Open a session."""
        config = self.config
        memory = CapturingMemory(self.fake) if capturing else AddressedMemory()
        engine = TensorRTEngine(self.fake.loaded, PLAN, memory=memory, names=config.names, config=config, plan_sha256="")
        cache = make_cache(config.cache, memory=memory)
        return InferenceSession(
            engine, cache, names=config.names, model=config.model, prompt_cache=PromptCache(cache, max_bytes=prompt_cache_bytes)
        )


@pytest.fixture
def make(rtx: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Made]:
    """Return ``make(model, dtype="float32")``."""

    def make_model(model: str, dtype: str = "float32") -> Made:
        attention = attentions_of(model, MAX_SEQUENCE_LENGTH)[0]
        with recording(rtx, model) as (checkpoint, constants, messages):
            asked = resolved(checkpoint.config, **SIZES, dtype=dtype, attention=attention, max_embeddings=CAPACITY)
            definition = define_decoder(checkpoint, asked, asked.cache_for(checkpoint.config), rtx, messages)
            make_builder_config(definition, asked, rtx, messages)  # the profiles take the shapes
            config = make_config(checkpoint, attention_variant=attention, dtype=dtype, max_embeddings=CAPACITY)
        check_consistency(config)
        assert declared(rtx, definition.network) == {spec.name: (spec.mode, spec.dtype, spec.shape) for spec in definition.tensors}
        fake = FakeTensorRT(definition.tensors, config.profiles, plan=PLAN)
        install(fake, monkeypatch, tmp_path / "caches")
        fake.run = interpreter_of(rtx, definition, constants)
        return Made(config, fake)

    return make_model


def rows_for(config: EngineFolderConfig, count: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(count).normal(size=(count, config.model.hidden_size))


def logits_of(session: InferenceSession, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the logits ``[steps, 3, vocab]`` of prompts with rows and without, in chunks, of decode steps and of a next turn."""
    first, second, third = session.add_embeddings(rows)
    prompts = [[first], [21, 22, 4], [5, first, second, 30, 11, 2, 7, 36, 1, 12, second, third, 15]]
    found = [session.prefill(prompts)] + [session.decode([token, token + 1, 9]) for token in (3, 4)]
    return np.stack([*found, session.append([[7, third, 9], [3], [first, 2]]), session.decode([6, 7, 8])])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("model", some(MODELS, 4))
def test_prompts_with_rows(make: Any, model: str, dtype: str) -> None:
    made = make(model, dtype)
    options: dict[str, Any] = {**SIZES, "attention": made.config.attention_variant, "dtype": dtype, "max_embeddings": CAPACITY}
    rows = rows_for(made.config)
    with made.open() as ours, InferenceSession.from_model(GOLDEN / model, engine="numpy", **options) as reference:
        assert_close(logits_of(ours, rows), logits_of(reference, rows), TOLERANCE[dtype])


def test_tokens_alone_have_the_logits_of_an_engine_without_the_input(make: Any) -> None:
    made = make("gemma2")
    options: dict[str, Any] = {**SIZES, "attention": made.config.attention_variant, "dtype": "float32"}
    with made.open() as ours, InferenceSession.from_model(GOLDEN / "gemma2", engine="numpy", **options) as reference:
        prompts = [[0, 1, 2], [made.config.model.vocab_size - 1], [7, 8]]
        assert_close(ours.prefill(prompts), reference.prefill(prompts), TOLERANCE["float32"])


def test_the_bound_rows(make: Any) -> None:
    """One table in every context, hidden from callers, and released with the session."""
    made = make("llama-linear")
    rows = rows_for(made.config, CAPACITY)
    with made.open() as ours:
        assert EMBEDDING_ROWS not in ours.engine.tensors
        assert ours.add_embeddings(rows[:2]) == (ours.vocab_size, ours.vocab_size + 1)
        ours.prefill([[5, ours.vocab_size + 1]])
        addresses = {context.addresses[EMBEDDING_ROWS] for context in made.fake.contexts}
        assert addresses == {ours.engine.embeddings.table.ptr}
        [spec] = made.config.embedding_tensors
        bound = array_at(addresses.pop(), spec.shape, spec.dtype)
        np.testing.assert_array_equal(bound, [*rows[:2].astype(np.float32), *np.zeros((3, rows.shape[1]))])
        with raises(RangeError, "prompts[0][0]", expected=f"from 0 to {ours.vocab_size + 1}", got=str(ours.vocab_size + 2)):
            ours.prefill([[ours.vocab_size + 2]])
        with raises(CapacityError, "embeddings", expected="5", got="2 and 5"):
            ours.add_embeddings(rows + 1)
        memory = ours.cache.memory
    assert memory.live_nbytes == 0


def test_prefixes_are_found_by_their_rows(make: Any) -> None:
    made = make("llama-linear")
    rows = rows_for(made.config, 2)
    with made.open(prompt_cache_bytes=1 << 20) as ours:
        prompt = [5, *ours.add_embeddings(rows), 7, 8]
        expected = ours.prefill([prompt]).copy()
        again = [5, *ours.add_embeddings(rows), 7, 8]
        assert again == prompt
        other = [5, prompt[1], *ours.add_embeddings(rows[1:] + 1), 7, 8]
        for tokens, reused in ((again, 4), (other, 2)):
            list(ours.generate([prompt], max_new_tokens=1, ignore_eos=True))
            ours.prefill([[1, 2]])
            before = ours.statistics.reused_tokens
            found = ours.prefill([tokens])
            assert ours.statistics.reused_tokens - before == reused
            assert (np.abs(found - expected).max() < 1e-4) == (tokens == prompt)


def test_steps_that_are_replayed_read_new_rows(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured prefill holds the address of the table, to which later rows are added."""
    monkeypatch.setattr(graph_engine, "RUNS_OF_A_PREFILL", 1)
    made = make("llama-linear")
    rows = rows_for(made.config, CAPACITY)
    found = []
    for capturing in (False, True):
        with made.open(capturing=capturing) as ours:
            steps = []
            for row in rows:
                [known] = ours.add_embeddings(row[None])
                steps += [ours.prefill([[5, known], [known, 3], [4, 4]]), ours.decode([3, 4, 5])]
            found.append(np.stack(steps))
            if capturing:
                assert sum(ours.cache.memory.replayed.values()) > 3
    np.testing.assert_array_equal(*found)


def test_a_plan_without_the_input_is_refused(make: Any) -> None:
    made = make("llama-linear")
    del made.fake.specs[EMBEDDING_ROWS]
    with pytest.raises(EngineError, match="`embedding_rows`"):
        made.open()


_PLUGIN = [{"attention": "plugin", "plugin_layers": layers} for layers in ("segments", "one-plan")]


@pytest.mark.parametrize("options", [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in _PLUGIN)], ids=str)
def test_an_engine_is_built_and_records_its_input(tmp_path: Path, options: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 24, "flavour": "tensorrt_rtx", "compute_capabilities": "8.6"}
    model = write_model(tmp_path / "model", head_dim=64, num_hidden_layers=2)
    report = build_engine(model, tmp_path / "engine", **sizes, **options, max_embeddings=6)
    config = EngineFolder.open(report.path).config
    assert config.max_embeddings == 6
    [spec] = config.embedding_tensors
    assert (spec.name, spec.shape, spec.dtype) == (EMBEDDING_ROWS, (6, config.model.hidden_size), config.dtype)
