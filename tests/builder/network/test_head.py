"""Both ends of a decoder: embedding and logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.builder.network.parts import Part, StoredWeights, normal
from tests.helpers.assertions import assert_close
from tests.helpers.models import SMALL
from trt_kvcache.builder.network.embedding_table import embedding_table
from trt_kvcache.builder.network.head import by_slot, chosen_tokens, final_norm, last_token, logits, spread
from trt_kvcache.model import ModelConfig, NormConfig

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]

MODEL = replace(ModelConfig.from_dict(SMALL), final_norm=NormConfig(epsilon=0.25))
EMBEDDING = "model.embed_tokens.weight"


def test_one_token_of_each_slot_is_selected(part: MakePart) -> None:
    made, x, last = part(), normal(3, 4, 5), np.array([[3], [0], [2]], np.int32)
    y = last_token(made.graph, made.graph.input("x", "float32", (-1, -1, 5)), made.graph.input("last", "int32", (-1, 1)))
    np.testing.assert_array_equal(made.run(y, x=x, last=last), np.stack([x[0, 3], x[1, 0], x[2, 2]]))


def test_several_tokens_of_each_slot_are_selected(part: MakePart) -> None:
    made, x, last = part(), normal(3, 4, 5), np.array([[3, 0], [0, 0], [2, 1]], np.int32)
    y = chosen_tokens(made.graph, made.graph.input("x", "float32", (-1, -1, 5)), made.graph.input("last", "int32", (-1, -1)))
    np.testing.assert_array_equal(made.run(y, x=x, last=last), np.stack([x[0, 3], x[0, 0], x[1, 0], x[1, 0], x[2, 2], x[2, 1]]))


def test_rows_are_given_back_to_their_slots(part: MakePart) -> None:
    made, rows, last = part(), normal(6, MODEL.vocab_size), np.zeros((3, 2), np.int32)
    y = by_slot(
        made.graph,
        made.graph.input("rows", "float32", (-1, MODEL.vocab_size)),
        made.graph.input("last", "int32", (-1, -1)),
        MODEL,
    )
    np.testing.assert_array_equal(made.run(y, rows=rows, last=last), rows.reshape(3, 2, -1))


@pytest.mark.parametrize("tied", [False, True], ids=["a head of its own", "a tied head"])
def test_logits_are_the_projection_of_the_normalised_state(part: MakePart, tied: bool) -> None:
    made, x, table, head, norm = part(), normal(2, 4), normal(7, 4, seed=1), normal(7, 4, seed=2), normal(4, seed=3)
    weights = StoredWeights(model__embed_tokens__weight=table, lm_head__weight=head, model__norm__weight=norm)
    model = replace(MODEL, tie_word_embeddings=tied)
    constant = embedding_table(made.graph, weights, EMBEDDING, EMBEDDING)
    state = final_norm(made.graph, made.graph.input("x", "float32", (2, 4)), weights, model)
    found = made.run(logits(made.graph, state, weights, model, constant), x=x)
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 0.25) * norm
    assert_close(found, normed @ (table if tied else head).T)


def test_logits_are_in_float32(part: MakePart) -> None:
    made, x = part("float16"), normal(2, 4, dtype="float16")
    weights = StoredWeights(lm_head__weight=normal(7, 4, dtype="float16"), model__norm__weight=np.ones(4, np.float16))
    tensor = final_norm(made.graph, made.graph.input("x", "float16", (2, 4)), weights, MODEL)
    assert made.run(logits(made.graph, tensor, weights, replace(MODEL, tie_word_embeddings=False), None), x=x).dtype == np.float32


def test_logits_of_some_token_ids_are_spread_over_all(part: MakePart) -> None:
    made, x, tokens = part(), normal(3, 4), np.array([5, 0, MODEL.vocab_size - 1, 2])
    found = made.run(spread(made.graph, made.graph.input("x", "float32", (-1, 4)), tokens, MODEL), x=x)
    expected = np.full((3, MODEL.vocab_size), -np.inf, np.float32)
    expected[:, tokens] = x
    np.testing.assert_array_equal(found, expected)
