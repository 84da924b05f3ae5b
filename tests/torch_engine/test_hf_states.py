"""Models with states of Hugging Face transformers generate on our cache: tokens and states are those on the cache of transformers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.helpers.models import model_of
from tests.paths import GOLDEN
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

transformers = pytest.importorskip("transformers", reason="transformers is not installed: `make test-torch` installs it")

from tests.torch_engine.hf_states import cache_over, config_for  # noqa: E402
from trt_kvcache import CudaMemory, HostMemory, HybridCacheManager  # noqa: E402
from trt_kvcache.torch_engine.device import CudaDevice, HostDevice  # noqa: E402
from trt_kvcache.trt.engine_bindings import stream_handle  # noqa: E402

PROMPT, NEW, SLOTS = 9, 12, 2

MODELS = ["bamba", "falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h", "qwen3_5", "qwen3_next"]

#: Models whose states depend on sums of attention in the layer before, which are rounded differently over rows with other strides.
SUMS_FIRST = ["falcon_h1"]

places = pytest.mark.parametrize("place", ["host", pytest.param("gpu", marks=pytest.mark.gpu)])


class Place:
    """Our memory, torch over it, and a stream that both use."""

    def __init__(self, name):
        self.memory = HostMemory() if name == "host" else CudaMemory()
        self.device = (HostDevice if name == "host" else CudaDevice)(*([] if name == "host" else [self.memory]))
        self.stream = self.memory.create_stream()
        self._streams = nullcontext
        if name != "host":
            self._streams = lambda: torch.cuda.stream(torch.cuda.ExternalStream(stream_handle(self.stream)))

    def generate(self, model, ids, cache, count):
        """Return all tokens, chosen by transformers' own loop, and the cache that it used."""
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True, "use_cache": True}
        with self._streams(), torch.inference_mode():
            ids = torch.tensor(ids, device=model.device)
            found = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=count, **options)
            return found.sequences.tolist(), found.past_key_values

    def cache(self, name, dtype, slots=SLOTS):
        config = config_for(model_of(name), slots=slots, length=PROMPT + NEW, dtype=dtype)
        manager = HybridCacheManager(config, memory=self.memory)
        manager.set_active_batch_size(slots, stream=self.stream)
        return manager


@pytest.fixture
def at(place):
    return Place(place)


def open_transformers(name, dtype, at):
    model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=getattr(torch, dtype))
    return model.eval().to(at.device.torch_device)


def prompts_of(name):
    random = torch.Generator().manual_seed(3)
    return torch.randint(1, model_of(name).vocab_size, (SLOTS, PROMPT), generator=random).tolist()


#: Largest difference of states, relative to the largest state, by the dtype of the model: recurrent states may be in float32 nevertheless.
DIFFERENCE = {"float32": 1e-5, "bfloat16": 0.06}


def difference(found, wanted):
    return float((found.float() - wanted.float()).abs().max() / wanted.abs().max())


@places
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_states_are_those_of_transformers(name, dtype, at):
    model, ids = open_transformers(name, dtype, at), prompts_of(name)
    expected, own = at.generate(model, ids, None, NEW)
    with at.cache(name, dtype) as manager:
        found, ours = at.generate(model, ids, cache_over(model_of(name), manager, at.device.view, at.stream), NEW)
        at.memory.synchronize(at.stream)
        assert found == expected
        assert manager.host_kv_cache_lengths == (PROMPT + NEW - 1,) * SLOTS
        for mine, theirs in zip(ours.layers, own.layers, strict=True):
            for kind in ("conv_states", "recurrent_states"):
                state = getattr(mine, kind, {0: None})[0]
                if state is not None:
                    wanted = getattr(theirs, kind)[0]
                    assert difference(state, wanted) <= (DIFFERENCE[dtype] if name in SUMS_FIRST else 0), (kind, state.dtype)
                    assert state.any()


@places
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_captured_sequence_goes_on_in_another_cache(name, at):
    model, ids = open_transformers(name, "float32", at), prompts_of(name)
    expected, _ = at.generate(model, ids[1:], None, NEW)
    with at.cache(name, "float32") as first, at.cache(name, "float32", slots=1) as second:
        found, _ = at.generate(model, ids, cache_over(model_of(name), first, at.device.view, at.stream), 5)
        held = PROMPT + 4  # the last token was chosen, not run
        second.restore_kv_cache(first.capture_kv_cache(1, held, stream=at.stream), 0, stream=at.stream)
        second.restore_recurrent_states(first.capture_recurrent_states(1, stream=at.stream), 0, stream=at.stream)
        second.restore_conv_states(first.capture_conv_states(1, stream=at.stream), 0, stream=at.stream)
        second.commit_sequence_length(held, stream=at.stream)
        rest, _ = at.generate(model, found[1:], cache_over(model_of(name), second, at.device.view, at.stream), NEW - 5)
        at.memory.synchronize(at.stream)
    assert rest == expected
