"""Trees of draft tokens in engines with plugin layers, by the interpreter of networks: the logits of the reference engine."""

from random import Random

import numpy as np
import pytest

from tests.helpers.assertions import assert_close, raises
from tests.helpers.models import write_model
from tests.helpers.recording import poison
from tests.helpers.token_trees import path_to, random_parents
from tests.trt.plugin.on_host import array_at
from trt_kvcache import DraftTree, build_engine
from trt_kvcache.engine.step_ancestors import ANCESTORS, DEPTHS
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.trt import graph_engine

from .test_plugin_session import EQUAL, FORMS, MIXED, MODELS, PROMPTS, make, open_engine, open_sessions, session_over

__all__ = ["make"]

pytestmark = pytest.mark.trt

#: Of logits, relative to the largest. Seen: 0.015, 0.145 and 0.111, as much with chains.
TOLERANCE = {None: 0.02, "fp8": 0.2, "int8": 0.16}

#: Most tokens of a tree: an enqueue takes 11.
TREE = 9

#: Tokens and parents: two branches, a chain, and a root with two children.
ROWS = [[3, 4, 5, 6, 7, 8, 9], [7, 2], [8, 9, 1]]
PARENTS = [[-1, 0, 0, 1, 2, 2, 5], [-1, 0], [-1, 0, 0]]
PATHS = [[0, 2, 5, 6], [0], [0, 2]]


def of_slots(logits, rows):
    """The logits of the tokens that were given, without those of padding."""
    return np.concatenate([found[: len(row)] for found, row in zip(logits, rows, strict=True)])


def spoil(cache, form):
    """Fill what is not live with what must not be read."""
    poison(cache, 127 if form.startswith("int8") else np.nan)


CASES = [(EQUAL, "16 bits"), (MIXED, "16 bits"), (MIXED, "int8 by token"), (EQUAL, "fp8 by head")]


@pytest.mark.parametrize(
    ("model", "form"),
    CASES + [pytest.param(model, form, marks=pytest.mark.slow) for model in MODELS for form in FORMS if (model, form) not in CASES],
)
def test_trees_between_chains(make, model, form):
    """Random trees, whose paths stay, then chains: decode steps, next turns, drafts, and prompts in chunks."""
    random = Random(model + form)
    with open_sessions(make(model, form, logits=TREE, draft_tree=TREE)) as both:
        for _ in range(2):
            rows = [[random.randrange(3, 37) for _ in range(random.randint(2, TREE))] for _ in PROMPTS]
            parents = [random_parents(random, len(row)) for row in rows]
            paths = [path_to(one, random.randrange(len(one))) for one in parents]
            for found, expected in zip(*(logits_of(session, form, rows, parents, paths) for session in both), strict=True):
                assert_close(found, expected, TOLERANCE[FORMS[form] and FORMS[form][0]])
            assert both[0].cache.host_kv_cache_lengths == both[1].cache.host_kv_cache_lengths


def logits_of(session, form, rows, parents, paths):
    """The logits of a tree after a prompt, and of steps of each kind after its path."""
    session.prefill(PROMPTS)
    spoil(session.cache, form)
    yield of_slots(session.verify(rows, parents), rows)
    session.accept(paths=paths)
    spoil(session.cache, form)
    yield session.decode([3, 4, 5])
    yield session.append([[], [7, 8, 9], [3, 1]])[1:]
    yield of_slots(session.verify(ROWS), ROWS)
    yield session.prefill(PROMPTS)


def test_steps_that_are_replayed_take_any_tree(make, monkeypatch):
    """Bit for bit as eager ones: a graph has the address of the trees, which a later step writes."""
    monkeypatch.setattr(graph_engine, "RUNS_OF_A_PREFILL", 1)
    found = []
    for capturing in (False, True):
        made = make(EQUAL, "16 bits", logits=TREE, draft_tree=TREE, flavour="tensorrt")
        with open_sessions(made, capturing=capturing) as (ours, _):
            logits = [ours.prefill(PROMPTS)]
            for index in range(6):
                flat = [[-1] + [0] * (len(row) - 1) for row in ROWS]
                logits.append(of_slots(ours.verify(ROWS, [PARENTS, None, flat][index % 3]), ROWS))
            ours.accept([1, 1, 1])
            replayed = ours.cache.memory.replayed if capturing else None
        found.append(np.concatenate([one.ravel() for one in logits]))
    assert replayed[2] >= 4
    np.testing.assert_array_equal(*found)


def tables_of(made):
    """The inputs of a context for each token of a slot: 64 bits, and the depths of a network that computes with positions."""
    addresses = made.fake.contexts[0].addresses
    dtypes = {ANCESTORS: "int64", DEPTHS: "int32"}
    return [array_at(addresses[spec.name], spec.shape[:2], dtypes[spec.name]) for spec in made.config.tree_tensors]


@pytest.mark.parametrize(("model", "names"), [(EQUAL, [ANCESTORS]), (MIXED, [ANCESTORS, DEPTHS])])
def test_the_bound_inputs(make, model, names):
    """Chains unless a step has trees, in one place of every context, next to the tensors that a caller binds."""
    made = make(model, "16 bits", logits=TREE, draft_tree=TREE)
    engine = open_engine(made)
    with session_over(engine, made.config) as ours:
        assert dict(engine.tensors) == {spec.name: spec for spec in made.config.tensors}
        assert [spec.name for spec in made.config.tree_tensors] == names
        for name in names:
            assert {context.addresses[name] for context in made.fake.contexts} == {engine.ancestors.addresses[name]}
        assert all((table == -1).all() for table in tables_of(made))
        ours.prefill(PROMPTS)
        assert all((table == -1).all() for table in tables_of(made))
        ours.verify(ROWS, PARENTS)
        found = [table.ravel()[:8].tolist() for table in tables_of(made)]
        assert found == [[0b1, 0b11, 0b101, 0b1011, 0b10101, 0b100101, 0b1100101, 1 << 7], [0, 1, 1, 2, 2, 2, 3, 0]][: len(names)]
        ours.accept(paths=PATHS)
        ours.decode([3, 4, 5])
        assert all((table == -1).all() for table in tables_of(made))
        made.fake.calls.clear()
        ours.decode([3, 4, 5])
        assert [call[0] for call in made.fake.calls] == ["execute_async_v3"]
    assert engine.memory.live_nbytes == 0


def test_a_tree_whose_step_fails_is_no_tree_of_the_next(make):
    made = make(EQUAL, "16 bits", logits=TREE, draft_tree=TREE)
    with open_sessions(made) as both:
        for session in both:
            session.prefill(PROMPTS)
        made.fake.errors["execute_async_v3"] = "LOST"
        with pytest.raises(EngineError, match="LOST"):
            both[0].verify(ROWS, PARENTS)
        made.fake.errors.clear()
        found, expected = (of_slots(session.verify(ROWS), ROWS) for session in both)
        assert_close(found, expected, TOLERANCE[None])


class Trees:
    """Proposes the same tree for each sequence, within its limit."""

    def __init__(self):
        self.limits = set()

    def propose(self, sequences):
        self.limits |= {one.tree_limit for one in sequences}
        return [DraftTree([5, 6, 7, 8], [-1, -1, 0, 1]) if one.tree_limit >= 4 else () for one in sequences]


def test_generation_with_drafts_that_are_trees(make):
    """Greedy tokens are those without drafts, in a queue of more sequences than slots."""
    prompts = [*PROMPTS, [2, 3], [9]]
    made, tokens = make(EQUAL, "16 bits", logits=TREE, draft_tree=TREE), []
    for draft in (None, Trees()):
        with session_over(open_engine(made), made.config) as ours:
            asked = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True, "draft": draft}
            handles = [ours.submit(prompt, **asked) for prompt in prompts]
            while ours.step():
                pass
            tokens.append([list(handle.tokens) for handle in handles])
            proposed = ours.statistics.draft_tokens
    assert tokens[0] == tokens[1]
    assert proposed > 0
    assert draft.limits >= {TREE - 1}


def test_an_engine_without_the_input_takes_chains_only(make):
    made = make(EQUAL, "16 bits", logits=TREE)
    assert made.config.tree_tensors == ()
    with session_over(open_engine(made), made.config) as ours:
        ours.prefill(PROMPTS)
        with raises(ConfigError, "parents", expected=("TensorRTEngine", "draft_tree"), got="a tree"):
            ours.verify(ROWS, PARENTS)


def test_a_plan_without_the_input_is_refused(make):
    config = make(EQUAL, "16 bits", logits=TREE, draft_tree=TREE).config
    with pytest.raises(EngineError, match=f"`{ANCESTORS}` is only in one of them"):
        open_engine(make(EQUAL, "16 bits", logits=TREE), config)


@pytest.mark.parametrize("family", ["llama", "hunyuan_v1_dense"])
def test_an_engine_for_trees_is_built(tmp_path, family):
    """With TensorRT for RTX: a plan whose profile for drafts takes a tree; of a network without positions, and one with."""
    model = write_model(tmp_path / "model", head_dim=64, model_type=family)
    sizes = {"max_batch_size": 1, "max_sequence_length": 60, "flavour": "tensorrt_rtx", "compute_capabilities": "8.6"}
    report = build_engine(model, tmp_path / "engine", **sizes, draft_tree=48)
    folder = EngineFolder.open(report.path)
    assert report.warnings == ()
    assert (len(folder.config.tree_tensors) == 2) is (family != "llama")
    assert (folder.config.draft_tree, folder.config.attention_variant) == (48, "plugin")
    assert [profile.max_width for profile in folder.config.profiles] == [60, 1, 48]
    with folder.read_plan() as plan:
        assert b"KVCacheAttention" in bytes(plan)
