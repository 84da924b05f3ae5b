"""Make and destroy plugins in every way, in a process of its own: where the bindings mistake who owns one, the process ends with a signal.

``python -m tests.bindings.plugin_lives VERSION`` prints how many of the plugins that only Python had are left when Python has dropped them.
"""

import gc
import sys
import weakref
from typing import Any

from tests.bindings.packages import load
from tests.bindings.plugin_calls import fields
from tests.bindings.stand_in import StandIn
from trt_kvcache.trt import module as trt_module
from trt_kvcache.trt.plugin import AttentionAttributes, plugin_class, register

VALUES: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "rotary_dim": 64}
ROUNDS = 100


def main(version: str) -> None:
    stand_in = StandIn(*load(version))
    trt_module.driver_failure = lambda: None
    full = trt_module.load("tensorrt")
    register(full)
    kind, attributes = plugin_class(full), AttentionAttributes(**VALUES)
    dropped = [weakref.ref(kind(attributes)) for _ in range(ROUNDS)]  # by Python alone, one by one
    several = [kind(attributes) for _ in range(ROUNDS)]
    dropped += map(weakref.ref, several)
    del several
    gc.collect()

    creator = next(one for one in stand_in.creators.values() if one.key[:2] == (b"KVCacheAttention", b"1"))
    for _ in range(ROUNDS):  # by TensorRT, each before those that were made from it
        made = creator.create(fields(VALUES), 0)
        assert made is not None
        clone = made.clone()
        made.destroy()
        context = clone.attach()
        clone.destroy()
        assert context.serialized() == {**VALUES, "scale": 0.0, "softcap": 0.0, "window": 0}
        context.destroy()
        gc.collect(0)
    gc.collect()
    print(sum(one() is not None for one in dropped))


main(sys.argv[1])
