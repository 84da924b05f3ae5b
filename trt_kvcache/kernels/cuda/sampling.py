"""Sampling on the device: ``plugins/sampling/*.cu``."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.kernels.cuda.launch import THREADS_PER_BLOCK, launch, starts_early
from trt_kvcache.kernels.sampling_rows import SamplingRows
from trt_kvcache.kernels.sampling_workspace import LOGPROBS_BLOCKS, MAX_BLOCKS_OF_ROW, SamplingWorkspace
from trt_kvcache.memory.tensor import DeviceTensor

#: Threads of a block.
ROW_THREADS = 512

#: Tokens of a block at least: with fewer, the blocks of a row wait for each other longer than they work.
_MIN_TOKENS_OF_BLOCK = 2048


def choose_tokens(logits: DeviceTensor, rows: SamplingRows, tokens: DeviceTensor, workspace: SamplingWorkspace, stream: Any) -> None:
    batch, vocab_size = logits.shape
    groups = min(batch, workspace.groups)
    useful = -(-vocab_size // _MIN_TOKENS_OF_BLOCK)
    blocks = max(1, min(workspace.blocks // groups, useful, MAX_BLOCKS_OF_ROW))
    tokens_of_block = -(-vocab_size // (blocks * ROW_THREADS)) * ROW_THREADS
    arguments = (
        *(logits.ptr, logits.strides[0], vocab_size, batch, rows.params.ptr),
        *(0 if tensor is None else tensor.ptr for tensor in (rows.uses, rows.bias, workspace.edited)),
        *(tokens.ptr, rows.results.ptr, workspace.meeting.ptr, tokens_of_block),
    )
    launch(
        logits.memory,
        "sampling_choose",
        "choose_tokens",
        (blocks, groups, 1),
        arguments,
        stream,
        threads=ROW_THREADS,
        cooperative=blocks > 1,
        programmatic_dependent_launch=starts_early(logits.memory),
    )


def token_logprobs(logits: DeviceTensor, rows: SamplingRows, out: DeviceTensor, workspace: SamplingWorkspace, stream: Any) -> None:
    batch, vocab_size = logits.shape
    blocks = min(LOGPROBS_BLOCKS, -(-vocab_size // _MIN_TOKENS_OF_BLOCK))
    addresses = (rows.params.ptr, rows.results.ptr, out.ptr, (out.shape[1] - 1) // 2, workspace.found.ptr, workspace.found.shape[1])
    arguments = (logits.ptr, logits.strides[0], vocab_size, *addresses)
    launch(
        logits.memory,
        "sampling_logprobs",
        "token_logprobs",
        (blocks, batch, 1),
        arguments,
        stream,
        threads=ROW_THREADS,
        programmatic_dependent_launch=starts_early(logits.memory),
    )


def set_row(rows: SamplingRows, row: int, words: Sequence[int], stream: Any) -> None:
    launch(rows.params.memory, "sampling_rows", "set_row", (1, 1, 1), (rows.params.ptr, row, *words), stream)


def count_tokens(uses: DeviceTensor, tokens: DeviceTensor, in_prompt: bool, more: int, stream: Any) -> None:
    blocks = -(-len(tokens) // THREADS_PER_BLOCK)
    launch(uses.memory, "sampling_rows", "count_tokens", (blocks, 1, 1), (uses.ptr, tokens.ptr, len(tokens), int(in_prompt), more), stream)


def set_bias(bias: DeviceTensor, tokens: DeviceTensor, values: DeviceTensor, stream: Any) -> None:
    blocks = -(-len(tokens) // THREADS_PER_BLOCK)
    launch(bias.memory, "sampling_rows", "set_bias", (blocks, 1, 1), (bias.ptr, tokens.ptr, values.ptr, len(tokens)), stream)
