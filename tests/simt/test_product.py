"""The package's kernels, launched by the package, under the sanitizers; and mistakes planted into them, which must be caught."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.kernels.attention import DECODE_CASES, FEW_CASES, GRID, PREFILL_CASES, over_quantized
from tests.simt import run
from tests.simt.standin import need_compiler
from trt_kvcache.kernels.attention_tiles import PREFILL_VARIANTS
from trt_kvcache.kernels.source_variants import variant_names
from trt_kvcache.kernels.sources import source_folder

need_compiler()
run.use_tiles()

ATTENTION = "test_attention_kernels"
_PREFILLS = (1 + len(PREFILL_VARIANTS)) * len(PREFILL_CASES)  # as it is planned, and in each variant
_QUANTIZED_PREFILLS = len(PREFILL_CASES)  # over a quantized cache, in one variant each


def run_tests(
    cubins: Path, sanitizer: str, *arguments: str, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run tests of tests/kernels on the emulated device with these kernels."""
    command = [*run.pytest_command(sanitizer), "-q", "-x", "-p", "no:cacheprovider", "-m", "device and not slow", *arguments]
    environment = {**run.environment(cubins, sanitizer), **variables}
    return subprocess.run(command, env=environment, cwd=run.REPOSITORY, capture_output=True, text=True)


def count_passed(result: subprocess.CompletedProcess[str]) -> int:
    """Return how many tests passed; all must."""
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    passed = re.search(r"^(\d+) passed", result.stdout, re.MULTILINE)
    assert passed is not None
    return int(passed[1])


# Many layers take ThreadSanitizer many seconds and show it nothing new. It has room for 8128 threads that a process ever had, so sampling,
# which has many, each of the layers with states, which have many kernels, and products of few rows have processes of their own.
OWN_PROCESS = (
    "sampling",
    "causal_conv1d",
    "mamba2",
    "delta_rule",
    "gated_norm",
    "test_linear",
    "test_packed_linear_kernels",
    "test_super_block_kernels",
    "test_expert_kernels",
    "test_packed_expert_kernels",
)
ELSEWHERE = " or ".join((ATTENTION, *OWN_PROCESS))
#: Copies, compaction and lengths: what every sequence passes through.
MOVES, MOVING_SOURCES = "test_kv_kernels or test_compaction or test_length_kernels", ("kv", "lengths", "states")
SLOW_LAYERS, SLOW_SAMPLING = "more_layers or many_layers or 28-1-1024", "the_definition or the_same or at_the_border"


@pytest.mark.long
@pytest.mark.parametrize(
    ("sanitizer", "chosen", "at_least"),
    [
        ("address", MOVES, 200),
        ("thread", MOVES, 200),
        pytest.param("address", f"not {ATTENTION}", 400, marks=pytest.mark.slow),
        pytest.param("thread", f"not ({ELSEWHERE} or {SLOW_LAYERS})", 400, marks=pytest.mark.slow),
        pytest.param("thread", f"sampling and not ({SLOW_SAMPLING})", 20, marks=pytest.mark.slow),
        *(pytest.param("thread", name, 10, marks=pytest.mark.slow) for name in OWN_PROCESS[1:]),
        pytest.param("thread", f"not ({ELSEWHERE})", 400, marks=pytest.mark.slow),
        pytest.param("thread", "sampling", 40, marks=pytest.mark.slow),
    ],
    ids=[
        "moves address",
        "moves thread",
        "address",
        "thread",
        *(f"thread {name}" for name in OWN_PROCESS),
        "thread all",
        "thread all sampling",
    ],
)
def test_nothing_is_found(sanitizer, chosen, at_least):
    only, variables = (MOVING_SOURCES, {"SIMT_KEEP_THREADS": "1"}) if chosen == MOVES else ((), {})
    cubins = run.build_cubins(sanitizer, (), only)
    assert count_passed(run_tests(cubins, sanitizer, "tests/kernels", "-k", chosen, variables=variables)) > at_least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "count"),
    [
        ("test_decode", len(DECODE_CASES)),
        ("test_few and not 12", len(FEW_CASES)),
        ("test_prefill", _PREFILLS),
        ("test_quantized_prefill_variants", _QUANTIZED_PREFILLS),
        ("test_quantized_decode", len(over_quantized(DECODE_CASES))),
        ("test_quantized_few", len(over_quantized(FEW_CASES))),
    ],
)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_nothing_is_found_in_attention(sanitizer, tests, count):
    assert count_passed(run_tests(run.build_cubins(sanitizer), sanitizer, f"tests/kernels/{ATTENTION}.py", "-k", tests)) == count


@pytest.mark.slow
def test_grid_of_attention():
    variants = sorted({"-".join(name.split("-")[1:3]) for name in variant_names("attention_decode")})
    result = run_tests(run.build_cubins("none", variants), "none", f"tests/kernels/{ATTENTION}.py", "-m", "device", "-k", "test_grid")
    assert count_passed(result) == len(GRID)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_tiles_of_smaller_gpus(arch):
    command = [sys.executable, str(run.HERE / "run.py"), "-q", "-p", "no:cacheprovider", "-m", "device and not slow"]
    command += [
        f"tests/kernels/{ATTENTION}.py",
        "-k",
        "test_decode or test_few or test_prefill or test_quantized_prefill_variants or test_quantized_decode or test_quantized_few",
    ]
    result = subprocess.run(command, env={**os.environ, "SIMT_TILES": arch}, cwd=run.REPOSITORY, capture_output=True, text=True)
    quantized = _QUANTIZED_PREFILLS + len(over_quantized(DECODE_CASES)) + len(over_quantized(FEW_CASES))
    assert count_passed(result) == len(DECODE_CASES) + 2 * len(FEW_CASES) + _PREFILLS + quantized


RACE, BYTES, MISALIGNED = "WARNING: ThreadSanitizer: data race", "bytes differ", "misaligned address"
OVERRUN = "ERROR: AddressSanitizer: heap-"  # an overflow, or a use after free where memory beside it was freed
DECODE, FEW_TESTS, PREFILL = (f"{ATTENTION}.py::{test}" for test in ("test_decode", "test_few", "test_prefill"))
FEW, FEW_KEYS, PACKED = "attention/few_new_tokens.cuh", "attention/few_new_keys.cuh", "attention/packed_vector.cuh"
DECODING, PIPELINE, SCHEDULE, REDUCE, SOFTMAX = (
    f"attention/{name}.cuh" for name in ("decode", "kv_pipeline", "schedule", "split_kv_reduce", "softmax_state")
)
BY_ROWS, BY_KEYS, DECODE_QUANTIZED = (f"attention/{name}.cuh" for name in ("decode_rows", "decode_keys", "decode_quantized"))
PREFILLING, PREFILL_TILES, PARTS = (f"attention/{name}.cuh" for name in ("prefill", "prefill_tiles", "prefill_schedule"))
PREFILL_RING, NEW_ROWS = (f"attention/prefill_{name}.cuh" for name in ("ring", "new_rows"))
PREFILL_SCORES, PREFILL_RESULTS = (f"attention/prefill_{name}.cuh" for name in ("scores", "results"))
TREE, PREFILL_SOURCE = "attention/token_tree.cuh", "attention/prefill.cu"
TREE_TESTS = "test_attention_of_trees.py"
TREES, QUANTIZED_TREES = f"{TREE_TESTS}::test_trees", f"{TREE_TESTS}::test_trees_over_a_quantized_cache"
LATER_BITS = f"{TREE_TESTS}::test_bits_of_later_tokens_and_of_the_token_itself_have_no_effect"
PATH_TESTS = "test_token_path_kernels.py"
DRAFTS, DRAFT_TESTS = "drafts.cu", "test_draft_kernels.py"
SINKS = "attention/sinks.cuh"
STORED_RING, PARAMS, APPENDING = (f"attention/{name}.cuh" for name in ("prefill_stored_ring", "prefill_params", "append_quantized"))
PREFILL_OVER_QUANTIZED, DECODE_OVER_QUANTIZED, FEW_OVER_QUANTIZED = (
    f"{ATTENTION}.py::test_quantized_{test}" for test in ("prefill", "decode", "few")
)
SAMPLING, CHOOSE = "test_sampling_kernels.py", "sampling/choose.cu"
COMPACT, COUNT, ONE_MORE = "test_compaction.py", "(sizeof(Vector)), stride", "(sizeof(Vector)) + 1, stride"

CONV, MAMBA2, DELTA = (f"recurrent/{name}.cu" for name in ("causal_conv1d", "mamba2", "delta_rule"))
CHUNKS, CHUNK_PIPELINE = "recurrent/mamba2_chunks.cuh", "recurrent/chunks.cuh"
DELTA_CHUNKS, DELTA_MATRICES, DELTA_STEP, DELTA_UPDATE = (
    f"recurrent/delta_rule_{name}.cuh" for name in ("chunks", "matrices", "step", "update")
)
LINEAR_TESTS, DECODER_LAYER_TESTS = "test_linear_kernels.py", "test_decoder_layer_kernels.py"
COLUMN_TESTS = "test_column_order_kernels.py"
PACKED_TESTS, PACKED_LINEAR, PACKED_VALUES = "test_packed_linear_kernels.py", "linear/packed_stream.cuh", "linear/packed_values.cuh"
NVFP4_TESTS = f"{PACKED_TESTS}::test_every_value_of_nvfp4_bit_for_bit"
SUPER_BLOCK_TESTS, SUPER_BLOCKS = "test_super_block_kernels.py", "linear/super_block_values.cuh"
EXPERT_TESTS, EXPERTS, DENSE_EXPERTS = "test_expert_kernels.py", "linear/experts.cuh", "linear/dense_expert_weights.cuh"
ROUTER_TESTS, ROUTER = "test_router_kernels.py", "router.cu"
PACKED_EXPERT_TESTS, PACKED_EXPERTS = "test_packed_expert_kernels.py", "linear/packed_expert_weights.cuh"
CONV_TESTS, MAMBA2_TESTS, DELTA_TESTS = "test_causal_conv1d_kernels.py", "test_mamba2_kernels.py", "test_delta_rule_kernels.py"

#: File, what is replaced by what (each time that it is there), sanitizer, tests, and what is said.
MISTAKES = {
    "moves are read before they are there": ("compaction.cuh", "__syncthreads();", "", "thread", f"{COMPACT}::test_every_byte", RACE),
    "blocks share columns": (
        "vector_copy.cuh",
        "static_cast<long long>(blockIdx.x) * kInFlight * blockDim.x + threadIdx.x",
        "threadIdx.x",
        "thread",
        f"{COMPACT}::test_long_slots_in_several_blocks",
        RACE,
    ),
    "lengths are written while others read": ("lengths.cu", "    __syncthreads();\n    if", "    if", "thread", COMPACT, RACE),
    "lengths by a mapping are too": ("lengths.cu", "        __syncthreads();\n", "", "thread", COMPACT, RACE),
    "one vector too many": ("vector_copy.cuh", COUNT, ONE_MORE, "address", "test_cuda.py", OVERRUN),
    "one vector too many, inside": ("vector_copy.cuh", COUNT, ONE_MORE, "none", "test_kv_kernels.py", BYTES),
    "an address that is not looked at": ("states.cu", "address_of(data) | ", "", "address", "test_state_row_kernels.py", MISALIGNED),
    "only one side is looked at": ("states.cu", "| source.alignment()", "", "address", "test_state_row_kernels.py", MISALIGNED),
    "nor where it is saved": ("states.cu", "| saved,", ",", "address", "test_state_row_kernels.py", MISALIGNED),
    "columns of short slots only": ("compaction.cuh", "extent(moves.max_tokens)", "extent(1)", "none", COMPACT, BYTES),
    "a register for all columns": ("compaction.cuh", "held[i] = vectors[i]", "held[0] = vectors[i]", "none", COMPACT, BYTES),
    "stale tokens move too": ("compaction.cuh", "extent(move.tokens), vectors", "end, vectors", "none", COMPACT, BYTES),
    "one layout's stride": ("kv.cu", "slot * layer.slot_stride", "slot * 2 * layer.kv_stride", "none", "test_kv_kernels.py", BYTES),
    "the new token is read before all have written it": (
        DECODING,
        "    __syncthreads();\n}\n\n// Halves",
        "}\n\n// Halves",
        "thread",
        DECODE,
        RACE,
    ),
    "rows behind the new token": (PIPELINE, "at.position - at.first_token(warp)", "kTileTokens", "none", DECODE, "isnan"),
    "a decode window that is one token too wide": (SCHEDULE, "(params.window - 1)", "params.window", "none", DECODE, "assert"),
    "a prefill window that is one token too wide": (PREFILL_SCORES, "distance >= span", "distance > span", "none", PREFILL, "error <="),
    "sums of columns that are read before they are there": (
        PREFILL_SCORES,
        "        barrier_of_threads(barrier, 64);\n        if (column_warp == 0)",
        "        if (column_warp == 0)",
        "thread",
        f"{PREFILL}[planned-heads of 512]",
        RACE,
    ),
    "sums of columns that the other warp does not get": (
        PREFILL_SCORES,
        "own[0] = both.x, own[1] = both.y, own[2] = both.z, own[3] = both.w;",
        "",
        "none",
        PREFILL,
        "error <=",
    ),
    "keys of the first columns in both halves": (PREFILLING, "first_chunk + lane / 8 % 2", "lane / 8 % 2", "none", PREFILL, "error <="),
    "columns of both warps in one place": (
        PREFILL_RESULTS,
        "column_warp() * kOwnFragments, fragments",
        "0, fragments",
        "none",
        PREFILL,
        "LAUNCH_FAILED",
    ),
    "key warps that take columns for keys": (
        PREFILLING,
        "kColumnWarps > 1 ? warp % kKeyWarps : warp",
        "warp",
        "none",
        PREFILL,
        "LAUNCH_FAILED",
    ),
    "sinks of other heads": (DECODING, "at.kv_head * params.group_size + row;", "row;", "none", DECODE, "error <="),
    "sinks of other tokens": (DECODING, "head -= token * params.group_size;", "", "none", FEW_TESTS, "assert"),
    "rows without their sinks": (SINKS, "if (logits == nullptr) return sum;", "return sum;", "none", PREFILL, "error <="),
    "keys behind the last one": (PREFILL_TILES, "key < live", "true", "none", PREFILL, "isnan"),
    "new tokens that no block appends": (NEW_ROWS, "if (rows.first_row == 0) {", "if (false) {", "none", PREFILL, "array_equal"),
    "new keys without RoPE": (NEW_ROWS, "key.rotate(pairs, pair);", "", "none", PREFILL, "assert"),
    "chunks beside those that are rotated are left out": (NEW_ROWS, "pair < half ? pair : pair + half", "pair", "none", PREFILL, "assert"),
    "queries that other warps have yet to store": (
        PREFILLING,
        "shared_memory_fence();\n            __syncthreads();\n        }\n        ring",
        "}\n        ring",
        "thread",
        PREFILL,
        RACE,
    ),
    "the same tiles in both rings": (PREFILL_RING, "work.after(work.start(), number)", "work.start()", "none", PREFILL, "error <="),
    "parts that no block has": (PARTS, "longest + blocks.alike - 1, blocks", "longest, blocks", "none", PREFILL, "waits for"),
    "parts of one slot that no block has": (
        PARTS,
        "num_tiles + blocks.alike - 1, blocks",
        "num_tiles, blocks",
        "none",
        PREFILL,
        "waits for",
    ),
    "row blocks of different sizes share places": (
        REDUCE,
        "block) * place_fragments",
        "block) * num_fragments",
        "none",
        PREFILL,
        "waits for",
    ),
    "a part that another one has, too": (
        PARTS,
        "work.end = min(work.begin + tiles_per_split",
        "work.end = min(work.begin + 1 + tiles_per_split",
        "none",
        PREFILL,
        "assert",
    ),
    "a partial result is left out": (REDUCE, "vectors, others, factor", "vectors, others - 1, factor", "none", DECODE, "assert"),
    "fragments that there is no room for are left out": (REDUCE, "first = last)", "first = end)", "none", DECODE, "assert"),
    "a block waits for itself": (REDUCE, "(other >= rank)", "0", "none", DECODE, "waits for"),
    "all blocks merge the same fragments": (REDUCE, "? rank * fragments_per_block : 0", "? 0 : 0", "none", DECODE, "waits for"),
    "a workspace that is not left as it was": (REDUCE, "reset_vector(addresses[i]);", "", "none", DECODE, "assert"),
    "partial results are merged before they are there": (
        REDUCE,
        "others);\n            __syncthreads();",
        "others);",
        "thread",
        DECODE,
        RACE,
    ),
    "copies that are not waited for": (
        PIPELINE,
        "kGroupsYoungerThanKeys = kPrefilledGroups - 2",
        "kGroupsYoungerThanKeys = kPrefilledGroups + 3",
        "none",
        DECODE,
        "isnan",
    ),
    "values are waited for as keys are": (
        PIPELINE,
        "kGroupsYoungerThanValues = kPrefilledGroups - 3 + 2",
        "kGroupsYoungerThanValues = kPrefilledGroups - 2 + 2",
        "none",
        DECODE,
        "isnan",
    ),
    "a new token that is left out": (DECODING, "if (warp == kWarps - 1 &&", "if (false &&", "none", DECODE, "assert"),
    "speculative keys that are the wrong ones": (DECODING, "== 0 && work.is_even_split;", "== 0;", "none", DECODE, "assert"),
    "speculative keys behind the cache": (
        PIPELINE,
        "start.is_certain ? params.max_sequence_length - (start.tile + warp) * kTileTokens",
        "start.is_certain ? kTileTokens",
        "address",
        DECODE,
        OVERRUN,
    ),
    "no causal mask among new tokens": (FEW, "distance < 0 || ", "", "none", FEW_TESTS, "assert"),
    "the window of the first new token for all rows": (
        BY_ROWS,
        "first_keys[i] = at.first_key_of(params, divide_small(16 * m + 8 * i + lane / 4, params.group_size));",
        "first_keys[i] = at.first_key;",
        "none",
        FEW_TESTS,
        "assert",
    ),
    "a block that appends new tokens which it has not loaded": (FEW, "    if (!has_last_tile) return;\n", "", "none", FEW_TESTS, "assert"),
    "values of tokens that are not new": (FEW, "min(lane % 8, at.count - 1)", "lane % 8", "none", FEW_TESTS, "assert"),
    "rows behind the new ones that are not zeroed": (
        DECODING,
        "if (kMaxNewTokens > 1 && has_last_tile) store_zeros",
        "if (false) store_zeros",
        "none",
        FEW_TESTS,
        "assert",
    ),
    "scales of tokens that are not live": (
        PIPELINE,
        "scales + token, token < tokens)",
        "scales + token, true)",
        "none",
        DECODE_OVER_QUANTIZED,
        "assert",
    ),
    "scales of new tokens that are none": (
        FEW,
        "scales[min(token + 1, at.count - 1)]",
        "scales[token + 1]",
        "none",
        FEW_OVER_QUANTIZED,
        "assert",
    ),
    "an output that stays relative to a smaller scale": (
        DECODE_QUANTIZED,
        "value * inverse_of(power);",
        "1;",
        "none",
        DECODE_OVER_QUANTIZED,
        "error <=",
    ),
    "a key that is quantized before its RoPE": (
        DECODING,
        "kv ? key[kRowWords + word] : apply_rope(key, word, angles)",
        "key[kv * kRowWords + word]",
        "none",
        DECODE_OVER_QUANTIZED,
        "assert",
    ),
    "a decode mask that is one key off": (BY_KEYS, "x / 2 * 8 + lane / 4", "x / 2 * 8 + lane % 4", "none", DECODE, "assert"),
    "a maximum that only some lanes know": (
        BY_KEYS,
        "column_max(highest[e])",
        "highest[e]",
        "none",
        DECODE,
        "assert",
    ),
    "probabilities that are not transposed": (
        BY_KEYS,
        "transpose_matrix(pack(Element{}, {p[2], p[3]}))",
        "pack(Element{}, {p[2], p[3]})",
        "none",
        DECODE,
        "assert",
    ),
    "the new token counted by every lane": (BY_KEYS, "lane / 4 ? 0.0f : 1.0f", "1.0f", "none", DECODE, "assert"),
    "rows of a fragment in each other's place": (BY_KEYS, "(vector ^ row / 4 * 2)", "vector", "none", DECODE, "assert"),
    "scales of other keys": (
        BY_KEYS,
        "token_scales.of(8 * x + place) : scales.key",
        "token_scales.of(8 * x) : scales.key",
        "none",
        DECODE_OVER_QUANTIZED,
        "assert",
    ),
    "scores that begin with nothing beside quantized values that are too large": (
        BY_KEYS,
        "= queries.offset[x % 4]",
        "= 0",
        "none",
        DECODE_OVER_QUANTIZED,
        "assert",
    ),
    "the same with several new tokens": (
        DECODE_QUANTIZED,
        "= queries.offset[m][x % 4]",
        "= 0",
        "none",
        FEW_OVER_QUANTIZED,
        "assert",
    ),
    "few rows that see later new tokens": (FEW_KEYS, "distance < 0 || ", "", "none", FEW_TESTS, "assert"),
    "few rows that see 16 new tokens": (FEW_KEYS, "scores[0][e + 2] = kMaskedScore;", "", "none", FEW_TESTS, "assert"),
    "few rows in the window of the first": (BY_KEYS, "key < first_keys[x % 2]", "key < at.first_key", "none", FEW_TESTS, "assert"),
    "few rows whose probabilities are not transposed": (FEW_KEYS, "= transpose_matrix(", "= (", "none", FEW_TESTS, "assert"),
    "new values times the scale of the first": (
        FEW_KEYS,
        "return scale_of(1, token);",
        "return scale_of(1, 0);",
        "none",
        FEW_OVER_QUANTIZED,
        "assert",
    ),
    "columns of quantized values in the order of elements": (
        BY_KEYS,
        "kQuantized ? value : float4{",
        "false ? value : float4{",
        "none",
        DECODE_OVER_QUANTIZED,
        "assert",
    ),
    "rows that no longer follow their maxima": (
        BY_ROWS,
        "if (rescales) state[m].rescale",
        "if (false) state[m].rescale",
        "none",
        FEW_TESTS,
        "assert",
    ),
    "a head buffer that is filled while it is read": (
        DECODING,
        "__syncthreads();  // the buffer is filled again in this step",
        "",
        "thread",
        FEW_TESTS,
        RACE,
    ),
    "fragments of a block in the place of another one's": (
        REDUCE,
        "blockIdx.x) * place_fragments * kFragmentVectors;",
        "blockIdx.x) * num_fragments * kFragmentVectors;",
        "none",
        FEW_TESTS,
        "assert",
    ),
    "a unit that is too small": (PACKED, "(1 / kPackedSteps)", "(0.5f / kPackedSteps)", "none", FEW_TESTS, "error <="),
    "the unit of another part": (REDUCE, "unit = weight * total[i].z", "unit = weight * total[0].z", "none", FEW_TESTS, "error <="),
    "lanes that do not join what they merged": (
        REDUCE,
        "if (shares > 1) state.join_lanes",
        "if (shares > 8) state.join_lanes",
        "none",
        f"{ATTENTION}.py::test_parts_that_several_lanes_put_together",
        "error <=",
    ),
    "rows that are packed with the unit of one lane": (
        PREFILL_RESULTS,
        "largest = quad_max_or_nan(largest);",
        "",
        "none",
        PREFILL,
        "error <=",
    ),
    "tiles that no block has": (SCHEDULE, "max(split - (splits - remainder), 0)", "0", "none", DECODE, "assert"),
    "a slot that is full": (
        SCHEDULE,
        "length < params.max_sequence_length",
        "length <= params.max_sequence_length",
        "none",
        DECODE,
        "assert",
    ),
    "a tile that warps still read": (
        PREFILLING,
        "ring.wait();  // for this tile\n                ring.barrier();",
        "ring.wait();",
        "thread",
        PREFILL,
        RACE,
    ),
    "a tile that warpgroups still read": (
        PREFILLING,
        "shared_memory_fence();\n                ring.barrier();",
        "shared_memory_fence();",
        "thread",
        PREFILL,
        RACE,
    ),
    "products that are not waited for": (PREFILLING, "                scores.wait();\n", "", "none", PREFILL, "assert"),
    "the keys of the other warpgroup": (
        PREFILLING,
        "(kColumnWarps > 1 ? warp % kKeyWarps : warp) * kWarpKeys : 0",
        "0 : 0",
        "none",
        PREFILL_OVER_QUANTIZED,
        "error <=",
    ),
    "a tree whose mask is one bit off": (TREE, "path >> min(key - past, 63)", "path >> min(key - past + 1, 63)", "none", TREES, "assert"),
    "only the first 32 bits of a mask": (TREE, "__popcll(from_key) - 1 : -1", "__popc(from_key) - 1 : -1", "none", TREES, "error <="),
    "a mask of 32 bits": (TREE, "own = 1ull << token", "own = 1u << token % 32", "none", TREES, "assert"),
    "a window of rows in a tree": (TREE, "? __popcll(from_key) - 1 : -1", "? position - key : -1", "none", TREES, "error <="),
    "later tokens in a path": (TREE, "& (own - 1)) | own", "& ~0ull) | own", "none", LATER_BITS, "assert"),
    "the tree of the first slot": (TREE, "ancestors[slot * width + token]", "ancestors[token]", "none", TREES, "assert"),
    "queries of a tree at positions of their rows": (
        NEW_ROWS,
        "rows.position_of(params, token)",
        "rows.past + token",
        "none",
        TREES,
        "error <=",
    ),
    "queries of a tree, by words, at positions of their rows": (
        NEW_ROWS,
        "rows.position_of_row(params, row)",
        "rows.past + rows.token_of(params, row)",
        "none",
        TREES,
        "error <=",
    ),
    "keys of a tree at positions of their rows": (NEW_ROWS, "rows.position_of(params, row)", "rows.past + row", "none", TREES, "assert"),
    "quantized keys of a tree at positions of their rows": (
        PREFILL_SOURCE,
        "cache_row, RopeAngles(cos_sin, rotary_dim, tree.position(past, slot, width, token))",
        "cache_row, RopeAngles(cos_sin, rotary_dim, cache_row)",
        "none",
        QUANTIZED_TREES,
        "assert",
    ),
    "appended keys of a tree at positions of their rows": (
        PREFILL_SOURCE,
        "RopeAngles(cos_sin, rotary, tree.position(past, slot, width, token))",
        "RopeAngles(cos_sin, rotary, cache_row)",
        "none",
        TREES,
        "assert",
    ),
    "a tree whose tiles begin with the window of its row": (PARTS, "(kTree ? 0 : first_token)", "first_token", "none", TREES, "error <="),
    "tiles of a tree without a mask": (PREFILLING, "kTree ? rows.past - 1 :", "false ? 0 :", "none", TREES, "error <="),
    "a window of the last row of a lane": (
        PREFILLING,
        "i < 2 * kRowTiles && kTree",
        "i < 2 * kRowTiles && false",
        "none",
        TREES,
        "error <=",
    ),
    "a path that moves one token further": (
        "kv.cu",
        "(first + i) * token_nbytes",
        "(first + i + 1) * token_nbytes",
        "none",
        PATH_TESTS,
        BYTES,
    ),
    "a path past the last row": ("kv.cu", "&& token < room", "", "none", PATH_TESTS, BYTES),
    "a path that moves up": ("kv.cu", "first + i < token &&", "0 <= token &&", "none", PATH_TESTS, BYTES),
    "the path of the first slot": ("kv.cu", "paths + slot * kMaxTreeTokens", "paths", "none", PATH_TESTS, BYTES),
    "scales that move in rows of four": ("kv.cu", "row_nbytes / tokens_per_row, vector", "row_nbytes, vector", "none", PATH_TESTS, BYTES),
    "a path of a slot without a start": ("kv.cu", "|| start < 0", "", "address", PATH_TESTS, "e"),
    "drafts after an error": (DRAFTS, "draft[length * draft_slots].error == kNoError", "true", "none", DRAFT_TESTS, "test_place_drafts"),
    "drafts of the slot of the same number": (DRAFTS, "drafts + sources[slot]", "drafts + slot", "none", DRAFT_TESTS, "test_place_drafts"),
    "rows of one random number": (DRAFTS, "later(params[slot], place)", "later(params[slot], 0)", "none", DRAFT_TESTS, "test_place_drafts"),
    "rows after a draft that choose too": (DRAFTS, "&& place <= length;", ";", "none", DRAFT_TESTS, "test_place_drafts"),
    "drafts longer than they are": (DRAFTS, "equal < lengths[slot]", "equal + 1 < width", "none", DRAFT_TESTS, "test_accept_drafts"),
    "an error that is pending": (
        DRAFTS,
        "max(chosen[first + equal].token, 0)",
        "chosen[first + equal].token",
        "none",
        DRAFT_TESTS,
        "test_accept_drafts",
    ),
    "tokens that equal themselves": (DRAFTS, "ids[first + equal + 1]", "ids[first + equal]", "none", DRAFT_TESTS, "test_accept_drafts"),
    "random numbers of accepted tokens again": (
        DRAFTS,
        "later(params[slot], equal + 1)",
        "later(params[slot], equal)",
        "none",
        DRAFT_TESTS,
        "test_accept_drafts",
    ),
    "idle slots that go on": (DRAFTS, "asked[slot] < 0", "asked[slot] < -1", "none", DRAFT_TESTS, "test_accept_drafts"),
    "a drafter that begins after its rows": (
        DRAFTS,
        "starts[target] - count + offsets[slot]",
        "starts[target] + offsets[slot]",
        "none",
        DRAFT_TESTS,
        "test_feed_drafter",
    ),
    "a drafter fed with tokens that do not count": (
        DRAFTS,
        "place < count ? max(chosen",
        "place < width ? max(chosen",
        "none",
        DRAFT_TESTS,
        "test_feed_drafter",
    ),
    "a drafter with rows of another width": (
        DRAFTS,
        "chosen[target * width + place]",
        "chosen[target * draft_width + place]",
        "none",
        DRAFT_TESTS,
        "test_feed_drafter",
    ),
    "slots of the drafter without a draft that choose": (
        DRAFTS,
        "rows[slot] = target < 0 ? RowParams{} : params[target];",
        "rows[slot] = params[target < 0 ? 0 : target];",
        "none",
        DRAFT_TESTS,
        "test_feed_drafter",
    ),
    "hidden states in the place of their slot": (
        DRAFTS,
        "(places ? places[slot] : slot) * to_stride",
        "slot * to_stride",
        "none",
        DRAFT_TESTS,
        "test_copy_slot_rows",
    ),
    "hidden states of the first token": (
        DRAFTS,
        "(from_offsets ? from_offsets[slot] : 0)",
        "0",
        "none",
        DRAFT_TESTS,
        "test_copy_slot_rows",
    ),
    "a half that is not the other's": (PREFILL_RESULTS, "b = values[(!is_second", "b = values[(is_second", "none", PREFILL, "error <="),
    "halves before they are there": (
        PREFILL_RESULTS,
        "~kept)};\n        __syncthreads();",
        "~kept)};",
        "thread",
        PREFILL,
        RACE,
    ),
    "quantized values that are not waited for": (
        STORED_RING,
        "cp_async_wait_group<kQuantizedStages - 1>();",
        "",
        "none",
        PREFILL_OVER_QUANTIZED,
        "assert",
    ),
    "quantized values behind the last token": (STORED_RING, "at.key < live", "true", "none", PREFILL_OVER_QUANTIZED, "isnan"),
    "scales behind the last token": (STORED_RING, "key < work.rows.keys_end ? ", "true ? ", "none", PREFILL_OVER_QUANTIZED, "isnan"),
    "scales of keys for values": (
        STORED_RING,
        "work.rows.slot, kv, work",
        "work.rows.slot, 0, work",
        "none",
        PREFILL_OVER_QUANTIZED,
        "error <=",
    ),
    "values that are as far ahead as keys": (
        STORED_RING,
        "load_rows(stage, 1, tile - kKeysAhead)",
        "load_rows(stage, 1, tile)",
        "none",
        PREFILL_OVER_QUANTIZED,
        "assert",
    ),
    "a tile that is converted while it is read": (
        PREFILLING,
        "shared_memory_fence();\n                __syncthreads();",
        "shared_memory_fence();",
        "thread",
        PREFILL_OVER_QUANTIZED,
        RACE,
    ),
    "scores that are not waited for": (
        PREFILLING,
        "scores.template wait<1>()",
        "scores.template wait<2>()",
        "none",
        PREFILL_OVER_QUANTIZED,
        "assert",
    ),
    "an output that stays relative to an older maximum": (
        PREFILLING,
        "if (is_far) output.scale(row_scales);",
        "",
        "none",
        f"{ATTENTION}.py::test_output_that_is_scaled_after_the_next_scores",
        "error <=",
    ),
    "one scale of a head that is left out": (
        PARAMS,
        "value_scale = *scales.of(slot, 1, kv_head, 0);",
        "",
        "none",
        PREFILL_OVER_QUANTIZED,
        "error <=",
    ),
    "a scale that is not written": (APPENDING, "if (lane == 0) *scale = factor;", "", "none", PREFILL_OVER_QUANTIZED, "isnan"),
    "a scale of what one lane has": (
        APPENDING,
        "int distance = 16; distance > 0",
        "int distance = 0; distance > 0",
        "none",
        PREFILL_OVER_QUANTIZED,
        "assert",
    ),
    "a sum relative to an older maximum": (SOFTMAX, "sums[i] *= scale;", "", "none", PREFILL, "error <="),
    "random numbers that are one block off": ("sampling/philox.cuh", "index / 4 + 1", "index / 4", "none", SAMPLING, "assert"),
    "ties that go to the smallest logits": (
        "sampling/weights.cuh",
        "(~order_of(logit))",
        "(order_of(logit))",
        "none",
        SAMPLING,
        "assert",
    ),
    "a border that is one token too far": (
        CHOOSE,
        "Number target = end_of_top_p(all);",
        "Number target = end_of_top_p(all) + 1;",
        "none",
        SAMPLING,
        "assert",
    ),
    "a weight that is not left as it was": (CHOOSE, "if (first == 0) row.likely_weight = 0;", "", "none", SAMPLING, "assert"),
    "min_p that is left out of top_p": (
        CHOOSE,
        "params.min_weight ? min(of_top_p, row.likely_weight) : of_top_p",
        "of_top_p",
        "none",
        SAMPLING,
        "assert",
    ),
    "a barrier that only one thread waits at": (
        "sampling/row_barrier.cuh",
        "poll_again();\n        }\n        __syncthreads();",
        "poll_again();\n        }",
        "thread",
        f"{SAMPLING}::test_sorted_logits",
        RACE,
    ),
    "counts that are handed in before all are counted": (
        "sampling/histogram.cuh",
        "kAtOnce = 4;\n    __syncthreads();",
        "kAtOnce = 4;",
        "none",
        f"{SAMPLING}::test_sorted_logits",
        "assert",
    ),
    "counts of classes that are handed in before all are counted": (
        "sampling/histogram.cuh",
        "num_bins / kBinsOfWarp;\n    __syncthreads();",
        "num_bins / kBinsOfWarp;",
        "thread",
        f"{SAMPLING}::test_sorted_logits",
        RACE,
    ),
    "counts that are cleared before all lanes have read them": (
        "sampling/histogram.cuh",
        "        __syncwarp();\n        four",
        "        four",
        "thread",
        f"{SAMPLING}::test_sorted_logits",
        RACE,
    ),
    "a bin that is read before it is found": (
        "sampling/histogram.cuh",
        "__syncthreads();\n        return found_bins()[place];",
        "return found_bins()[place];",
        "thread",
        f"{SAMPLING}::test_sorted_logits",
        RACE,
    ),
    "a token that is always of the first 32": (CHOOSE, "token + 32 * i : -1", "token : -1", "none", SAMPLING, "assert"),
    "classes that are counted in each other's place": (
        "sampling/histogram.cuh",
        "(first + bin) * 4",
        "(first + (bin ^ 1)) * 4",
        "none",
        SAMPLING,
        "assert",
    ),
    "a largest logit whose token is another one's": ("sampling/block_scan.cuh", "high == highest ?", "true ?", "none", SAMPLING, "assert"),
    "an exchange that begins where the last launch began": (
        "sampling/row_exchange.cuh",
        "row.exchanges = done;",
        "row.exchanges = done_before;",
        "none",
        SAMPLING,
        "assert",
    ),
    "a largest logit before all warps have heard of theirs": (
        "sampling/row_exchange.cuh",
        "__syncthreads();\n        number = of_warps[0];",
        "number = of_warps[0];",
        "thread",
        f"{SAMPLING}::test_sorted_logits",
        RACE,
    ),
    "a block that comes before itself": (
        "sampling/row_exchange.cuh",
        "< rank ? number",
        "<= rank ? number",
        "none",
        SAMPLING,
        "assert",
    ),
    "weights whose sum over a warp has no room": ("sampling/block_scan.cuh", "kBits = 27;", "kBits = 31;", "none", SAMPLING, "assert"),
    "bad logits that are put down to bias and penalties": (CHOOSE, "if (!with_edits) break;", "break;", "none", SAMPLING, "assert"),
    "ties that end a digit too early": (CHOOSE, "if (members == bin.value)", "if (digit == 3)", "none", SAMPLING, "assert"),
    "a carry of another power": (
        "sampling/histogram.cuh",
        "<< 32 << unit_shift(classes[i])",
        "<< 32",
        "none",
        f"{SAMPLING}::test_weights_that_32_bits_have_no_room_for",
        "assert",
    ),
    "tokens that are not counted where their sum is 0": (
        "sampling/histogram.cuh",
        "            if (loaded[i]) add",
        "            if (loaded[i] << 30) add",
        "none",
        f"{SAMPLING}::test_weights_that_32_bits_have_no_room_for",
        "assert",
    ),
    "a bin that was guessed in place of the right one": (
        CHOOSE,
        "if (coarse.bin != end && coarse.bin != most)",
        "if (false)",
        "none",
        SAMPLING,
        "assert",
    ),
    "a weight of top_k that is only guessed": (
        CHOOSE,
        "all = keep_top_k(cut);",
        "keep_top_k(cut), all = cut.weight_about;",
        "none",
        SAMPLING,
        "assert",
    ),
    "padding enters the conv state": (CONV, "count - kWidth + column", "count + 1 - kWidth + column", "none", CONV_TESTS, "assert"),
    "a tile without the inputs before it": (CONV, "if (first < count) {", "if (count < 0) {", "none", CONV_TESTS, "assert"),
    "channels behind the last one": (CONV, "if (channel >= params.channels) return;", "", "address", CONV_TESTS, OVERRUN),
    "a decode step that takes padding in": (CONV, "count_new(params.new_lengths, slot, 1) > 0", "true", "none", CONV_TESTS, "finite"),
    "a conv state that is kept as floats": (CONV, "if (params.past == params.present) return;", "return;", "none", CONV_TESTS, "assert"),
    "padding moves the state on": (
        MAMBA2,
        "count_new(params.new_lengths, owned.slot, params.width)",
        "static_cast<int>(params.width)",
        "none",
        MAMBA2_TESTS,
        "not finite",
    ),
    "groups of heads that do not follow each other": (
        MAMBA2,
        "static_cast<int>(head) * static_cast<int>(params.groups) / static_cast<int>(params.heads)",
        "head % params.groups",
        "none",
        MAMBA2_TESTS,
        "assert",
    ),
    "rows of the next head": (MAMBA2, "if (owned.row(i) < params.head_dim) rows", "rows", "address", MAMBA2_TESTS, OVERRUN),
    "tokens before they are there": (
        MAMBA2,
        "cp_async_wait_group<1>();\n        __syncthreads();",
        "cp_async_wait_group<1>();",
        "thread",
        MAMBA2_TESTS,
        RACE,
    ),
    "a tile that is not waited for": (MAMBA2, "cp_async_wait_group<1>();", "", "none", MAMBA2_TESTS, "ended without waiting"),
    "outputs before they are there": (
        MAMBA2,
        "        __syncthreads();\n        for (int i = thread;",
        "        for (int i = thread;",
        "thread",
        MAMBA2_TESTS,
        RACE,
    ),
    "a chunk in which a token does not see itself": (
        CHUNKS,
        "of_chunk <= tokens[i] ? first",
        "of_chunk < tokens[i] ? first",
        "none",
        MAMBA2_TESTS,
        "assert",
    ),
    "a state as precise as its parts": (CHUNKS, "low[i] = parts.low;", "low[i] = 0;", "none", MAMBA2_TESTS, "assert"),
    "padding in a chunk": (
        CHUNKS,
        "const bool is_new = first + token < count;",
        "const bool is_new = true;",
        "none",
        MAMBA2_TESTS,
        "finite",
    ),
    "steps before all lanes have made theirs": (
        CHUNKS,
        "sums[i];\n        __syncwarp();",
        "sums[i];",
        "thread",
        MAMBA2_TESTS,
        RACE,
    ),
    "a chunk that is not waited for": (CHUNK_PIPELINE, "cp_async_wait_group<0>();", "", "none", MAMBA2_TESTS, "asynchronous copies"),
    "a chunk in place of one that is still read": (
        CHUNK_PIPELINE,
        "kChunkStages = 3;",
        "kChunkStages = 2;",
        "thread",
        DELTA_TESTS,
        RACE,
    ),
    "outputs behind the new tokens": (CHUNK_PIPELINE, "if (8 * tile < left &&", "if (", "address", DELTA_TESTS, OVERRUN),
    "tokens of a block that do not know each other": (
        DELTA_MATRICES,
        "sum -= scratch.block[i][j] * inverse[j];",
        "sum -= 0.0f;",
        "none",
        DELTA_TESTS,
        "assert",
    ),
    "a token that does not see itself": (
        DELTA_MATRICES,
        "const float first = of_chunk <= tokens[i]",
        "const float first = of_chunk < tokens[i]",
        "none",
        DELTA_TESTS,
        "assert",
    ),
    "norms of keys that are left out": (DELTA_MATRICES, "norms[i] * norms[i] *", "norms[i] *", "none", DELTA_TESTS, "assert"),
    "keys of the next head": (DELTA_MATRICES, "is_there = 8 * place < params.key_dim", "is_there = true", "none", DELTA_TESTS, "assert"),
    "padding in a chunk of keys": (
        DELTA_MATRICES,
        "const bool is_new = first + token < count;",
        "const bool is_new = true;",
        "none",
        DELTA_TESTS,
        "finite",
    ),
    "decays before all lanes have made theirs": (
        DELTA_MATRICES,
        "sums[i];\n        __syncwarp();",
        "sums[i];",
        "thread",
        DELTA_TESTS,
        RACE,
    ),
    "a block that has nothing of those before": (
        DELTA_CHUNKS,
        "for (int later = block + 1;",
        "for (int later = kChunkBlocks;",
        "none",
        DELTA_TESTS,
        "assert",
    ),
    "changes as precise as their parts": (DELTA_CHUNKS, "low[i] = parts.low;", "low[i] = 0;", "none", DELTA_TESTS, "assert"),
    "a state that has not decayed over the chunk": (DELTA_CHUNKS, "[i] *= total;", "[i] *= 1.0f;", "none", DELTA_TESTS, "assert"),
    "a change of a state that has not decayed": (
        DELTA_STEP,
        "(v - decay * inverse_k",
        "(v - inverse_k",
        "none",
        DELTA_TESTS,
        "assert",
    ),
    "keys of another head": (
        DELTA_STEP,
        "static_cast<int>(head) / (static_cast<int>(params.heads) / static_cast<int>(params.key_heads))",
        "head % params.key_heads",
        "none",
        DELTA_TESTS,
        "assert",
    ),
    "columns of the next row": (DELTA, "is_live = column < params.value_dim", "is_live = true", "address", DELTA_TESTS, OVERRUN),
    "columns of the next row in a step": (
        DELTA_UPDATE,
        "is_live = column < params.value_dim",
        "is_live = true",
        "address",
        DELTA_TESTS,
        OVERRUN,
    ),
    "rows of the next head in a step": (
        DELTA_UPDATE,
        "!is_live || row + eight >= params.key_dim",
        "!is_live",
        "address",
        DELTA_TESTS,
        OVERRUN,
    ),
    "sums of rows before they are there": (DELTA_UPDATE, "    __syncthreads();\n", "", "thread", DELTA_TESTS, RACE),
    "a sum of some rows": (DELTA_UPDATE, "part < kUpdateParts", "part < kUpdateParts - 1", "none", DELTA_TESTS, "assert"),
    "steps of the tile before": (
        DELTA,
        "tiles.make_steps(params, stage, tokens);\n        __syncthreads();",
        "tiles.make_steps(params, stage, tokens);",
        "thread",
        DELTA_TESTS,
        RACE,
    ),
    "sums of warps are read before they are there": (
        "linear/product.cuh",
        "            __syncthreads();\n#pragma unroll 1",
        "#pragma unroll 1",
        "thread",
        LINEAR_TESTS,
        RACE,
    ),
    "k with the weights of q": ("decoder_layer.cu", "is_q ? q_weight : k_weight", "q_weight", "none", DECODER_LAYER_TESTS, "Mismatched"),
    "a norm of the words that are held": (
        "decoder_layer.cu",
        "word < words; word += 32) add_squares",
        "word < 0; word += 32) add_squares",
        "none",
        DECODER_LAYER_TESTS,
        "Mismatched",
    ),
    "columns of the first row for all": ("decoder_layer.cu", "    in += 2 * row * words;\n", "", "none", COLUMN_TESTS, "Mismatched"),
    "columns in pairs": ("decoder_layer.cu", "in[columns.y]", "in[columns.x + 1]", "none", COLUMN_TESTS, "Mismatched"),
    "columns behind the last one of a row": (
        "decoder_layer.cu",
        "    if (word >= words) return;\n    in +=",
        "    in +=",
        "address",
        COLUMN_TESTS,
        OVERRUN,
    ),
    "sums are overwritten while they are read": ("linear/product.cuh", "turn * Partials::kFloats", "0", "thread", LINEAR_TESTS, RACE),
    "weights behind the last input": (
        "linear.cu",
        "input_ + ahead < params_.inputs",
        "input_ < params_.inputs",
        "none",
        LINEAR_TESTS,
        "nan",
    ),
    "weights of no output": (
        "linear/dense_weights.cuh",
        "min(tile * params.tile_outputs + column, params.outputs - 1)",
        "(tile * params.tile_outputs + column)",
        "address",
        LINEAR_TESTS,
        OVERRUN,
    ),
    "only the first tile of a block": (
        "linear.cu",
        "        tile_ += gridDim.x;\n        begin_tile();",
        "        input_ = params_.inputs;",
        "none",
        LINEAR_TESTS,
        "several_tiles",
    ),
    "only the first tile of a block, packed": (
        PACKED_LINEAR,
        "        tile_ += gridDim.x;\n        begin_tile();",
        "        fragment_ = params_.weight.fragments;",
        "none",
        PACKED_TESTS,
        "several_tiles",
    ),
    "up in the place after the gate": (
        PACKED_LINEAR,
        "x * (params_.outputs / kTileOutputs)",
        "x",
        "none",
        PACKED_TESTS,
        "test_gated_products",
    ),
    "rows behind the last output of a part": (PACKED_LINEAR, "if (output < outputs)", "if (true)", "address", PACKED_TESTS, OVERRUN),
    "packed values behind the last input": (
        PACKED_VALUES,
        "fragments - fragment > ahead",
        "true",
        "address",
        PACKED_TESTS,
        OVERRUN,
    ),
    "scales behind the last group": (
        PACKED_VALUES,
        "min(fragment + ahead, fragments - 1)",
        "(fragment + ahead)",
        "address",
        PACKED_TESTS,
        OVERRUN,
    ),
    "the scale of the first half for both": (PACKED_VALUES, "group_shift == 0 ? pairs() : 0", "0", "none", PACKED_TESTS, "Mismatched"),
    "the scale of the next group for the second half": (
        PACKED_VALUES,
        "group_shift == 0 ? pairs() : 0",
        "pairs()",
        "none",
        PACKED_TESTS,
        "test_packed_linear",
    ),
    "bits 4 to 7 as the lowest ones": (
        PACKED_VALUES,
        "0x7D007D00 : 0x7F007F00",
        "0x7F007F00 : 0x7F007F00",
        "none",
        PACKED_TESTS,
        "Mismatched",
    ),
    "the zero point of the first row for both, in 4 bits": (
        PACKED_VALUES,
        "0x4140), minus_unit",
        "0x4040), minus_unit",
        "none",
        PACKED_TESTS,
        "Mismatched",
    ),
    "the zero point of the first row for both": (
        PACKED_VALUES,
        "zero_points >> (8 * i) & 0xFF",
        "zero_points & 0xFF",
        "none",
        PACKED_TESTS,
        "Mismatched",
    ),
    "a scale without its last bits": (
        PACKED_VALUES,
        "multiply_add(Element{}, differences, low_, kMinusZero)",
        "kMinusZero",
        "none",
        PACKED_TESTS,
        "Mismatched",
    ),
    "weights that are rounded twice": (
        PACKED_VALUES,
        "kIsSplit = !kIsOwn && kIsSame<Type, Float16> && kIsSame<Stored, Int4>",
        "kIsSplit = !kIsOwn && kIsSame<Type, Float16>",
        "none",
        PACKED_TESTS,
        "Mismatched",
    ),
    "scales of rows where the outputs of a tile share them": (
        PACKED_VALUES,
        "kIsSame<Stored, Float8> ? scale_pairs : 8",
        "8",
        "address",
        PACKED_TESTS,
        OVERRUN,
    ),
    "scales of other groups where the outputs of a tile share them": (
        PACKED_VALUES,
        "min(lane / 4, pairs() - 1)",
        "lane / 4",
        "none",
        PACKED_TESTS,
        "test_every_value_of_fp8",
    ),
    "FP8 as if it were of the type of an element": (
        PACKED_VALUES,
        "unpack(Difference{}, differences)",
        "unpack(Element{}, differences)",
        "none",
        PACKED_TESTS,
        "test_every_value_of_fp8",
    ),
    "FP8 times a scale of another type": (
        PACKED_VALUES,
        "kIsOwn = kIsSame<Difference, Element>",
        "kIsOwn = true",
        "none",
        PACKED_TESTS,
        "test_every_value_of_fp8",
    ),
    "the scale of the first 16 inputs for 32": (PACKED_VALUES, "lane % 4 / 2 * 8", "0", "none", NVFP4_TESTS, "Mismatched"),
    "the scale of the first half for both, of NVFP4": (PACKED_VALUES, "return 2 * 8;", "return 0;", "none", NVFP4_TESTS, "Mismatched"),
    "the scale of the next fragment": (PACKED_VALUES, "kIsNvfp4 ? 4 * last", "kIsNvfp4 ? 4 * last + 1", "none", NVFP4_TESTS, "Mismatched"),
    "scales of NVFP4 behind the last fragment": (
        PACKED_VALUES,
        "kIsNvfp4 ? 4 * last",
        "kIsNvfp4 ? 4 * (fragment + ahead)",
        "address",
        f"{PACKED_TESTS}::test_nvfp4",
        OVERRUN,
    ),
    "a factor without its last bits": (PACKED_VALUES, "__fmul_rn(scale, low)", "0.0f", "none", NVFP4_TESTS, "Mismatched"),
    "a scale that is rounded twice": (
        PACKED_VALUES,
        "__fmaf_rn(scale, high, __fmul_rn(scale, low))",
        "__fmul_rn(scale, high) + __fmul_rn(scale, low)",
        "none",
        NVFP4_TESTS,
        "Mismatched",
    ),
    "the factor of another number": (
        PACKED_VALUES,
        "__int_as_float(group_shift), __int_as_float(scale_pairs)",
        "__int_as_float(scale_pairs), __int_as_float(group_shift)",
        "none",
        NVFP4_TESTS,
        "Mismatched",
    ),
    "other bits of the first pair for all": (
        SUPER_BLOCKS,
        "kHighBits * pair",
        "kHighBits * (pair & ~3)",
        "none",
        SUPER_BLOCK_TESTS,
        "Mismatched",
    ),
    "other bits of one word": (SUPER_BLOCKS, "high[first / 16]", "high[0]", "none", SUPER_BLOCK_TESTS, "Mismatched"),
    "scales of 16 inputs for 32": (SUPER_BLOCKS, " + static_cast<int>(threadIdx.x) % 4 / 2", "", "none", SUPER_BLOCK_TESTS, "Mismatched"),
    "factors of the first super-block": (
        SUPER_BLOCKS,
        "last / kSuperBlockFragments * 8",
        "start.first / kSuperBlockFragments * 8",
        "none",
        SUPER_BLOCK_TESTS,
        "Mismatched",
    ),
    "minimums that are rounded before the difference": (
        SUPER_BLOCKS,
        "minus_minimum = -__fmul_rn(of_row.y, unsigned_byte(bytes, 2 * i + 1))",
        "minus_minimum = -unpack(Element{}, pack(Element{}, {__fmul_rn(of_row.y, unsigned_byte(bytes, 2 * i + 1)), 0.0f})).x",
        "none",
        SUPER_BLOCK_TESTS,
        "Mismatched",
    ),
    "scales of super-blocks without a sign": (
        SUPER_BLOCKS,
        "^ 0x80)) - 8388736.0f",
        ")) - 8388608.0f",
        "none",
        SUPER_BLOCK_TESTS,
        "Mismatched",
    ),
    "super-blocks behind the last fragment": (
        SUPER_BLOCKS,
        "min(at, fragments - 1)",
        "at",
        "address",
        SUPER_BLOCK_TESTS,
        OVERRUN,
    ),
    "one expert for all": (
        EXPERTS,
        "begin(chosen_.experts[index], tile)",
        "begin(chosen_.experts[0], tile)",
        "none",
        EXPERT_TESTS,
        "test_products_",
    ),
    "experts that nobody has chosen": (EXPERTS, "begin(chosen_.experts[index], tile)", "begin(index, tile)", "none", EXPERT_TESTS, "nan"),
    "an expert as large as its gate": (
        DENSE_EXPERTS,
        "params_.outputs) * (kGated ? 2 : 1)",
        "params_.outputs)",
        "none",
        EXPERT_TESTS,
        "test_products_into_experts",
    ),
    "a packed expert as large as its gate": (
        PACKED_EXPERTS,
        "(2 * expert + x) * tiles",
        "(expert + x) * tiles",
        "none",
        PACKED_EXPERT_TESTS,
        "test_products_into_experts",
    ),
    "up in the place after the gate, of packed experts": (
        PACKED_EXPERTS,
        "(2 * expert + x) * tiles + tile",
        "2 * expert * tiles + tile + x",
        "none",
        PACKED_EXPERT_TESTS,
        "test_products_into_experts",
    ),
    "a tile of the next packed expert": (
        PACKED_EXPERTS,
        "min(tile * kTiles + x, tiles - 1)",
        "(tile * kTiles + x)",
        "address",
        PACKED_EXPERT_TESTS,
        OVERRUN,
    ),
    "one tile of packed experts for all": (
        PACKED_EXPERTS,
        "start(weight_tile(expert, tile, x))",
        "start(weight_tile(expert, 0, x))",
        "none",
        PACKED_EXPERT_TESTS,
        "test_products_",
    ),
    "NaN of FP8 behind the last input": (
        PACKED_EXPERTS,
        "load<kIsSame<Stored, Float8>>",
        "load<false>",
        "none",
        PACKED_EXPERT_TESTS,
        "nan",
    ),
    "FP4 without signs": (PACKED_VALUES, "(high & kSigns) | ", "", "none", PACKED_EXPERT_TESTS, "test_products_into_experts"),
    "FP4 that is too small": (PACKED_VALUES, "0x7E807E80", "0x7E007E00", "none", PACKED_EXPERT_TESTS, "test_products_into_experts"),
    "the smallest exponent as zero": (PACKED_VALUES, ": 0x00400000", ": 0", "none", PACKED_EXPERT_TESTS, "test_every_value"),
    "the exponent of the first row for both": (
        PACKED_VALUES,
        "bytes >> (8 * i) & 0xFF",
        "bytes & 0xFF",
        "none",
        PACKED_EXPERT_TESTS,
        "test_products_",
    ),
    "the first choice for all": (EXPERTS, "static_cast<signed char>(pair % params.choices)", "0", "none", EXPERT_TESTS, "nan"),
    "only the first row of an expert": (
        EXPERTS,
        "        if (pair < pairs)\n            choice[rank",
        "        if (is_first)\n            choice[rank",
        "none",
        EXPERT_TESTS,
        "nan",
    ),
    "sums without the weights of the router": (
        EXPERTS,
        "weight = chosen.weights[row * params.choices + choice]",
        "weight = 1.0f",
        "none",
        EXPERT_TESTS,
        "test_products_out_of_experts",
    ),
    "biases without the weights of the router": (
        EXPERTS,
        "value += chosen.weights[pair] * expert_bias(",
        "value += expert_bias(",
        "none",
        EXPERT_TESTS,
        "test_products_out_of_experts",
    ),
    "logits of a router without the end of a row": (
        ROUTER,
        "quad < quads; quad += kThreads",
        "quad < 0; quad += kThreads",
        "none",
        ROUTER_TESTS,
        "test_logits",
    ),
    "logits of a router before all warps have summed": (
        ROUTER,
        "    __syncthreads();\n    const int row",
        "    const int row",
        "thread",
        ROUTER_TESTS,
        RACE,
    ),
    "a softmax of large logits": (ROUTER, "expf(logit - highest)", "expf(logit + 0 * highest)", "none", ROUTER_TESTS, "test_large_logits"),
    "the last of equal experts": (
        ROUTER,
        "| ~static_cast<unsigned>(expert)",
        "| static_cast<unsigned>(expert)",
        "none",
        ROUTER_TESTS,
        "test_",
    ),
    "an order of scores that is wrong below zero": (ROUTER, "? ~bits", "? bits", "none", ROUTER_TESTS, "test_"),
    "places of experts before all ranks are there": (
        ROUTER,
        "ranks[expert] = rank;\n    __syncthreads();",
        "ranks[expert] = rank;",
        "thread",
        ROUTER_TESTS,
        RACE,
    ),
    "scores that are summed before all are there": (
        ROUTER,
        "    }\n    __syncthreads();\n    // Not earlier",
        "    }\n    // Not earlier",
        "thread",
        ROUTER_TESTS,
        RACE,
    ),
    "weights without the scales of experts": (
        ROUTER,
        "static_cast<float>(factor) * scale;",
        "static_cast<float>(factor);",
        "none",
        ROUTER_TESTS,
        "test_choices",
    ),
    "weights with the bias of the choice": (
        ROUTER,
        "weights[blockIdx.x * choices + place] = score",
        "weights[blockIdx.x * choices + place] = (score + bias)",
        "none",
        ROUTER_TESTS,
        "test_choices",
    ),
    "up that is clamped on one side": (EXPERTS, "up < -limit ? -limit : up", "up", "none", EXPERT_TESTS, "ClampedSwiGLU"),
    "rows that have not chosen an expert": (
        EXPERTS,
        "        if (choice < 0) continue;\n",
        "",
        "none",
        f"{EXPERT_TESTS}::test_a_row_does_not_depend_on_the_others",
        "Mismatched",
    ),
    "experts are read before they are listed": (
        EXPERTS,
        "        __syncthreads();\n    }\n    __device__ __forceinline__ int choice_of",
        "    }\n    __device__ __forceinline__ int choice_of",
        "thread",
        f"{EXPERT_TESTS}::test_products_out_of_experts",
        RACE,
    ),
    "only the first tile of a block, of experts": (
        EXPERTS,
        "            unit_ += gridDim.x;\n            index_ = 0;",
        "            unit_ = units();",
        "none",
        EXPERT_TESTS,
        "test_products_into_experts",
    ),
    "the first layer's heads": ("kv.cu", "head(layers)", "head(layers - blockIdx.z)", "address", "test_kv_kernels.py", OVERRUN),
}


#: Mistakes that are planted at several places of a file.
AT_SEVERAL_PLACES = {
    "one vector too many",
    "one vector too many, inside",
    "nor where it is saved",
    "stale tokens move too",
    "a bin that is read before it is found",
    "channels behind the last one",
    "padding in a chunk of keys",
    "changes as precise as their parts",
    "the first layer's heads",
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistake_replaces_code(mistake):
    file, right, wrong, *_ = MISTAKES[mistake]
    count = (source_folder() / file).read_text().count(right)
    assert count > 1 if mistake in AT_SEVERAL_PLACES else count == 1
    assert wrong != right


@pytest.mark.slow
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistake(tmp_path, mistake):
    file, right, wrong, sanitizer, tests, said = MISTAKES[mistake]
    sources = tmp_path / "plugins"
    shutil.copytree(source_folder(), sources)
    text = (sources / file).read_text()
    assert right in text
    (sources / file).write_text(text.replace(right, wrong))
    changed, no_cubins = {"SIMT_SOURCES": str(sources), "SIMT_CHANGED": file}, tmp_path / "cubins"
    result = run_tests(no_cubins, sanitizer, f"tests/kernels/{tests}", variables=changed)
    assert said in result.stdout + result.stderr
    assert result.returncode != 0
