"""The stages of a decoder in segments, written out for two layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.models import SMALL, model_of, with_layers
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.engine.decoder_cache import cache_config
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.engine_folder.decoder_segments import COS_SIN, EMBEDDING, decoder_constants, decoder_stages
from trt_kvcache.model import ModelConfig
from trt_kvcache.ops.segments import CustomOpNode, Segment, Stage, intermediate_tensors

#: 4 query heads over 2 K/V heads of 24, 40 hidden elements, 37 tokens.
MODEL = with_layers(ModelConfig.from_dict(SMALL), 2)
CACHE = cache_config(MODEL, max_batch_size=3, max_sequence_length=38, dtype="float16", attention="plugin")
HIDDEN, Q, KV, TABLE = (-1, -1, 40), (-1, -1, 4, 24), (-1, -1, 2, 24), (37, 40)


def stages(*, tied: bool = False, names: TensorNames = DEFAULT_NAMES) -> tuple[Stage, ...]:
    return decoder_stages(replace(MODEL, tie_word_embeddings=tied), CACHE, names)


def tensors(stage: Stage) -> tuple[TensorSpec, ...]:
    assert isinstance(stage, Segment)
    return stage.tensors


def attention(stage: Stage) -> CustomOpNode:
    assert isinstance(stage, CustomOpNode)
    return stage


def test_constants() -> None:
    assert decoder_constants(MODEL, CACHE) == (
        TensorSpec.input("model.embed_tokens.weight", TABLE, "float16"),
        TensorSpec.input("rope.cos_sin", (38, 2, 12), "float32"),
    )


def test_segments_and_operations_alternate() -> None:
    kinds = [stage.operation if isinstance(stage, CustomOpNode) else "segment" for stage in stages()]
    assert kinds == ["embedding", "segment", "attention", "segment", "attention", "segment"]


def test_the_first_stage_looks_up_the_token_ids() -> None:
    assert stages()[0] == CustomOpNode(operation="embedding", attributes={}, inputs=(EMBEDDING, "input_ids"), outputs=("hidden_0",))


def test_the_first_segment_computes_q_k_and_v() -> None:
    assert tensors(stages()[1]) == (
        TensorSpec.input("hidden_0", HIDDEN, "float16"),
        TensorSpec.output("q_0", Q, "float16"),
        TensorSpec.output("k_0", KV, "float16"),
        TensorSpec.output("v_0", KV, "float16"),
    )


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_reads_q_k_v_and_the_cache_of_its_layer(layer: int) -> None:
    node = attention(stages()[2 + 2 * layer])
    assert node.inputs == (f"q_{layer}", f"k_{layer}", f"v_{layer}", f"past_key_values_{layer}", "kvcache_start_index", COS_SIN)
    assert node.outputs == (f"attended_{layer}", f"present_key_values_{layer}")


def test_attention_has_the_heads_of_the_model() -> None:
    assert attention(stages()[2]).attributes == {"num_heads": 4, "num_kv_heads": 2, "head_dim": 24}


def test_a_segment_between_passes_its_hidden_state_on() -> None:
    assert tensors(stages()[3]) == (
        TensorSpec.input("hidden_0", HIDDEN, "float16"),
        TensorSpec.input("attended_0", Q, "float16"),
        TensorSpec.output("q_1", Q, "float16"),
        TensorSpec.output("k_1", KV, "float16"),
        TensorSpec.output("v_1", KV, "float16"),
        TensorSpec.output("hidden_1", HIDDEN, "float16"),
    )


LAST = (
    TensorSpec.input("hidden_1", HIDDEN, "float16"),
    TensorSpec.input("attended_1", Q, "float16"),
    TensorSpec.input("last_token_ids", (-1, 1), "int32"),
)
LOGITS = TensorSpec.output("logits", (-1, 37), "float32")


def test_the_last_segment_computes_the_logits() -> None:
    assert tensors(stages()[-1]) == (*LAST, LOGITS)


def test_a_tied_head_reads_the_embedding_table() -> None:
    assert tensors(stages(tied=True)[-1]) == (*LAST, TensorSpec.input(EMBEDDING, TABLE, "float16"), LOGITS)


def test_stages_have_the_given_names() -> None:
    names = TensorNames(input_ids="tokens", kvcache_start_index="past", kv_cache="cache.{i}", present_kv_cache="now.{i}", logits="scores")
    embedding, _, first, *_, last = stages(names=names)
    assert attention(embedding).inputs == (EMBEDDING, "tokens")
    assert attention(first).inputs[3:5] == ("cache.0", "past")
    assert attention(first).outputs[1] == "now.0"
    assert tensors(last)[-1].name == "scores"


def test_intermediate_tensors_are_those_between_the_stages() -> None:
    caches = [TensorSpec.input(f"past_key_values_{layer}", (-1, 2, 2, 38, 24), "float16") for layer in (0, 1)]
    presents = [TensorSpec.output(f"present_key_values_{layer}", (-1, 2, 2, 38, 24), "float16") for layer in (0, 1)]
    ids = [TensorSpec.input("input_ids", (-1, -1), "int32"), TensorSpec.input("kvcache_start_index", (-1,), "int32")]
    found = intermediate_tensors(stages(), [*ids, *caches, *presents, *decoder_constants(MODEL, CACHE), LOGITS])
    assert set(found) == {"hidden_0", "hidden_1"} | {f"{name}_{layer}" for name in ("q", "k", "v", "attended") for layer in (0, 1)}
    assert found["attended_1"].shape == Q


def stages_of(name: str) -> tuple[ModelConfig, KVCacheConfig, tuple[Stage, ...]]:
    """Return a golden model, its cache and its stages."""
    model = model_of(name)
    cache = cache_config(model, max_batch_size=3, max_sequence_length=11, dtype="float16", attention="plugin")
    return model, cache, decoder_stages(model, cache, DEFAULT_NAMES)


def test_layers_with_different_rope_read_different_tables() -> None:
    model, cache, found = stages_of("gemma3")
    assert decoder_constants(model, cache)[1:] == (
        TensorSpec.input("rope.cos_sin", (11, 2, 12), "float32"),
        TensorSpec.input("rope.cos_sin_1", (11, 2, 12), "float32"),
    )
    tables = [stage.inputs[-1] for stage in found if isinstance(stage, CustomOpNode)][1:]
    assert tables == ["rope.cos_sin", "rope.cos_sin", "rope.cos_sin_1", "rope.cos_sin"]


def test_the_first_segment_computes_the_inputs_of_layers_with_per_layer_embeddings() -> None:
    """Six layers, so six cuts: each later segment has the MLP of one layer."""
    model, cache, found = stages_of("gemma4-ple")
    assert decoder_constants(model, cache)[1] == TensorSpec.input("model.embed_tokens_per_layer.weight", (83, 72), "float16")
    lookups = [stage for stage in found if isinstance(stage, CustomOpNode) and stage.operation == "embedding"]
    assert [(one.inputs[0], one.outputs) for one in lookups] == [
        (EMBEDDING, ("embedded",)),
        ("model.embed_tokens_per_layer.weight", ("per_layer_rows",)),
    ]
    first, *others = [stage.tensors for stage in found if isinstance(stage, Segment)]
    assert TensorSpec.input("per_layer_rows", (-1, -1, 72), "float16") in first
    assert TensorSpec.output("per_layer_inputs", (-1, -1, 6, 12), "float16") in first
    assert all(TensorSpec.input("per_layer_inputs", (-1, -1, 6, 12), "float16") in tensors for tensors in others)
    assert not [spec for tensors in others for spec in tensors if spec.name == "per_layer_rows"]


@pytest.mark.parametrize(("layers", "named"), [({1, 5}, {0, 1, 5}), ({0}, set()), ({0, 1}, {0, 1})])
def test_segments_without_per_layer_embeddings_do_not_read_their_inputs(layers: set[int], named: set[int]) -> None:
    """The first layer has no attention, so that the first segment has its MLP."""
    model = model_of("gemma4-ple")
    few = [layer if index in layers else replace(layer, per_layer_input=None) for index, layer in enumerate(model.layers)]
    few[0] = replace(few[0], mixer=None, input_norm=None, mixer_output_norm=None)
    model = replace(model, layers=tuple(few))
    cache = cache_config(model, max_batch_size=3, max_sequence_length=11, dtype="float16", attention="plugin")
    segments = [tensors(stage) for stage in decoder_stages(model, cache, DEFAULT_NAMES) if isinstance(stage, Segment)]
    assert named == {index for index, specs in enumerate(segments) if "per_layer_inputs" in [spec.name for spec in specs]}


def test_layers_without_rope_read_no_table() -> None:
    _, _, found = stages_of("smollm3-bias-window")
    nodes = [stage for stage in found if isinstance(stage, CustomOpNode)][1:]
    assert [node.inputs[5:] for node in nodes] == [(), ("rope.cos_sin",), ()]
    assert [node.attributes.get("rotary_dim") for node in nodes] == [0, None, 0]
    assert [node.attributes.get("window") for node in nodes] == [None, 8, 8]


def test_attention_has_what_its_layer_differs_in() -> None:
    _, _, found = stages_of("gemma2")
    nodes = [stage for stage in found if isinstance(stage, CustomOpNode)][1:]
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 24}
    scale = model_of("gemma2").layers[0].mixer.scale
    assert [node.attributes for node in nodes] == [
        {**heads, "scale": scale, "window": 7, "softcap": 2.0},
        {**heads, "scale": scale, "softcap": 2.0},
        {**heads, "scale": scale, "window": 7, "softcap": 2.0},
    ]


def test_a_window_that_no_sequence_exceeds_is_left_out() -> None:
    _, _, found = stages_of("ministral3-window")  # its window is 11, as S is
    assert not [stage for stage in found if isinstance(stage, CustomOpNode) and "window" in stage.attributes]


def test_the_first_segment_multiplies_what_the_embedding_gives() -> None:
    _, _, found = stages_of("granite")
    assert attention(found[0]).outputs == ("embedded",)
    names = [(spec.name, spec.mode.value) for spec in tensors(found[1])]
    assert names == [("embedded", "input"), ("q_0", "output"), ("k_0", "output"), ("v_0", "output"), ("hidden_0", "output")]
    assert tensors(found[3])[0].name == "hidden_0"


def test_segments_with_queries_that_are_scaled_by_position_read_where_the_step_starts() -> None:
    _, _, found = stages_of("ministral3")
    starts = [TensorSpec.input("kvcache_start_index", (-1,), "int32") in stage.tensors for stage in found if isinstance(stage, Segment)]
    assert starts == [True, True, False]
