"""Check G: decode steps can be captured in CUDA graphs, and replays compute the same bits as eager steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.doctor.cases import CaseLog, CheckFailure, NotHere
from trt_kvcache.doctor.compare import Array, check_equal
from trt_kvcache.doctor.models import CheckedModel, wide_model
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.subjects import SUBJECTS, Subject, case_name
from trt_kvcache.errors import CaptureError, KVCacheError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import check as check_status, cuda_core_error
from trt_kvcache.session.session import InferenceSession

_REPLAYS = 4


def check(settings: Settings, log: CaseLog) -> None:
    """Capture a commit, then the decode step of every engine."""
    log.run("commit", lambda: _commit(settings.memory()))
    model = wide_model(settings)
    for dtype in model.dtypes:
        for subject in SUBJECTS:
            name = case_name(subject.variant, model, dtype)
            log.run(name, lambda s=subject, d=dtype: _decode(settings, s, model, d), variant=subject.variant)  # type: ignore[misc]


def _commit(memory: Memory) -> dict[str, Any]:
    """Capture a commit of lengths and replay it; host values are refused while capturing."""
    if memory.is_host:
        raise NotHere("dry run: host memory has no graphs")
    stream = memory.create_stream()
    lengths = Lengths(3, 100, memory=memory)
    lengths.reset([1, 2, 3], stream=stream)
    lengths.commit(1, stream=stream)
    builder = stream.create_graph_builder()
    builder.begin_building()
    lengths.commit(2, stream=builder)
    try:
        lengths.reset([0], stream=builder)
        refused = False
    except CaptureError:
        refused = True
    graph = builder.end_building().complete()
    if not refused:
        raise CheckFailure("reset with host values while the stream is captured: expected an error, got none")
    for _ in range(_REPLAYS):
        lengths.replayed(2)
        graph.launch(stream)
    memory.synchronize(stream)
    expected = np.array([1, 2, 3], np.int32) + 1 + 2 * _REPLAYS
    check_equal("lengths after the replays", lengths.tensor.numpy(), expected)
    check_equal("lengths on the host", np.array(lengths.host, np.int32), expected)
    return {}


def _decode(settings: Settings, subject: Subject, model: CheckedModel, dtype: str) -> dict[str, Any]:
    """Repeat a decode step, which the engine captures if it can; and capture an eager engine from outside."""
    with subject.open(settings, model, dtype) as session:
        repeated_steps(session, model)
    if subject.engine == "torch" or settings.dry_run:
        return {}  # its steps are captured by the engine alone
    with subject.open(settings, model, dtype, cuda_graphs=False) as session:
        return _captured_from_outside(session)


def repeated_steps(session: InferenceSession, model: CheckedModel) -> None:
    """Run the same decode step several times; its logits must not change by one bit. The first is eager."""
    prompts = [[5, 6, 7], [8] * 40]
    session.prefill(prompts)
    first = session.decode([9, 10]).copy()
    for number in range(_REPLAYS):
        for slot, prompt in enumerate(prompts):
            session.rewind(slot, len(prompt))
        check_equal(f"logits of repetition {number + 1}", session.decode([9, 10]), first)


def _captured_from_outside(session: InferenceSession) -> dict[str, Any]:
    """Capture an enqueue, and compare K and V of a replay with those of an eager step. A refusal is reported: steps then run eagerly."""
    memory, engine = session.cache.memory, session.engine
    session.prefill([[5, 6, 7], [8] * 40])
    session.decode([9, 10])
    stream = memory.create_stream()
    engine.enqueue(stream)  # the step after that one: its rows are written, and not committed
    memory.synchronize(stream)
    eager = _new_rows(session, stream)
    _new_rows(session, stream, value=7.0)  # a replay that does nothing would show
    try:
        builder = stream.create_graph_builder()
        try:
            builder.begin_building("thread_local")
            engine.enqueue(builder)
            builder.end_building()
            graph, nodes = builder.complete(), _num_nodes(builder.graph_definition)
        finally:
            builder.close()
    except (KVCacheError, RuntimeError, cuda_core_error()) as error:
        return {"capturable": False, "refusal": str(error)}
    graph.launch(stream)
    memory.synchronize(stream)
    for layer, (got, expected) in enumerate(zip(_new_rows(session, stream), eager, strict=True)):
        check_equal(f"K and V of layer {layer} after a replay", got, expected)
    return {"capturable": True, "nodes": nodes}


def _num_nodes(definition: Any) -> int:
    """Return the number of kernels, copies and fills of a step."""
    from cuda.bindings import driver

    status, _, count = driver.cuGraphGetNodes(definition.handle)
    check_status((status,))
    return int(count)


def _new_rows(session: InferenceSession, stream: Any, value: float | None = None) -> list[Array]:
    """Return the row after the live ones of each active slot, in K and V of each layer; with a value, overwrite them first."""
    cache, kv = session.cache, session.cache_config.kv
    assert kv is not None
    found = []
    for layer in range(kv.num_layers):
        for view in (cache.get_combined_kv_cache(layer),) if kv.layout is KVLayout.COMBINED else cache.get_separate_kv_cache(layer):
            rows = view.numpy()
            lengths = cache.host_kv_cache_lengths[: cache.active_batch_size]
            if value is not None:
                for slot, length in enumerate(lengths):
                    rows[slot, ..., length, :] = value
                cache.memory.upload(view, rows, stream=stream)
                cache.memory.synchronize(stream)
            found += [rows[slot, ..., length, :].copy() for slot, length in enumerate(lengths)]
    return found
