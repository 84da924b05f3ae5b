"""Snapshots of caches of every kind, what is given with them, and files that were changed afterwards."""

import hashlib
import json

import pytest

from tests.helpers.caches import Unchanged, cache_holding
from trt_kvcache import HostMemory
from trt_kvcache.errors import SnapshotError
from trt_kvcache.generation.sampler_state import SamplerState
from trt_kvcache.model import RopeConfig
from trt_kvcache.sequences.model_identity import ModelIdentity
from trt_kvcache.sequences.snapshot import load_snapshot, save_snapshot

MODEL = ModelIdentity(fingerprint="5f" * 32, rope=RopeConfig(kind="linear", theta=5e5, factor=4.0).to_dict())
SAMPLER = SamplerState(seed=(1 << 63) - 1, counter=12)
TOKENS = [7, 0, 2147483647, 3, 11]


def save(path, cache, slot=0, **given):
    return save_snapshot(path, cache, slot, **{"tokens": TOKENS, "model": MODEL, "stream": cache.memory.create_stream(), **given})


def load(path, cache, slot=1, **given):
    return load_snapshot(path, cache, slot, **{"model": MODEL, "stream": cache.memory.create_stream(), **given})


def refused(text, path, cache, **given):
    """A file is not loaded, for a reason that begins with a text, and the cache is as it was."""
    with Unchanged(cache), pytest.raises(SnapshotError) as caught:
        load(path, cache, **given)
    assert str(caught.value).startswith(text)


def host_cache(kind, *lengths, **changes):
    """A cache in host memory whose active slots hold these many tokens."""
    memory = HostMemory()
    return cache_holding(kind, memory, memory.create_stream(), *lengths, **changes)


def rewritten(content, place, value):
    """A file whose header has another value at a place, or none for a value ``del``, with a hash that is right.

    A place is a path of keys, into the header or, from ``description`` on, into the description that it holds.
    """
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["description"] = json.loads(header["__metadata__"]["description"])
    *path, last = place.split("/")
    inner = header
    for key in path:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[last] = value
    if value == "del":
        del inner[last]
    description = header.pop("description")
    if path[:1] == ["description"]:
        header["__metadata__"]["description"] = json.dumps(description)
    text = json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text + content[start:-32]
    return body + hashlib.sha256(body).digest()
