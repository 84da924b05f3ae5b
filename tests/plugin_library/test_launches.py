"""The launches of an enqueue of the plugin library against those of Python, for every architecture: kernels, grids, arguments."""

import ctypes
import itertools
import random
import struct
from types import SimpleNamespace

import pytest

from tests.plugin_library.build import DECLARATIONS, SOURCES, build_shared, cuda_include, embed_kernels, need_cmake
from trt_kvcache.kernels import attention_kernels
from trt_kvcache.kernels.attention_tiles import MAX_GROUP, STORED_TYPES
from trt_kvcache.kernels.compile import ARCHITECTURES
from trt_kvcache.kernels.scale_views import saved_scales
from trt_kvcache.ops.attention_attributes import KV_FIELD_VALUES, AttentionAttributes
from trt_kvcache.trt.plugin import enqueue
from trt_kvcache.trt.plugin.plugin_tensors import input_names, inputs_of, outputs_of

need_cmake()

_WORKSPACE, _OUT = 0x1000000, 0x2000000
_VARIANTS = ("float16-64", "bfloat16-128", "float16-256", "bfloat16-512")


class Attributes(ctypes.Structure):
    """``AttentionAttributes`` of the library."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")), ("scale", ctypes.c_double),
        ("window", ctypes.c_int32), ("softcap", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("rotary_dim", "kv_dtype", "kv_scales")),
    )  # fmt: skip


@pytest.fixture(scope="module")
def probe():
    embed = embed_kernels()
    kernels = embed.kernels_of(ARCHITECTURES, _VARIANTS, (None, *STORED_TYPES))

    def write(folder):
        embed.write(kernels, [b""] * sum(len(one.sources) for one in kernels), folder)
        return [folder / "kernels.cpp", folder / "kernels.S", "-isystem", DECLARATIONS, "-isystem", cuda_include()]

    names = ("attention_call.cpp", "attention_attributes.cpp", "launch_plan.cpp", "attention_kernels.cpp")
    library = ctypes.CDLL(str(build_shared("launch_probe", [SOURCES / name for name in names], write)))
    library.launches_of.restype = ctypes.c_int64
    library.name_of_kernel.restype = ctypes.c_char_p
    return library


def calls(seed):
    """Yield attributes, dtype of q, and shapes of the inputs by name, at random."""
    choose = random.Random(seed)
    for variant, kv_dtype in itertools.product(_VARIANTS, (None, *STORED_TYPES)):
        dtype, head_dim = variant.split("-")
        for _ in range(8):
            kv_heads, group = choose.choice((1, 2, 8)), choose.randint(1, MAX_GROUP)
            one = AttentionAttributes(
                num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=int(head_dim), scale=choose.choice((0.0, 0.3)),
                window=choose.choice((0, 17)), softcap=choose.choice((0.0, 30.0)), rotary_dim=choose.choice((0, 32)),
                kv_dtype=kv_dtype, kv_scales=kv_dtype and choose.choice(("head", "token")),
            )  # fmt: skip
            tokens = choose.choice((40, 1000, 30000))
            sizes = {"B": choose.choice((1, 3, 20)), "s": min(choose.choice((1, 1, 2, 8, 20, 32, 300)), tokens), "S": tokens, "P": tokens}
            sizes |= {"S'": saved_scales(tokens), "rotary_dim / 2": one.rotary_dim // 2, "head_dim / 4": one.head_dim // 4}
            sizes |= {name: getattr(one, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
            patterns = inputs_of(one)
            names = input_names(one, len(patterns) - (not one.rotary_dim) - choose.choice((0, 1)))
            yield one, dtype, {name: tuple(sizes.get(size, size) for size in patterns[name][0]) for name in names}


@pytest.fixture
def python_launches(monkeypatch):
    """Return what the Python plugin launches."""
    made = []

    def record(memory, source, name, grid, arguments, stream, *, threads=256, shared_nbytes=0, cooperative=False, **options):
        values = [struct.unpack("<q", struct.pack("<d" if isinstance(one, float) else "<q", one))[0] for one in arguments]
        early = options["programmatic_dependent_launch"]
        made.append((name, [*grid, threads, shared_nbytes, int(cooperative), int(early), 1, *values]))

    monkeypatch.setattr(attention_kernels, "launch", record)
    monkeypatch.setattr(enqueue, "zero", lambda ptr, nbytes, stream: made.append((None, [ptr, 0, nbytes])))
    monkeypatch.setattr(enqueue, "stream_of", lambda handle: None)

    def launches(attributes, dtype, shapes, addresses, arch, multiprocessors):
        made.clear()
        memory = SimpleNamespace(arch=arch, multiprocessor_count=multiprocessors, is_host=False, device="cuda:0")
        aliased = [addresses[like] for like, is_aliased in outputs_of(attributes).values() if is_aliased]
        step = enqueue.PluginEnqueue(attributes, dtype, shapes, memory)
        step.run([addresses[name] for name in shapes], [_OUT, *aliased], _WORKSPACE, 0)
        return list(made)

    return launches


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_launches_are_those_of_the_python_plugin(probe, python_launches, arch):
    for attributes, dtype, shapes in calls(arch):
        multiprocessors = 16 if attributes.window else 132
        addresses = {name: 0x10000 * (1 + index) for index, name in enumerate(shapes)}
        expected = python_launches(attributes, dtype, shapes, addresses, arch, multiprocessors)
        codes = {name: known.get(getattr(attributes, name), 0) for name, known in KV_FIELD_VALUES.items()}
        given = Attributes(**{name: codes.get(name, getattr(attributes, name)) for name, _ in Attributes._fields_})
        q, cache = shapes["q"], shapes["cache"]
        scales = shapes["kv_scales"][-1] if attributes.kv_scales == "token" else -1
        sizes = (ctypes.c_int64 * 5)(q[0], q[1], cache[3], -1, scales)
        order = ("q", "k", "v", "cache", "lengths", "kv_scales", "cos_sin", "new_lengths")
        pointers = (ctypes.c_void_p * 10)(*(addresses.get(name) for name in order), _OUT, _WORKSPACE)
        counts = [len(values) - 8 for name, values in expected if name]
        found = (ctypes.c_int64 * 200)()
        total = probe.launches_of(
            int(arch[3:]), dtype.encode(), ctypes.byref(given), sizes, multiprocessors, pointers, (ctypes.c_int64 * 2)(*counts), found
        )
        numbers = iter(found[:total])
        for name, values in expected:
            if name:
                assert probe.name_of_kernel(ctypes.c_int64(next(numbers))).decode() == name
            assert list(itertools.islice(numbers, len(values))) == values, (attributes, shapes)
        assert list(numbers) == []
