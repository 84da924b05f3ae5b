"""Plugin layers of both versions, as networks have them: attributes, and shapes and dtypes of inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.trt.plugin.plugin_tensors import input_names, inputs_of, outputs_of

#: Rows of a slot, rows of the RoPE table, and scales of a head: free sizes that a network fixes.
_SIZES = {"S": 30, "P": 32, "S'": 32}


@dataclass(frozen=True)
class Layer:
    attributes: AttentionAttributes
    dtype: str = "float16"
    new_lengths: bool = False

    @property
    def inputs(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """Shape and dtype of each input; B and s are free."""
        one, patterns = self.attributes, inputs_of(self.attributes)
        sizes = _SIZES | {"rotary_dim / 2": one.rotary_dim // 2, "head_dim / 4": one.head_dim // 4}
        sizes |= {name: getattr(one, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
        count = len(patterns) - (not one.rotary_dim) - (not self.new_lengths)
        return {
            name: (
                tuple(sizes.get(size, size) for size in patterns[name][0]),
                self.dtype if patterns[name][1] == "q" else patterns[name][1],
            )
            for name in input_names(one, count)
        }

    @property
    def outputs(self) -> dict[str, str]:
        """The input that each output is like."""
        return {f"{name}_after": like for name, (like, _) in outputs_of(self.attributes).items()}


_HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}

LAYERS = {
    "plain": Layer(AttentionAttributes(**_HEADS, rotary_dim=64)),
    "every option": Layer(AttentionAttributes(**_HEADS, rotary_dim=20, scale=0.3, window=7, softcap=30.5), "bfloat16", new_lengths=True),
    "no rope": Layer(AttentionAttributes(num_heads=16, num_kv_heads=1, head_dim=256)),
    "by token": Layer(AttentionAttributes(**_HEADS, rotary_dim=64, kv_dtype="int8", kv_scales="token"), new_lengths=True),
    "by head": Layer(AttentionAttributes(**_HEADS, kv_dtype="float8_e4m3fn", kv_scales="head"), "bfloat16"),
}
