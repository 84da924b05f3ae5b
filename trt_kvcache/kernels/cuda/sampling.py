"""Sampling on the device: ``plugins/sampling/choose.cu``."""

from typing import Any

from trt_kvcache.kernels.cuda.launch import launch
from trt_kvcache.kernels.sampling_rows import SamplingRows
from trt_kvcache.kernels.sampling_workspace import MAX_BLOCKS_OF_ROW, SamplingWorkspace
from trt_kvcache.memory.tensor import DeviceTensor

_THREADS = 512

#: Tokens of a block at least: with fewer, the blocks of a row wait for each other longer than they work.
_MIN_TOKENS_OF_BLOCK = 2048


def choose_tokens(logits: DeviceTensor, rows: SamplingRows, tokens: DeviceTensor, workspace: SamplingWorkspace, stream: Any) -> None:
    batch, vocab_size = logits.shape
    groups = min(batch, workspace.groups)
    useful = -(-vocab_size // _MIN_TOKENS_OF_BLOCK)
    blocks = max(1, min(workspace.blocks // groups, useful, MAX_BLOCKS_OF_ROW))
    arguments = (
        *(logits.ptr, logits.strides[0], vocab_size, batch, rows.params.ptr),
        *(0 if rows.uses is None else rows.uses.ptr, 0 if rows.bias is None else rows.bias.ptr, workspace.edited.ptr),
        *(tokens.ptr, rows.results.ptr, workspace.meeting.ptr, blocks),
    )
    launch(
        logits.memory,
        "sampling_choose",
        "choose_tokens",
        (blocks * groups, 1, 1),
        arguments,
        stream,
        threads=_THREADS,
        cooperative=blocks > 1,
    )
