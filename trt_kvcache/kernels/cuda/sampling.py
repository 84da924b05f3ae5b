"""Sampling on the device: ``plugins/sampling/*.cu``."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.kernels.attention_tiles import share_nbytes
from trt_kvcache.kernels.cuda.launch import THREADS_PER_BLOCK, launch, starts_early
from trt_kvcache.kernels.sampling_rows import SamplingRows
from trt_kvcache.kernels.sampling_workspace import BLOCKS_PER_SM, LOGPROBS_BLOCKS, MAX_BLOCKS_OF_ROW, SamplingWorkspace
from trt_kvcache.memory.tensor import DeviceTensor

#: Threads of a block.
ROW_THREADS = 512

#: Tokens of a block at least: with fewer, the blocks of a row wait for each other longer than they work.
_MIN_TOKENS_OF_BLOCK = 2048

#: Shared memory of a block of ``choose_tokens`` without the logits that it keeps: bins, sums, and up to 1 KiB that lies between.
_BINS_NBYTES = 26 * 1024


def choose_tokens(logits: DeviceTensor, rows: SamplingRows, tokens: DeviceTensor, workspace: SamplingWorkspace, stream: Any) -> None:
    batch, vocab_size = logits.shape
    groups = min(batch, workspace.groups)
    useful = -(-vocab_size // _MIN_TOKENS_OF_BLOCK)
    blocks = max(1, min(workspace.blocks // groups, useful, MAX_BLOCKS_OF_ROW))
    tokens_of_block = -(-vocab_size // (blocks * ROW_THREADS)) * ROW_THREADS
    kept_nbytes = _kept_nbytes(logits.memory, tokens_of_block)
    arguments = (
        *(logits.ptr, logits.strides[0], vocab_size, batch, rows.params.ptr),
        *(0 if tensor is None else tensor.ptr for tensor in (rows.uses, rows.bias, workspace.edited)),
        *(tokens.ptr, rows.results.ptr, workspace.meeting.ptr, tokens_of_block),
    )
    launch(
        logits.memory,
        "sampling_choose",
        "choose_tokens" if kept_nbytes else "choose_tokens_read_again",
        (blocks, groups, 1),
        arguments,
        stream,
        threads=ROW_THREADS,
        shared_nbytes=kept_nbytes,
        cooperative=blocks > 1,
        programmatic_dependent_launch=starts_early(logits.memory),
    )


def _kept_nbytes(memory: Any, tokens_of_block: int) -> int:
    """Return the bytes of shared memory in which a block keeps its logits; 0 where it reads them again, as there is no room."""
    nbytes = tokens_of_block * 4
    return nbytes if nbytes <= share_nbytes(memory.arch, BLOCKS_PER_SM) - _BINS_NBYTES else 0


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
