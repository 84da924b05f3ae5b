"""Where the CUDA sources are, that they say what Python says, and the name of a compiled one."""

from __future__ import annotations

import re

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.errors import CudaError
from trt_kvcache.kernels import MAX_SAVED_TENSORS, MAX_STORED_VALUES, KVLayerInfo, StateInfo, sources
from trt_kvcache.kernels.attention_tiles import decode_tiles, few_tiles, prefill_tiles
from trt_kvcache.kernels.causal_conv1d_kernels import BLOCKS_PER_SM, CONV_THREADS, TOKENS_IN_FLIGHT
from trt_kvcache.kernels.compaction_moves import MOVE_CAPACITIES, REGISTER
from trt_kvcache.kernels.delta_rule_kernels import (
    DELTA_SCAN_LANES,
    DELTA_THREADS,
    DELTA_TILE_TOKENS,
    DELTA_UPDATE_COLUMNS,
    DELTA_UPDATE_THREADS,
    MATRIX_WARPS,
    MAX_KEY_DIM,
)
from trt_kvcache.kernels.draft_tree_kernels import TREE_THREADS
from trt_kvcache.kernels.expert_kernels import MAX_EXPERT_PAIRS
from trt_kvcache.kernels.gated_norm_kernels import NORM_THREADS
from trt_kvcache.kernels.launch import THREADS_PER_BLOCK, VECTORS_IN_FLIGHT
from trt_kvcache.kernels.linear_tiles import FRAGMENT_INPUTS, ROW_COUNTS, TILE_ROWS, linear_macros
from trt_kvcache.kernels.mamba2_kernels import CHUNK_ROWS, MAMBA_LANE_ELEMENTS, MAMBA_ROWS, MAMBA_THREADS, MAMBA_TILE_TOKENS
from trt_kvcache.kernels.recurrent_chunks import CHUNK_STAGES
from trt_kvcache.kernels.sampling_kernels import ROW_THREADS
from trt_kvcache.kernels.sampling_rows import ROW_PARAMS
from trt_kvcache.kernels.sampling_workspace import MAX_BLOCKS_OF_ROW, ROW_WORKSPACE_NBYTES
from trt_kvcache.kernels.source_variants import RECURRENT_SOURCES, variant_macros
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.kernels.token_weights import FRACTION_BITS, WEIGHT_BITS


def test_sources_are_found():
    assert "lengths" in sources.source_names()
    assert (sources.source_folder() / "lengths.cu").is_file()


def test_the_name_of_a_source_is_its_path():
    assert sources.source_path("attention_decode-float16-128") == sources.source_folder() / "attention" / "decode.cu"


def test_names_are_those_of_all_variants():
    names = sources.source_names()
    # Of few rows: with weights in 16 bits, packed, in super-blocks, and in two formats; of experts, the first three.
    few_rows = (2 + 19 + 6 + 12) * len(ROW_COUNTS) + 2 + 19 + 6
    many_rows = 2 + 19 + 6  # the same of experts
    assert len(names) == len(set(names)) == 14 + 3 * 2 * 2 * (5 + 5 + 6) + 5 * len(RECURRENT_SOURCES) + few_rows + many_rows
    assert all(sources.source_path(name).is_file() for name in names)


def test_no_header_includes_a_source():
    for path in sources.source_files():
        assert not re.findall(r'#include ".*\.cu"', (sources.source_folder() / path).read_text()), path


class TestBothSides:
    """What is written in Python and in CUDA C++ is the same."""

    TEXT = "".join((sources.source_folder() / path).read_text() for path in sources.source_files())

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("kThreads", THREADS_PER_BLOCK),
            ("kInFlight", VECTORS_IN_FLIGHT),
            ("kConvThreads", CONV_THREADS),
            ("kConvBlocksPerSm", BLOCKS_PER_SM),
            ("kTokensInFlight", TOKENS_IN_FLIGHT),
            ("kMambaThreads", MAMBA_THREADS),
            ("kMambaRows", MAMBA_ROWS),
            ("kMambaChunkRows", CHUNK_ROWS),
            ("kChunkStages", CHUNK_STAGES),
            ("kDeltaMatrixWarps", MATRIX_WARPS),
            ("kMambaLaneElements", MAMBA_LANE_ELEMENTS),
            ("kMambaTileTokens", MAMBA_TILE_TOKENS),
            ("kDeltaThreads", DELTA_THREADS),
            ("kDeltaTileTokens", DELTA_TILE_TOKENS),
            ("kDeltaMaxKeyDim", MAX_KEY_DIM),
            ("kDeltaScanLanes", DELTA_SCAN_LANES),
            ("kDeltaUpdateThreads", DELTA_UPDATE_THREADS),
            ("kDeltaUpdateColumns", DELTA_UPDATE_COLUMNS),
            ("kNormThreads", NORM_THREADS),
            ("kRegister", REGISTER),
            ("kRowThreads", ROW_THREADS),
            ("kRowWorkspaceBytes", ROW_WORKSPACE_NBYTES),
            ("kMaxBlocksOfRow", MAX_BLOCKS_OF_ROW),
            ("kTileRows", TILE_ROWS),
            ("kMaxPairs", MAX_EXPERT_PAIRS),
            ("kMaxTreeTokens", MAX_TREE_TOKENS),
            ("kTreeThreads", TREE_THREADS),
            ("kFragmentInputs", FRAGMENT_INPUTS),
            ("kFractionBits", FRACTION_BITS),
            ("kWeightBits", WEIGHT_BITS),
        ],
    )
    def test_numbers(self, name, value):
        (number,) = re.findall(rf"constexpr int {name} = (\w+);", self.TEXT)
        assert int(number, 0) == value

    def test_arguments_of_kernels(self):
        """How many values each kernel takes beside others."""
        kernels = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(kThreads\)\s+)?(\w+)\(([^{]*)\)', self.TEXT)
        lists = {name: int(re.findall(r"LIST_(\d+)", rest)[0]) for name, rest in kernels if "LIST_" in rest}
        moves = {f"compact_{what}_{capacity}": capacity for what in ("layers", "rows", "lengths") for capacity in MOVE_CAPACITIES}
        saved = dict.fromkeys(("save_layers", "instantiate_layers", "save_rows", "instantiate_rows"), MAX_SAVED_TENSORS)
        assert lists == {**moves, **saved, "store_values": MAX_STORED_VALUES, "set_row": ROW_PARAMS.itemsize // 8}

    @pytest.mark.parametrize(("struct", "info"), [("KVLayer", KVLayerInfo), ("State", StateInfo)])
    def test_infos(self, struct, info):
        (body,) = re.findall(rf"struct {struct} {{\n(.*?)\n\n|struct {struct} {{\n(.*?)}};", self.TEXT, re.DOTALL)
        fields = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", body[0] or body[1]))
        assert tuple(fields) == info._fields

    @pytest.mark.parametrize("tiles", [decode_tiles, few_tiles, prefill_tiles, linear_macros])
    def test_every_macro_of_the_tiles_is_used(self, tiles):
        for macro in tiles(8 if tiles is linear_macros else 128, "sm_90"):
            assert re.search(rf"\b{macro}\b", self.TEXT), macro


def test_variants_have_the_macros_of_their_dtype_and_head_dim():
    macros = variant_macros("attention_decode-bfloat16-80", "sm_90")
    assert (macros["ELEMENT"], macros["HEAD_DIM"]) == ("BFloat16", "80")
    assert variant_macros("lengths", "sm_90") == {}


def test_variants_for_trees_have_a_macro_of_their_own():
    for name in ("attention_prefill-float16-64", "attention_prefill-float16-64-int8"):
        assert variant_macros(f"{name}-tree", "sm_90") == {**variant_macros(name, "sm_90"), "TREE": "1"}


def test_variants_for_shared_rows_have_a_macro_of_their_own():
    for name in ("attention_decode-float16-64", "attention_decode_few-bfloat16-256-int8"):
        assert variant_macros(f"{name}-shared", "sm_90") == {**variant_macros(name, "sm_90"), "SHARED_ROWS": "1"}


def test_variants_have_the_macros_of_their_dtype_and_rows():
    macros = variant_macros("linear-float16-16", "sm_90")
    assert (macros["ELEMENT"], macros["ROW_TILES"]) == ("Float16", "2")
    macros = variant_macros("linear_packed-bfloat16-8-int4-float16", "sm_90")
    assert (macros["ELEMENT"], macros["STORED"], macros["SCALE"], macros["ROW_TILES"]) == ("BFloat16", "Int4", "Float16", "1")


def test_variants_have_the_macros_of_both_formats():
    macros = variant_macros("linear_packed_pairs-float16-16-q4_k-q6_k", "sm_90")
    assert (macros["FIRST"], macros["SECOND"], macros["LOADS"], "STORED" in macros) == ("Q4K", "Q6K", "4", False)
    macros = variant_macros("linear_packed_pairs-bfloat16-8-q5_k-int8", "sm_90")
    assert (macros["FIRST"], macros["STORED"], macros["SCALE"], "SECOND" in macros) == ("Q5K", "Int8", "Float16", False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of sources in the place of plugins/."""
    (tmp_path / "one.cu").write_text('#include "part/common.cuh"\nextern "C" __global__ void one(int* p) { *p = VALUE; }\n')
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "common.cuh").write_text("#define VALUE 1\n")
    monkeypatch.setattr(sources, "source_folder", lambda: tmp_path)
    sources._digest.cache_clear()
    yield tmp_path
    sources._digest.cache_clear()


@pytest.mark.parametrize("changed", ["one.cu", "part/common.cuh"])
def test_the_name_changes_with_every_source(folder, changed):
    before = sources.cubin_name("one", "sm_90")
    assert re.fullmatch(r"one-[0-9a-f]{16}\.sm_90\.cubin", before)
    sources._digest.cache_clear()
    assert sources.cubin_name("one", "sm_90") == before
    (folder / changed).write_text((folder / changed).read_text() + "\n")
    sources._digest.cache_clear()
    assert sources.cubin_name("one", "sm_90") != before


def test_the_name_changes_where_a_header_moves(folder):
    before = sources.cubin_name("one", "sm_90")
    (folder / "part" / "common.cuh").rename(folder / "common.cuh")
    sources._digest.cache_clear()
    assert sources.cubin_name("one", "sm_90") != before


def test_an_incomplete_installation_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "trt_kvcache")
    with raises(CudaError, "the CUDA sources of trt_kvcache are missing", expected="_plugins"):
        sources.source_folder.__wrapped__()


def test_an_installed_package_has_its_own_sources(tmp_path, monkeypatch):
    for folder in ("trt_kvcache/_plugins", "plugins"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "lengths.cu").touch()
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "trt_kvcache")
    assert sources.source_folder.__wrapped__() == tmp_path / "trt_kvcache" / "_plugins"
