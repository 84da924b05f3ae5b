"""An EAGLE-3 head that is trained for the shipped model, and its acceptance next to that of the same weights in another order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.eagle3 import write_head
from tests.helpers.sessions import by_prompt, hidden_states
from tests.paths import ROOT
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from trt_kvcache import InferenceSession, SamplingParams  # noqa: E402
from trt_kvcache.session import open_model as opening  # noqa: E402

MODEL = ROOT / "examples" / "tiny-llama"
LAYERS = [0, 1, 2]
OPTIONS = {"engine": "numpy", "dtype": "float32", "max_batch_size": 4}

Weights = Mapping[str, torch.Tensor]


def head_logits(
    weights: Weights, sizes: Mapping[str, int], embedded: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states ``[B, T, hidden]`` before the norm, and logits, as ``cnets.py`` of SafeAILab/EAGLE trains them."""
    width, batch, count = sizes["head_dim"], *hidden.shape[:2]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], 1e-5)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"midlayer.{name}.weight"])

    def rotated(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(count)[:, None] * sizes["rope_theta"] ** -(torch.arange(0, width, 2) / width)
        first, second = x.chunk(2, -1)
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)

    inputs = torch.cat([norm(embedded, "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm")], -1)
    q, k, v = (linear(inputs, f"self_attn.{name}_proj").view(batch, count, -1, width).transpose(1, 2) for name in "qkv")
    attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
    x = hidden + linear(attended.transpose(1, 2).flatten(2), "self_attn.o_proj")
    normed = norm(x, "midlayer.post_attention_layernorm")
    x = x + linear(F.silu(linear(normed, "mlp.gate_proj")) * linear(normed, "mlp.up_proj"), "mlp.down_proj")
    return x, F.linear(norm(x, "norm"), weights["lm_head.weight"])


def train(folder: Path, rows: np.ndarray, states: np.ndarray, *, steps: int) -> None:
    """Train a head on the tokens ``[B, T]`` that a model generated, and their hidden states: of the model, then for one draft its own."""
    torch.manual_seed(0)
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    weights = {name: torch.tensor(weight, requires_grad=True) for name, weight in stored.items() if name not in ("d2t", "t2d")}
    embedding = torch.tensor(load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"]).float()
    tokens, of_model = torch.tensor(rows), torch.tensor(states)
    embedded, wanted = embedding[tokens[:, 1:-1]], tokens[:, 2:]
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * max(0.05, 1 - step / steps)
        x, logits = head_logits(weights, config, embedded, F.linear(of_model[:, : embedded.shape[1]], weights["fc.weight"]))
        _, next_logits = head_logits(weights, config, embedded[:, 1:], x[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) + F.cross_entropy(next_logits.flatten(0, 1), wanted[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_file({**stored, **{name: weight.detach().numpy() for name, weight in weights.items()}}, folder / "model.safetensors")


@pytest.mark.long
def test_a_trained_head_is_accepted_more_often_than_the_same_weights_in_another_order(tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    sizes = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "eagle_aux_hidden_state_layer_ids": LAYERS}
    head = write_head(tmp_path / "head", MODEL, tokens=range(config["vocab_size"]), scale=0.1, **sizes)
    text = (MODEL / "text.txt").read_text()
    with InferenceSession.from_model(MODEL, **OPTIONS) as session:
        ids = session.tokenizer.encode(text)
    rows = np.array([ids[start : start + 160] for start in range(0, len(ids) - 160, 60)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "hidden_layers_for", lambda draft, config: tuple(LAYERS))  # side by side
        session = InferenceSession.from_model(MODEL, **{**OPTIONS, "max_batch_size": len(rows)})
    with session:
        session.prefill(rows.tolist())
        states = np.stack([hidden_states(session, slot, 160) for slot in range(len(rows))])
    train(head, rows, states, steps=100)
    prompts = [ids[start : start + 20] for start in (10, 300, 600, 900)]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    with InferenceSession.from_model(MODEL, **OPTIONS) as plain:
        expected = by_prompt(plain.generate(prompts, params))
    rates = []
    for permuted in (False, True):
        if permuted:
            random, stored = np.random.default_rng(1), load_file(head / "model.safetensors")
            mixed = {name: random.permutation(one.ravel()).reshape(one.shape) for name, one in stored.items() if name not in ("d2t", "t2d")}
            save_file({**stored, **mixed}, head / "model.safetensors")
        with InferenceSession.from_model(MODEL, draft=head, **OPTIONS) as session:
            assert by_prompt(session.generate(prompts, params)) == expected
            rates.append(session.statistics.acceptance_rate)
    assert rates[0] > 0.4
    assert rates[1] < 0.1
