"""``estimate_build``: exact where it can be, near real builds elsewhere, and the refusals of a build."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import eagle3, mtp
from tests.helpers.adapters import Q_PROJ, SHAPES
from tests.helpers.assertions import raises
from tests.helpers.models import SMALL, write_model
from tests.helpers.quantized_models import write_nvfp4
from tests.paths import GOLDEN, SHIPPED
from tests.sweeps import each_once
from trt_kvcache import Checkpoint, build_engine, estimate_build
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.errors import CheckpointError, ConfigError
from trt_kvcache.memory.shapes import align_up
from trt_kvcache.model.tensor_shapes import tensor_shapes

#: Bytes of libraries and files in memory after a build where peaks were fitted. Another system maps more pages at once: 195 MB was seen.
MAPPED = 127_000_000

SIZES: dict[str, Any] = {"max_batch_size": 3, "max_sequence_length": 38, "max_prefill_length": 11}


def test_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with Checkpoint.open(model) as checkpoint:
        assert estimate_build(model, **SIZES).weights_nbytes == checkpoint.nbytes


def test_weights_in_another_dtype_have_its_size(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    as_stored, wider = (estimate_build(model, **SIZES, dtype=dtype) for dtype in (None, "float32"))
    assert wider.weights_nbytes == 2 * as_stored.weights_nbytes
    assert wider.cache_nbytes == 2 * as_stored.cache_nbytes


def test_the_cache_is_that_of_the_engine(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with Checkpoint.open(model) as checkpoint:
        cache = ResolvedOptions.of_model(BuildOptions(**SIZES), checkpoint.config).cache_for(checkpoint.config)
    assert estimate_build(model, **SIZES).cache_nbytes == cache.nbytes


def test_fp4_in_plugin_layers_has_its_stored_size(tmp_path: Path) -> None:
    """Elsewhere it takes the bytes of int8."""
    model = write_nvfp4(tmp_path / "model", one_factor=False, hidden_size=64, head_dim=64, intermediate_size=96)
    options: dict[str, Any] = {"dtype": "bfloat16", "attention": "plugin", "max_batch_size": 2, "max_sequence_length": 64}
    plain, packed = (estimate_build(model, **options, packed_kernels=one).weights_nbytes for one in (False, True))
    with Checkpoint.open(model) as checkpoint:
        assert packed == sum(checkpoint.nbytes_of(name) for name in checkpoint.tensor_names)
        weights = sum(math.prod(tensor_shapes(checkpoint.config)[name]) for name in checkpoint.quantized_names)
    assert plain - packed == weights // 2


@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
def test_super_blocks_in_plugin_layers_have_their_stored_size(tmp_path: Path) -> None:
    """Of products only with ``packed_kernels``, of experts always. Q5_0 takes the bytes of Q8_0."""
    pytest.importorskip("gguf")
    from tests.helpers.gguf_experts import write_gguf_experts
    from tests.helpers.gguf_files import write_q4_k_m

    def saved(path: Path, part: str, bits: dict[str, float]) -> int:
        """Return by how much fewer bytes the matrices have whose names contain ``part``."""
        with Checkpoint.open(path) as checkpoint:
            shapes = {name: shape for name, shape in tensor_shapes(checkpoint.config).items() if part in name and len(shape) == 2}
            shapes.pop("model.embed_tokens.weight", None)
            types = {name: checkpoint.block_type(name) for name in shapes}
        return round(sum(math.prod(shape) * (2 - bits[str(types[name])] / 8) for name, shape in shapes.items() if types[name] in bits))

    bits = {"Q4_K": 4.5, "Q6_K": 6.5625, "Q5_0": 8.5}
    options: dict[str, Any] = {"dtype": "bfloat16", "attention": "plugin", "max_batch_size": 2, "max_sequence_length": 64}
    write_q4_k_m(tmp_path / "dense", {"k_proj": "Q5_0"})
    plain, packed = (estimate_build(tmp_path / "dense", **options, packed_kernels=one).weights_nbytes for one in (False, True))
    assert plain - packed == saved(tmp_path / "dense", "", bits) > 0
    types = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K"}
    path, in_16_bits = write_gguf_experts(tmp_path / "packed", types), write_gguf_experts(tmp_path / "plain", {"exps": "BF16"})
    plain, packed = (estimate_build(one, **options).weights_nbytes for one in (in_16_bits, path))
    assert plain - packed == saved(path, ".experts.", bits) > 0


def test_sizes_have_the_defaults_of_a_build() -> None:
    assert estimate_build(SHIPPED) == estimate_build(SHIPPED, max_batch_size=1, max_sequence_length=512, max_prefill_length=512)


def test_segments_have_their_constants_beside_the_plan(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", head_dim=64)
    native, plugin = (estimate_build(model, attention=attention) for attention in ("native", "plugin"))
    segments = estimate_build(model, attention="plugin", plugin_layers="segments")
    assert (native.constants_nbytes, plugin.constants_nbytes) == (0, 0)
    assert segments.constants_nbytes > 0
    assert segments.weights_nbytes == plugin.weights_nbytes == native.weights_nbytes
    assert segments.disk_nbytes == segments.plan_nbytes + segments.constants_nbytes


PER_LAYER: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "head_dim": 64,
    "global_head_dim": 64,
    "vocab_size_per_layer_input": 41,
}


def test_per_layer_embeddings_are_weights_and_activations(tmp_path: Path) -> None:
    folders = [write_model(tmp_path / f"{size}", **PER_LAYER, hidden_size_per_layer_input=size) for size in (0, 16)]
    for layers, table in (("one-plan", 0), ("segments", 41 * 48 * 2)):
        without, found = (estimate_build(one, **SIZES, attention="plugin", plugin_layers=layers) for one in folders)
        shared, own = 41 * 48 + 48 * 40 + 16, 2 * 16 * 40 + 40  # table, projection and its norm; gate, projection and norm of a layer
        assert found.weights_nbytes - without.weights_nbytes == 2 * (shared + 3 * own)
        assert found.constants_nbytes - without.constants_nbytes == table
        assert found.plan_nbytes - without.plan_nbytes == 2 * (shared + 3 * own) - table
        assert found.activations_nbytes - without.activations_nbytes == 3 * 11 * 48 * 2  # slots, tokens, inputs of three layers, bytes


def test_a_plugin_library_is_in_the_plan(tmp_path: Path) -> None:
    model, library = write_model(tmp_path / "model", head_dim=64), tmp_path / "library.so"
    library.write_bytes(bytes(12345))
    plain, carrying = (estimate_build(model, attention="plugin", plugin_library=one).plan_nbytes for one in (None, library))
    assert carrying - plain == 12345


@pytest.mark.parametrize("max_logits_per_slot", [1, 4])
def test_the_memory_of_v_outputs_is_counted(tmp_path: Path, max_logits_per_slot: int) -> None:
    model = write_model(tmp_path / "model", head_dim=64, num_hidden_layers=3)
    options: dict[str, Any] = {**SIZES, "max_prefill_length": 11, "flavour": "tensorrt", "max_logits_per_slot": max_logits_per_slot}
    plain, marked = (estimate_build(model, **options, v_outputs=one).activations_nbytes for one in (False, True))
    assert marked - plain == 3 * (3 * 11 * 2 * 64 * 2)  # layers; slots, new tokens, heads, elements, bytes


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_memory_of_a_draft_head_is_counted(tmp_path: Path, kind: str) -> None:
    model = mtp.write_mtp_model(tmp_path / "model") if kind == "mtp" else eagle3.write_model(tmp_path / "model")
    narrow = {"embedding": True, "hidden_size": 24, "target_hidden_size": 32, "max_position_embeddings": 20}
    head = "mtp" if kind == "mtp" else eagle3.write_head(tmp_path / "head", model, **narrow)
    sizes: dict[str, Any] = {**SIZES, "max_sequence_length": 38, "max_prefill_length": 11, "max_logits_per_slot": 4, "dtype": "float16"}
    plain, drafting = (estimate_build(model, **sizes, draft_head=one) for one in (None, head))
    width = 40 if kind == "mtp" else 24
    # of all tokens, of an enqueue, those that the head reads and returns, and one of each slot; bytes
    assert drafting.hidden_states_nbytes == 3 * (38 + 11 + 2 * 11 + 1) * width * 2
    assert plain.hidden_states_nbytes == 0
    assert plain.draft_head is None
    found = drafting.draft_head
    assert found is not None
    heads_and_tokens = 1 * 38 if kind == "mtp" else 2 * 20
    assert found.cache_nbytes == 2 * align_up(3 * heads_and_tokens * 16 * 2)
    assert drafting.device_nbytes - plain.device_nbytes == drafting.hidden_states_nbytes + found.device_nbytes
    assert drafting.disk_nbytes - plain.disk_nbytes == found.plan_nbytes
    assert found.weights_nbytes > 0


def test_the_memory_of_adapters_is_counted(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=3)
    plain, adapted = (estimate_build(model, **SIZES, **options) for options in ({}, {"adapters_rank": 5, "adapters_modules": ["q_proj"]}))
    assert adapted.adapters_nbytes == 3 * 8 * (SHAPES[Q_PROJ][0] + SHAPES[Q_PROJ][1]) * 2  # layers, ranks, outputs and inputs, bytes
    assert plain.adapters_nbytes == 0
    assert adapted.device_nbytes - plain.device_nbytes == adapted.adapters_nbytes


def test_the_memory_of_rows_is_counted(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    plain, with_rows = (estimate_build(model, **SIZES, max_embeddings=count) for count in (0, 7))
    assert (plain.embeddings_nbytes, with_rows.embeddings_nbytes) == (0, 7 * 40 * 2)
    assert with_rows.device_nbytes - plain.device_nbytes == 7 * 40 * 2


def test_the_chosen_attention_is_that_of_a_build() -> None:
    assert estimate_build(GOLDEN / "gemma2", **SIZES) == estimate_build(GOLDEN / "gemma2", **SIZES, attention="mask")
    with raises(ConfigError, "attention", expected="mask", got="native"):
        estimate_build(GOLDEN / "gemma2", **SIZES, attention="native")


def test_soft_capped_scores_are_activations(tmp_path: Path) -> None:
    capped = write_model(tmp_path / "capped", model_type="gemma2", attn_logit_softcapping=50.0)
    plain = write_model(tmp_path / "plain", model_type="gemma2", attn_logit_softcapping=None)
    more = estimate_build(capped, **SIZES).activations_nbytes - estimate_build(plain, **SIZES, attention="mask").activations_nbytes
    assert more == 3 * 11 * 4 * 38 * 2 * 4  # slots, new tokens, heads, keys, before and after softmax, float32


@pytest.mark.parametrize(
    ("options", "is_expanded"),
    [({"attention": "native"}, True), ({}, True), ({"attention": "mask"}, False), ({"attention": "native", "flavour": "tensorrt"}, False)],
)
def test_prefill_of_native_attention_expands_k_and_v_in_rtx(tmp_path: Path, options: dict[str, Any], is_expanded: bool) -> None:
    model = write_model(tmp_path / "model")
    heads, kv_heads = SMALL["num_attention_heads"], SMALL["num_key_value_heads"]
    assert heads > kv_heads
    sizes = {**SIZES, "dtype": "float16", "max_prefill_length": 11}
    shorter, longer = (estimate_build(model, **{**sizes, "max_sequence_length": length}, **options) for length in (38, 39))
    assert longer.activations_nbytes - shorter.activations_nbytes == (2 * 3 * heads * 24 * 2 if is_expanded else 0)


def test_without_gqa_nothing_is_expanded(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_key_value_heads=SMALL["num_attention_heads"])
    shorter, longer = (estimate_build(model, **{**SIZES, "max_sequence_length": length}) for length in (38, 39))
    assert longer.activations_nbytes == shorter.activations_nbytes


def test_more_slots_and_tokens_take_more_activations() -> None:
    sizes = ((1, 64), (4, 64), (1, 256))
    one, slots, tokens = (
        estimate_build(SHIPPED, max_batch_size=batch, max_prefill_length=width).activations_nbytes for batch, width in sizes
    )
    assert slots == 4 * one
    assert one < tokens < slots


def test_states_alone_are_one_segment_whatever_the_attention() -> None:
    native, plugin = (estimate_build(GOLDEN / "mamba2", **SIZES, attention=attention) for attention in ("native", "plugin"))
    assert plugin.disk_nbytes == native.disk_nbytes


@pytest.mark.trt
def test_the_plan_of_states_alone_is_within_a_tenth(tmp_path: Path) -> None:
    report = build_engine(GOLDEN / "mamba2", tmp_path / "engine", **SIZES, attention="plugin", flavour="tensorrt_rtx")
    assert estimate_build(GOLDEN / "mamba2", **SIZES, attention="plugin").plan_nbytes == pytest.approx(report.plan_nbytes, rel=0.1)


@pytest.mark.trt
@pytest.mark.parametrize("variant", [{"attention": "mask"}, {"attention": "plugin"}, {"attention": "plugin", "plugin_layers": "segments"}])
def test_the_plan_of_per_layer_embeddings_is_within_a_tenth(tmp_path: Path, variant: dict[str, str]) -> None:
    sizes = {"vocab_size_per_layer_input": 30000, "hidden_size_per_layer_input": 256, "hidden_size": 512, "intermediate_size": 4096}
    model = write_model(tmp_path / "model", **{**PER_LAYER, **sizes})
    report = build_engine(model, tmp_path / "engine", **SIZES, **variant, flavour="tensorrt_rtx")
    assert estimate_build(model, **SIZES, **variant).plan_nbytes == pytest.approx(report.plan_nbytes, rel=0.1)


@pytest.mark.trt
@pytest.mark.parametrize(
    ("variant", "logits"),
    each_once([({"attention": "native"},), ({"attention": "plugin"},), ({"attention": "plugin", "plugin_layers": "segments"},)], [1, 5]),
)
def test_the_plan_of_a_real_build_is_within_a_tenth(tmp_path: Path, variant: dict[str, str], logits: int) -> None:
    model = write_model(tmp_path / "model", vocab_size=3000, hidden_size=1024, head_dim=64, intermediate_size=8192, num_hidden_layers=3)
    options = {**SIZES, **variant, "max_logits_per_slot": logits}
    report = build_engine(model, tmp_path / "engine", **options, flavour="tensorrt_rtx")
    assert estimate_build(model, **options).plan_nbytes == pytest.approx(report.plan_nbytes, rel=0.1)


_BUILD = """
import json, sys
from trt_kvcache import build_engine
report = build_engine(*sys.argv[1:3], flavour="tensorrt_rtx", **json.loads(sys.argv[3]))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([report.plan_nbytes, report.peak_memory_nbytes, int(status["RssFile"].split()[0]) << 10]))
"""


def plan_and_peak(model: Path, engine: Path, options: dict[str, Any]) -> tuple[int, int]:
    """Build in a process of its own; return the bytes of the plan, and the peak with as many mapped pages as where peaks were fitted."""
    arguments = [str(model), str(engine), json.dumps(options)]
    done = subprocess.run([sys.executable, "-c", _BUILD, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    plan, peak, mapped = json.loads(done.stdout.splitlines()[-1])
    return plan, peak - mapped + MAPPED


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is mostly embedding, which is the head too."""
    sizes = {"vocab_size": 128_000, "hidden_size": 512, "head_dim": 64, "intermediate_size": 2048, "num_hidden_layers": 2}
    return write_model(tmp_path_factory.mktemp("models") / "model", tie_word_embeddings=True, **sizes)


@pytest.mark.trt
@pytest.mark.skipif(sys.platform != "linux", reason="peaks were fitted to Linux")
@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "int4:128,embedding=int4"},
        pytest.param({"quantize": "int8,embedding=int8"}, marks=pytest.mark.slow),
        pytest.param({"quantize": "int4", "kv_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"quantize": "int8,embedding=int8", "kv_dtype": "fp8"}, marks=pytest.mark.slow),
        {"quantize": "int8,embedding=int8", "kv_dtype": "fp8", "plugin_layers": "segments"},
    ],
    ids=str,
)
def test_plan_and_peak_of_rounded_weights_are_within_a_tenth(tmp_path: Path, wide: Path, options: dict[str, str]) -> None:
    plan, peak = plan_and_peak(wide, tmp_path / "engine", {**SIZES, **options})
    estimate = estimate_build(wide, **SIZES, **options)
    assert estimate.plan_nbytes == pytest.approx(plan, rel=0.1)
    assert estimate.host_peak_nbytes == pytest.approx(peak, rel=0.1)


@pytest.mark.trt
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is known on Linux")
def test_the_peak_of_a_build_is_that_of_packed_weights(tmp_path: Path) -> None:
    """Weights of 150 MB in 16 bits, of which 38 MB are left: the estimate has no room for dense ones."""
    sizes = {"hidden_size": 1024, "intermediate_size": 6144, "head_dim": 64, "num_hidden_layers": 4}
    model, options = write_model(tmp_path / "model", **sizes), {"max_sequence_length": 32, "quantize": "int4:128"}
    _, peak = plan_and_peak(model, tmp_path / "engine", options)
    assert peak < 1.12 * estimate_build(model, **options).host_peak_nbytes


def test_only_what_takes_columns_is_packed_twice(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", vocab_size=64, hidden_size=64, tie_word_embeddings=True)
    plans = {name: estimate_build(model, **SIZES, quantize=f"int4,embedding={name}").plan_nbytes for name in ("int8", "int4")}
    int8, int4 = 64 * (64 + 2), 64 * (32 + 2 * 2)  # codes, and scales in float16
    assert plans["int8"] - plans["int4"] == 2 * int8 - int4


@pytest.mark.trt
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_soft_capped_scores_take_kernels(tmp_path: Path, softcap: float | None) -> None:
    sizes = {"head_dim": 64, "hidden_size": 128, "num_hidden_layers": 4, "sliding_window": 7, "attn_logit_softcapping": softcap}
    model = write_model(tmp_path / "model", model_type="gemma2", **sizes)
    report = build_engine(model, tmp_path / "engine", **SIZES, flavour="tensorrt_rtx")
    assert estimate_build(model, **SIZES).plan_nbytes == pytest.approx(report.plan_nbytes, rel=0.15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequence_length": 65}, "max_sequence_length: expected at most 64"),
        ({"max_batch_size": 0}, "max_batch_size: expected at least 1, got 0"),
        ({"attention": "paged"}, "attention: expected one of"),
        ({"attention": "plugin"}, "head_dim: expected one of"),
    ],
)
def test_what_cannot_be_built_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate_build(write_model(tmp_path / "model"), **options)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        estimate_build(tmp_path)


def test_logits_of_more_tokens_take_more_activations(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    one, five, every = (estimate_build(model, **SIZES, max_logits_per_slot=logits).activations_nbytes for logits in (1, 5, "all"))
    row = 3 * 37 * (2 + 4)  # slots, vocabulary, float16 and the float32 that is given out
    assert five - one == 4 * row
    assert every - one == 10 * row


def test_more_logits_than_new_tokens_are_refused() -> None:
    with raises(ConfigError, "max_logits_per_slot", expected="at most max_prefill_length=16", got=17):
        estimate_build(SHIPPED, max_prefill_length=16, max_logits_per_slot=17)
