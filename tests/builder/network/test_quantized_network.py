"""Networks with packed weights: what they compute, against the reference engine on the same checkpoint, in every format."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builder.network.conftest import MAX_BATCH_SIZE, MAX_PREFILL_LENGTH, MAX_SEQUENCE_LENGTH, SIZES, Defined, recording
from tests.builder.network.interpreter import layer_kind
from tests.builder.network.resolved import resolved
from tests.builder.network.test_network_values import LOGITS_TOLERANCE, ROWS_TOLERANCE, STEPS, Network, assert_near, run, total
from tests.helpers.models import attentions_of, write_model
from tests.helpers.quantized_models import ALL_CASES, FP4_CASES, FP8_CONFIG, GPTQ_CONFIG, fp8_blocks, gptq, write_quantized
from tests.paths import GOLDEN
from tests.reference import rig
from tests.sweeps import each_once
from trt_kvcache.builder.definition import define_decoder
from trt_kvcache.builder.network.packed_weight import CONSTANT_TYPES
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.errors import BuildError, CheckpointError

pytestmark = [pytest.mark.trt, pytest.mark.filterwarnings("ignore:(?s).*are not")]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes every checkpoint of a test be opened with ``quantize``."""
    original = Checkpoint.open

    def use(quantize: str | None) -> None:
        monkeypatch.setattr(Checkpoint, "open", partial(original, quantize=quantize))

    return use


def define(rtx: Any, folder: Path, dtype: str, attention: str = "native", **more: Any) -> Defined:
    """Return the network of a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with recording(rtx, folder) as (checkpoint, constants, messages):
            options = resolved(checkpoint.config, **SIZES, dtype=dtype, attention=attention, **more)
            return Defined(
                rtx, define_decoder(checkpoint, options, options.cache_for(checkpoint.config), rtx, messages), options, constants
            )


def layers_of(defined: Defined) -> Iterator[tuple[str, Any]]:
    network = defined.definition.network
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        yield layer_kind(defined.tensorrt, layer), layer


def assert_computes_what_the_reference_engine_does(rtx: Any, folder: Path, dtype: str, attention: str = "native", **more: Any) -> Defined:
    defined = define(rtx, folder, dtype, attention, **more)
    network = Network(defined)
    sizes = {"batch": MAX_BATCH_SIZE, "length": MAX_SEQUENCE_LENGTH, "width": MAX_PREFILL_LENGTH}
    reference = rig.Rig(folder, **sizes, dtype=dtype, attention=attention)
    random = np.random.default_rng(1)
    tokens, padding = (random.integers(0, reference.model.vocab_size, (MAX_BATCH_SIZE, n)) for n in (24, MAX_PREFILL_LENGTH))
    for step, expected, new in zip(run(network, tokens, padding), run(reference, tokens, padding), STEPS, strict=True):
        computed = [slot for slot, count in enumerate(new) if count]
        assert_near(step[computed], expected[computed], LOGITS_TOLERANCE[dtype])
    for cache, expected in zip(network.caches(), reference.caches(), strict=True):
        for slot in range(MAX_BATCH_SIZE):
            assert_near(cache[slot, :, : total(slot)], expected[slot, :, : total(slot)], ROWS_TOLERANCE[dtype])
    return defined


@pytest.mark.parametrize(("case", "dtype"), each_once([(case,) for case in ALL_CASES], ("float32", "float16", "bfloat16")))
def test_every_format(rtx: Any, tmp_path: Path, case: str, dtype: str) -> None:
    quantize, config = ALL_CASES[case]
    write_quantized(tmp_path / "model", "llama", quantize, config)
    defined = assert_computes_what_the_reference_engine_does(rtx, tmp_path / "model", dtype)
    kinds = [kind for kind, _ in layers_of(defined)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpoint.open(tmp_path / "model") as checkpoint:
            packed = [name for name in checkpoint.tensor_names if checkpoint.quantized_weight(name) is not None]
            types = {CONSTANT_TYPES[kind] for kind in checkpoint.value_kinds}
    assert packed
    assert kinds.count("DEQUANTIZE") == len(packed)
    stored = [array for name, array in defined.constants.items() if name.endswith(".values")]
    assert {array.dtype.name for array in stored} == types
    assert len(stored) == len(packed)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", FP4_CASES)
def test_fp4_for_gpus_that_have_it(rtx: Any, tmp_path: Path, case: str, dtype: str) -> None:
    quantize, config = ALL_CASES[case]
    write_quantized(tmp_path / "model", "llama", quantize, config)
    defined = assert_computes_what_the_reference_engine_does(rtx, tmp_path / "model", dtype, compute_capabilities=("12.0", "12.1"))
    values = [array for name, array in defined.constants.items() if name.endswith(".values")]
    scales = [array for name, array in defined.constants.items() if name.endswith(".scales")]
    assert {array.dtype.name for array in values} == {"float4_e2m1fn"}
    assert {array.dtype.name for array in scales} == {"float8_e8m0fnu" if "mxfp4" in case else "float8_e4m3fn"}


@pytest.mark.parametrize("capabilities", [None, ("8.9", "12.0")])
def test_fp4_is_int8_where_a_gpu_has_none(rtx: Any, tmp_path: Path, capabilities: tuple[str, ...] | None) -> None:
    quantize, config = ALL_CASES["modelopt-nvfp4"]
    write_quantized(tmp_path / "model", "llama", quantize, config)
    defined = define(rtx, tmp_path / "model", "float16", compute_capabilities=capabilities)
    assert {array.dtype.name for name, array in defined.constants.items() if name.endswith(".values")} == {"int8"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_blocks_of_fp8_keep_one_scale(rtx: Any, tmp_path: Path, dtype: str) -> None:
    """Weights that are whole blocks have the scales of the checkpoint; of others each row has its own."""
    source = write_model(tmp_path / "small", hidden_size=32, intermediate_size=64, head_dim=16)
    config = {**FP8_CONFIG, "weight_block_size": [32, 16]}
    write_quantized(tmp_path / "model", str(source), fp8_blocks(block=(32, 16)), config)
    defined = assert_computes_what_the_reference_engine_does(rtx, tmp_path / "model", dtype)
    shapes = {name.split(".")[-2]: array.shape for name, array in defined.constants.items() if name.endswith("proj.scales")}
    assert shapes["gate_proj"] == (2, 2)
    assert shapes["down_proj"] == (1, 4)


def test_blocks_of_whole_rows_and_columns(rtx: Any, tmp_path: Path) -> None:
    """The blocks of FP8 lie over 24 rows, more than a head has, and the last one is smaller."""
    source = write_model(tmp_path / "small", hidden_size=32, intermediate_size=64, head_dim=16)
    config = {**FP8_CONFIG, "weight_block_size": [24, 16]}
    write_quantized(tmp_path / "model", str(source), fp8_blocks(block=(24, 16)), config)
    assert_computes_what_the_reference_engine_does(rtx, tmp_path / "model", "float32")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantize", ["int8", "int4", "int4:32,embedding=int8", "int8,embedding=int4"])
def test_rounded_to_nearest(rtx: Any, opened: Any, tmp_path: Path, quantize: str, tied: bool, dtype: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": tied}
    model = write_model(tmp_path / "model", **sizes, torch_dtype="bfloat16", scale=0.1)
    opened(quantize)
    defined = assert_computes_what_the_reference_engine_does(rtx, model, dtype)
    assert [kind for kind, _ in layers_of(defined)].count("DEQUANTIZE") == 7 + ("embedding" in quantize)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf(rtx: Any, tmp_path: Path, kind: str) -> None:
    """Scales of Q4_0 have both signs; rows of an embedding have no product that takes offsets, so its codes are int8."""
    pytest.importorskip("gguf")
    from tests.helpers.gguf_files import write_gguf

    write_gguf(tmp_path / "model", kind)
    defined = assert_computes_what_the_reference_engine_does(rtx, tmp_path / "model", "float16")
    assert defined.constants["model.embed_tokens.values"].dtype == np.int8
    assert defined.constants["lm_head.values"].dtype.name == {"Q8_0": "int8", "Q4_0": "int4"}[kind]


def test_a_head_of_its_own(rtx: Any, opened: Any, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)
    opened("int4,head=int8")
    defined = assert_computes_what_the_reference_engine_does(rtx, model, "float16")
    assert {"lm_head.values", "lm_head.scales"} <= set(defined.constants)
    assert defined.constants["lm_head.values"].dtype == np.int8
    assert "lm_head.weight" not in defined.constants


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("model", ["phi3-long", "qwen3_next", "nemotron_h", "ernie4_5"])
def test_weights_that_share_a_tensor(rtx: Any, opened: Any, model: str, quantize: str) -> None:
    """q, k and v of Phi-3 are rows of one tensor, as gate and up are; those of Qwen3-Next lie head by head; those of ERNIE in pairs."""
    opened(quantize)
    (attention, *_) = attentions_of(model, MAX_SEQUENCE_LENGTH)
    assert_computes_what_the_reference_engine_does(rtx, GOLDEN / model, "float32", attention)


@pytest.mark.parametrize("columns", [24, 20])
def test_inputs_that_are_not_whole_blocks(rtx: Any, tmp_path: Path, columns: int) -> None:
    """A block of TensorRT is the widest that all are made of: 8 or 4 of the 32 inputs, and the rows stay together."""
    source = write_model(tmp_path / "small", hidden_size=32, intermediate_size=64, head_dim=16)
    config = {**FP8_CONFIG, "weight_block_size": [32, columns]}
    write_quantized(tmp_path / "model", str(source), fp8_blocks(block=(32, columns)), config)
    defined = assert_computes_what_the_reference_engine_does(rtx, tmp_path / "model", "float32")
    shapes = {name.split(".")[-2]: array.shape for name, array in defined.constants.items() if name.endswith("proj.scales")}
    width = math.gcd(columns, 32)
    assert (shapes["gate_proj"], shapes["down_proj"]) == ((2, 32 // width), (1, 64 // width))


@pytest.mark.parametrize("quantize", ["int4", "int4:128,embedding=int4,head=int4:128"])
def test_rounded_in_groups_of_which_the_last_is_smaller(rtx: Any, opened: Any, tmp_path: Path, quantize: str) -> None:
    model = write_model(tmp_path / "model", hidden_size=48, intermediate_size=200, head_dim=16, scale=0.1)
    opened(quantize)
    defined = assert_computes_what_the_reference_engine_does(rtx, model, "float16")
    assert defined.constants["model.layers.0.mlp.down_proj.scales"].shape == (48, 25)  # 8 divides 200 and 32 and 128


def test_values_that_float16_cannot_hold(rtx: Any, tmp_path: Path) -> None:
    def too_large(weight: Any, random: Any) -> Any:
        stored, values = gptq()(weight, random)
        stored["scales"][:] = 60000
        return stored, values

    write_quantized(tmp_path / "model", "llama", too_large, {**GPTQ_CONFIG, "checkpoint_format": "gptq"})
    with pytest.raises((BuildError, CheckpointError), match=r"q_proj\.weight.*float16 cannot hold"):
        define(rtx, tmp_path / "model", "float16")
