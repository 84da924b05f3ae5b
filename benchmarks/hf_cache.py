"""A torch model that generates on our cache and our attention, against its own SDPA attention: ``hf_adapter()``.

The model is Llama of Hugging Face transformers with random weights, its ``Cache`` and its attention function replaced; where
transformers is missing, a Llama written out below. Run as a script, it works in host memory without a GPU.
"""

from contextlib import nullcontext

import numpy as np
import torch
from torch.nn import functional

from trt_kvcache import CudaMemory, DeviceTensor, HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
from trt_kvcache.kernels import AttentionWorkspace, attend
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.trt.engine_bindings import stream_handle

NAME = "trt_kvcache"
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 3, 6, 2, 64, 96, 211
S, STEPS = 80, 20
PROMPTS = {"ragged": (37, 1, 12), "equal": (9, 9, 9)}

#: Largest difference of logits, relative to their largest; both sides round after every operation, ours also the turned keys.
TOLERANCE = {"float16": 1e-2, "bfloat16": 8e-2}


class CachedAttention:
    """Attention of all layers of a model over one cache; ``angles`` are those of :func:`_angles`."""

    def __init__(self, memory, stream, dtype, angles):
        layer = KVLayerConfig(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        slots = len(PROMPTS["ragged"])
        config = KVCacheConfig(layers=[layer] * LAYERS, max_batch_size=slots, max_sequence_length=S, dtype=dtype, layout=KVLayout.COMBINED)
        self.memory, self.stream = memory, stream
        self.cache = KVCacheManager(config, memory=memory)
        self.cache.reset_for_new_sequences([0] * slots, stream=stream)
        sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        self._workspace = AttentionWorkspace(memory, **sizes, stream=stream)
        self._angles = memory.to_device(angles, stream=stream)
        self._buffers = {}
        self._new = None

    def begin(self, new_lengths):
        """Say how many tokens each slot gets in the next step, if not all."""
        self._new = (self.memory.to_device(np.array(new_lengths, np.int32), stream=self.stream), new_lengths)

    def __call__(self, layer, q, k, v):
        """Append and attend: q ``[B, heads, s, D]``, k and v likewise, not turned; returns ``[B, s, heads, D]``."""
        tensors = []
        for name, part in enumerate((q, k, v)):
            shape = (name, part.shape[0], part.shape[2], part.shape[1], part.shape[3])
            if shape not in self._buffers:
                allocation = self.memory.allocate(dense_nbytes(shape[1:], self.cache.kv_config.dtype), stream=self.stream)
                tensor = DeviceTensor(allocation, shape=shape[1:], dtype=self.cache.kv_config.dtype)
                self._buffers[shape] = tensor, torch.from_dlpack(tensor)
            tensor, view = self._buffers[shape]
            view.copy_(part.transpose(1, 2))
            tensors.append(tensor)
        attend(
            *tensors,
            self.cache.get_combined_kv_cache(layer),
            self.cache.lengths.active_tensor,
            out=tensors[0],
            workspace=self._workspace,
            new_lengths=self._new[0] if self._new else None,
            cos_sin=self._angles,
            stream=self.stream,
        )
        if layer == LAYERS - 1:
            self.cache.commit_sequence_length(self._new[1] if self._new else q.shape[2], stream=self.stream)
            self._new = None
        return self._buffers[(0, *tensors[0].shape)][1].clone()


def _angles(freqs):
    """Return cosine and sine of each position, float32 ``[S, 2, D // 2]``."""
    turns = np.arange(S)[:, None] * freqs
    return np.stack([np.cos(turns), np.sin(turns)], axis=1).astype(np.float32)


class TorchLlama(torch.nn.Module):
    """Llama, to be run on any attention: a callable of layer, q, k, v."""

    def __init__(self):
        super().__init__()
        heads, kv_heads, wide = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, 2 * HIDDEN
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads, "gate": wide, "up": wide, "o": -heads, "down": -wide}  # minus: back to HIDDEN

        def linear(size):
            return torch.nn.Linear(*((HIDDEN, size) if size > 0 else (-size, HIDDEN)), bias=False)

        self.embedding, self.head = torch.nn.Embedding(VOCAB, HIDDEN), linear(VOCAB)
        layers = ({name: linear(size) for name, size in sizes.items()} for _ in range(LAYERS))
        self.layers = torch.nn.ModuleList(map(torch.nn.ModuleDict, layers))
        self.angles = _angles(10000.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))

    def logits(self, ids, attention):
        """Run ids ``[B, s]``; return ``[B, s, vocab]``."""
        x = self.embedding(ids)
        for index, layer in enumerate(self.layers):
            y = functional.rms_norm(x, (HIDDEN,))
            q, k, v = (layer[name](y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for name in "qkv")
            x = x + layer["o"](attention(index, q, k, v).flatten(2))
            y = functional.rms_norm(x, (HIDDEN,))
            x = x + layer["down"](functional.silu(layer["gate"](y)) * layer["up"](y))
        return self.head(functional.rms_norm(x, (HIDDEN,)))

    def own(self, ids):
        """Return the logits of all tokens on SDPA of torch."""
        cos, sin = (torch.from_numpy(side).to(ids.device)[: ids.shape[1]] for side in self.angles.swapaxes(0, 1))

        def turn(x):
            low, high = x.float().chunk(2, dim=-1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)

        def sdpa(layer, q, k, v):
            k, v = (side.repeat_interleave(HEADS // KV_HEADS, dim=1) for side in (turn(k), v))
            return functional.scaled_dot_product_attention(turn(q), k, v, is_causal=True).transpose(1, 2)

        return self.logits(ids, sdpa)


class HuggingFaceLlama:
    """The same with Llama of transformers: one model on its own attention, one on ours, of equal weights."""

    def __init__(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
        rest = {"max_position_embeddings": S, "initializer_range": 0.1, "eos_token_id": None, "bos_token_id": None}
        self._own, self._ours = (LlamaForCausalLM(LlamaConfig(**sizes, **heads, **rest)).eval() for _ in range(2))
        self._own.set_attn_implementation("sdpa")

    def to(self, *where):
        """Move both models, and give ours the weights of the other, our cache and our attention."""
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        freqs = self._own.model.rotary_emb.inv_freq.double().numpy()
        self._own.to(*where)
        self._ours.to(*where).load_state_dict(self._own.state_dict())
        self._ours.model.rotary_emb = _NoRotation()
        self.angles = _angles(freqs)
        AttentionInterface.register(NAME, self._attention)
        AttentionMaskInterface.register(NAME, lambda *_, **__: None)
        self._ours.set_attn_implementation(NAME)
        return self

    def _attention(self, module, q, k, v, mask, **_):
        return self._adapter(module.layer_idx, q, k, v), None

    def logits(self, ids, attention):
        """Run tokens on our cache; return the logits of all."""
        self._adapter = attention
        return self._ours(ids, past_key_values=_cache_over(attention), use_cache=True).logits

    def generate(self, ids, attention, steps):
        """Generate with transformers' own loop; return all tokens ``[B, n]`` and the logits ``[B, vocab]`` of each step."""
        self._adapter = attention
        options = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
        found = self._ours.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=_cache_over(attention), **options)
        return found.sequences, list(found.logits)

    def own(self, ids):
        """Return the logits of all tokens on the model's own attention."""
        return self._own(ids).logits


class _NoRotation(torch.nn.Module):
    """Turns nothing: the kernels do."""

    def forward(self, x, position_ids):
        one = torch.ones((1, 1, HEAD_DIM), dtype=x.dtype, device=x.device)
        return one, torch.zeros_like(one)


def _cache_over(attention):
    """Return a ``Cache`` of transformers whose rows are those of our cache: ``update`` leaves them to the attention function."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class Layer(CacheLayerMixin):
        is_compileable = False
        is_sliding = False

        def lazy_initialization(self, *_):
            self.is_initialized = True

        def update(self, k, v, *_, **__):
            return k, v

        def get_mask_sizes(self, query_length):
            return self.get_seq_length() + query_length, 0

        def get_seq_length(self):
            return max(attention.cache.host_kv_cache_lengths)

        def get_max_length(self):
            return S

    return Cache(layers=[Layer() for _ in range(LAYERS)])


def _greedy(model, attention, prompts, device):
    """Generate for prompts of different lengths, right-padded; return all tokens, and the logits ``[B, vocab]`` of each step."""
    rows, new, logits = [list(prompt) for prompt in prompts], [list(prompt) for prompt in prompts], []
    for _ in range(STEPS):
        counts = [len(part) for part in new]
        ids = torch.tensor([part + [0] * (max(counts) - len(part)) for part in new], device=device)
        attention.begin(counts)
        found = model.logits(ids, attention)
        logits.append(found[torch.arange(len(new)), torch.tensor(counts) - 1])
        new = [[token] for token in logits[-1].argmax(dim=-1).tolist()]
        for row, token in zip(rows, new, strict=True):
            row += token
    return rows, logits


def _compare(model, rows, logits, device, dtype):
    """Compare logits, and the tokens chosen by them, with those of the model's own attention over whole sequences."""
    worst, equal = 0.0, 0
    for slot, row in enumerate(rows):
        own = model.own(torch.tensor([row], device=device))[0].float()
        for step, found in enumerate(logits):
            want, token = own[len(row) - STEPS - 1 + step], row[len(row) - STEPS + step]
            size = want.abs().max()
            worst = max(worst, float((found[slot].float() - want).abs().max() / size))
            assert float((want.max() - want[token]) / size) <= 2 * TOLERANCE[dtype], (slot, step)
            equal += int(want.argmax()) == token
    assert worst <= TOLERANCE[dtype], worst
    return {"error": worst, "equal_tokens": f"{equal} of {len(rows) * STEPS}"}


@torch.no_grad()
def hf_adapter(on_host=False):
    """Generate on our cache with ragged prompts, with NaN in all dead rows, and compare with the model's own SDPA attention.

    ``on_host``: without a GPU, and in float16 only, as NumPy's DLPack knows no bfloat16.
    """
    try:
        import transformers
    except ImportError:
        transformers = None
    version = f"transformers {transformers.__version__}" if transformers else "Llama of this script"
    shown = {"torch": torch.__version__, "model": version}
    device = "cpu" if on_host else "cuda"
    for dtype in ("float16",) if on_host else TOLERANCE:
        memory = HostMemory() if on_host else CudaMemory()
        stream = memory.create_stream()
        torch.manual_seed(3)
        model = HuggingFaceLlama() if transformers else TorchLlama()
        model.to(device, getattr(torch, dtype))
        with nullcontext() if on_host else torch.cuda.stream(torch.cuda.ExternalStream(stream_handle(stream))):
            for name, lengths in PROMPTS.items():
                attention = CachedAttention(memory, stream, dtype, model.angles)
                for layer in range(LAYERS):
                    torch.from_dlpack(attention.cache.get_combined_kv_cache(layer)).fill_(torch.nan)
                prompts = [torch.randint(VOCAB, (length,)).tolist() for length in lengths]
                if name == "equal" and transformers:
                    found, logits = model.generate(torch.tensor(prompts, device=device), attention, STEPS)
                    rows = found.tolist()
                else:
                    rows, logits = _greedy(model, attention, prompts, device)
                assert attention.cache.host_kv_cache_lengths == tuple(len(row) - 1 for row in rows)
                shown[f"{dtype} {name}"] = _compare(model, rows, logits, device, dtype)
                memory.synchronize(stream)
                attention.cache.close()
    return shown


if __name__ == "__main__":
    print(hf_adapter(on_host=not torch.cuda.is_available()))
