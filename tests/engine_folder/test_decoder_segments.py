"""The stages of a decoder in segments, written out for two layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.small_model import SMALL, with_layers
from trt_kvcache.engine.decoder_tensors import cache_config
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
