"""Options that cannot be served are refused before anything is made."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
from numpydoc.docscrape import FunctionDoc

from tests.golden.weights import VISION
from tests.helpers.assertions import raises
from tests.helpers.fake_tensorrt import fake_module
from tests.helpers.models import SMALL, changed_model, model_of, with_layers, with_mixer
from tests.paths import GOLDEN
from trt_kvcache import NetworkScript, build_engine, estimate_build
from trt_kvcache.builder import resolved_options
from trt_kvcache.builder.attention_choice import BuildTarget
from trt_kvcache.builder.options import BuildKeywords, BuildOptions
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.cache.config import KVCacheConfig, KVLayout
from trt_kvcache.cache.kv_layer_config import KVLayerConfig
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.cli.build import BuildFlags
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import ModelConfig
from trt_kvcache.trt.log import TensorRTLog
from trt_kvcache.trt.module import TensorRT, load

GOOD: dict[str, Any] = {"max_batch_size": 3, "max_sequence_length": 40, "max_prefill_length": 11}
MODEL = ModelConfig.from_dict(SMALL)


def resolve(model: ModelConfig = MODEL, **options: Any) -> ResolvedOptions:
    """Return options for a model."""
    return ResolvedOptions.of_model(BuildOptions(**{**GOOD, **options}), model)


def full_tensorrt(version: str) -> TensorRT:
    module = fake_module(version)
    return TensorRT(module=module, flavour="tensorrt", version=version, log=TensorRTLog(module))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size: expected at least 1, got 0."),
        ({"max_batch_size": -2}, "max_batch_size: expected at least 1, got -2."),
        ({"max_sequence_length": 0}, "max_sequence_length: expected at least 1, got 0."),
        ({"max_prefill_length": 0}, "max_prefill_length: expected at least 1, got 0."),
        ({"max_prefill_length": 2.5}, "max_prefill_length: expected an integer, got 2.5."),
        ({"max_batch_size": True}, "max_batch_size: expected an integer, got True."),
        ({"max_sequence_length": "40"}, "max_sequence_length: expected an integer, got '40'."),
        (
            {"max_prefill_length": 41},
            "max_prefill_length: expected at most max_sequence_length=40, got 41. Longer prompts are prefilled in chunks of this length.",
        ),
        ({"dtype": "float64"}, "dtype: expected one of float16, bfloat16, float32, got 'float64'."),
        ({"dtype": "int8"}, "dtype: expected one of float16, bfloat16, float32, got 'int8'."),
        ({"attention": "causal"}, "attention: expected one of auto, native, mask, plugin, got 'causal'."),
        ({"attention": ["native", "mask"]}, "attention: expected one of auto, native, mask, plugin, got ['native', 'mask']."),
        ({"flavour": "rtx"}, "flavour: expected one of auto, tensorrt, tensorrt_rtx, got 'rtx'."),
        ({"v_outputs": "auto"}, "v_outputs: expected True or False, got 'auto'."),
        ({"packed_kernels": "auto"}, "packed_kernels: expected True or False, got 'auto'."),
        ({"packed_kernels": True, "plugin_layers": "segments"}, "packed_kernels: expected plugin_layers=one-plan with it, got segments."),
        (
            {"packed_kernels": True, "plugin_library": "file"},
            "plugin_library: expected no packed_kernels with it, got both: these run in Python. Leave one out.",
        ),
        ({"adapters_rank": 8, "adapters_modules": 5}, 'adapters_modules: expected a sequence such as ("q_proj", "v_proj"), got 5.'),
        ({"compute_capabilities": ()}, 'compute_capabilities: expected a sequence such as ("8.6", "12.0"), got ().'),
        ({"compute_capabilities": (8.6,)}, 'compute_capabilities: expected a sequence such as ("8.6", "12.0"), got (8.6,).'),
        ({"adapters_rank": 0}, "adapters_rank: expected an integer from 1 to 2147483640, got 0."),
        ({"adapters_rank": 8, "adapters_modules": ()}, 'adapters_modules: expected a sequence such as ("q_proj", "v_proj"), got ().'),
        ({"adapters_rank": 8, "adapters_modules": (3,)}, 'adapters_modules: expected a sequence such as ("q_proj", "v_proj"), got (3,).'),
        ({"draft_head": ""}, "draft_head: expected mtp or the folder of an EAGLE-3 head, got ''."),
        ({"draft_head": 3}, "draft_head: expected mtp or the folder of an EAGLE-3 head, got 3."),
        ({"adapters_modules": "q_proj"}, "adapters_modules: expected adapters_rank with it, got q_proj alone."),
        ({"adapters_rank": 8, "adapter": "lora"}, "adapters_rank: expected none with adapter, which is merged, got 8."),
        ({"max_embeddings": -1}, "max_embeddings: expected an integer from 0 to 2147483647, got -1."),
        ({"max_embeddings": 2.5}, "max_embeddings: expected an integer, got 2.5."),
        ({"max_embeddings": None}, "max_embeddings: expected an integer, got None."),
        ({"compute_capabilities": ("8.6", "8.6")}, "compute_capabilities: expected each one once, got 8.6, 8.6."),
    ],
)
def test_values_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        BuildOptions(**{**GOOD, **change})
    assert str(raised.value) == message


def test_one_compute_capability_is_a_sequence_of_one() -> None:
    assert BuildOptions(compute_capabilities="8.6").compute_capabilities == ("8.6",)


def test_an_option_that_does_not_exist_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"^build: unknown option n_ctx\. Did you mean max_sequence_length instead of n_ctx\? Expected "):
        build_engine("model", "engine", n_ctx=3)  # type: ignore[call-arg]


def test_options_that_were_left_out_are_the_models() -> None:
    options = ResolvedOptions.of_model(BuildOptions(max_logits_per_slot="all"), MODEL)
    assert (options.max_batch_size, options.max_sequence_length, options.max_prefill_length, options.max_logits_per_slot) == (1, 64, 64, 64)
    assert (options.dtype, options.attention) == ("float16", "native")
    assert ResolvedOptions.of_model(BuildOptions(kv_dtype="int8"), with_mixer(MODEL, head_dim=64)).attention == "plugin"
    assert ResolvedOptions.of_model(BuildOptions(), with_mixer(MODEL, window=5)).attention == "mask"


def test_inputs_for_adapters_are_of_the_model() -> None:
    inputs = resolve(adapters_rank=9, adapters_modules="down_proj").adapter_inputs
    assert inputs is not None
    assert (inputs.rank, inputs.modules) == (16, ("down_proj",))
    assert resolve().adapter_inputs is None
    assert resolve().adapter_tensors(MODEL) == ()
    [slots, *_] = resolve(adapters_rank=9, max_batch_size=1).adapter_tensors(MODEL)
    assert slots.shape == (2,), "decode steps of full TensorRT take two slots at least"
    with raises(ConfigError, "adapters_modules", expected="q_proj, k_proj", got="'query'"):
        resolve(adapters_rank=9, adapters_modules=("q_proj", "query"))
    wide = with_mixer(MODEL, head_dim=64)
    assert resolve(wide, adapters_rank=9, attention="plugin").adapter_inputs is not None
    with raises(ConfigError, "adapters_rank", expected="plugin_layers=one-plan", got="segments"):
        resolve(wide, adapters_rank=9, attention="plugin", plugin_layers="segments")
    assert resolve(wide, adapters_rank=9, attention="native", plugin_layers="segments").adapter_inputs is not None


def test_a_build_with_a_draft_head_can_verify_drafts() -> None:
    assert resolve(draft_head="mtp").max_logits_per_slot == 11
    assert resolve(draft_head="mtp", max_prefill_length=30).max_logits_per_slot == 17
    assert resolve(draft_head="mtp", max_logits_per_slot=4).max_logits_per_slot == 4
    wide = with_mixer(MODEL, head_dim=64)
    with raises(ConfigError, "draft_head", expected="plugin_layers=one-plan", got="segments"):
        resolve(wide, draft_head="mtp", attention="plugin", plugin_layers="segments")


def test_the_options_of_the_build_of_a_draft_head() -> None:
    """Lengths are limited by the positions of the head, and its attention variant is chosen again."""
    wide = with_mixer(MODEL, head_dim=64)
    asked = {"draft_head": "mtp", "kv_dtype": "int8", "adapters_rank": 8, "embed_weights": True, "quantize": "int8", "max_batch_size": 3}
    head = resolve(wide, **asked, max_logits_per_slot=5, dtype="bfloat16").of_draft_head(replace(wide, max_position_embeddings=6))
    assert (head.max_batch_size, head.max_sequence_length, head.max_prefill_length, head.max_logits_per_slot) == (3, 6, 6, 1)
    assert (head.dtype, head.attention, head.quantize, head.hidden_layers) == ("bfloat16", "native", "int8", "final_norm")
    assert (head.draft_head, head.kv_dtype, head.adapters_rank, head.adapter_inputs, head.embed_weights) == (None,) * 4 + (False,)
    assert resolve(wide, attention="mask").of_draft_head(wide).attention == "mask"
    trees = resolve(wide, draft_head="mtp", draft_tree=5, attention="plugin").of_draft_head(wide)
    assert (trees.draft_tree, trees.max_logits_per_slot, trees.attention) == (5, 5, "plugin")


def test_rows_are_refused_where_a_model_needs_more_for_them() -> None:
    assert resolve().embedding_tensors(MODEL) == ()
    [spec] = resolve(max_embeddings=3, dtype="float32").embedding_tensors(MODEL)
    assert (spec.shape, spec.dtype) == ((3, MODEL.hidden_size), "float32")
    for name, needed in (("gemma3", "attention both ways inside an image"), ("qwen2_5_vl", "positions of three axes")):
        with raises(ConfigError, "max_embeddings", expected=f"0 for {name}, which needs {needed}", got="3"):
            resolve(Checkpoint.read_config(VISION / name), max_embeddings=3)
    with raises(ConfigError, "max_embeddings", expected="0 for gemma4_text, which needs per-layer embeddings", got="3"):
        resolve(model_of("gemma4-ple"), max_embeddings=3)
    most = (2**31 - 1) // MODEL.hidden_size
    assert resolve(max_embeddings=most).max_embeddings == most
    with raises(ConfigError, "max_embeddings", expected=f"at most {most}", got=str(most + 1)):
        resolve(max_embeddings=most + 1)
    wide = with_mixer(MODEL, head_dim=64)
    operations = {"attention": "plugin", "operations": {"embedding": "embedding"}}
    assert resolve(wide, **operations).max_embeddings == 0
    with raises(ConfigError, "operations", expected="none in place of embedding with max_embeddings", got="embedding"):
        resolve(wide, **operations, max_embeddings=3)


def test_keywords_are_the_fields() -> None:
    hints = get_type_hints(BuildKeywords)
    assert hints == {field.name: get_type_hints(BuildOptions)[field.name] for field in fields(BuildOptions)}


def test_the_command_has_a_flag_for_every_option() -> None:
    assert BuildFlags().keywords() == vars(BuildOptions())


@pytest.mark.parametrize("function", [build_engine, estimate_build, NetworkScript])
def test_every_option_is_shown_by_what_takes_it(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    entries = {entry.name for entry in FunctionDoc(function)["Parameters"]}
    for field in fields(BuildOptions):
        assert parameters[field.name].default == field.default
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert field.name in entries
    assert "options" not in parameters


@pytest.mark.parametrize("head_dim", [8, 20, 34, 264])
def test_head_dim_without_attention_kernels(head_dim: int) -> None:
    with raises(ConfigError, "head_dim", expected="multiple of 8 from 16 to 256"):
        resolve(with_mixer(MODEL, head_dim=head_dim), attention="mask").cache_for(with_mixer(MODEL, head_dim=head_dim))


def test_head_dim_of_our_own_kernels_alone() -> None:
    model = with_mixer(MODEL, head_dim=512)
    assert resolve(model, attention="plugin").cache_for(model).layers[0].head_dim == 512


@pytest.mark.parametrize("head_dim", [16, 24, 256])
def test_head_dim_with_them(head_dim: int) -> None:
    assert resolve(with_mixer(MODEL, head_dim=head_dim)).cache_for(with_mixer(MODEL, head_dim=head_dim)).layers[0].head_dim == head_dim


def test_what_the_network_does_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved_options, "COMPUTED_FEATURES", frozenset())
    message = r"^layers\[0\]\.mixer\.window = 5: TensorRT's network does not support sliding window yet \(llama\)\."
    with pytest.raises(ConfigError, match=message):
        resolve(attention="native").cache_for(with_mixer(MODEL, window=5))


def test_longer_than_the_model_was_made_for() -> None:
    options = resolve(max_sequence_length=65)
    with raises(ConfigError, "max_sequence_length", expected="at most 64", got=65):
        options.cache_for(MODEL)
    assert resolve(max_sequence_length=64).cache_for(MODEL).max_sequence_length == 64


def test_bfloat16_where_the_gpu_has_none() -> None:
    options = resolve(dtype="bfloat16", compute_capabilities=("8.6", "7.5"))
    with pytest.raises(ConfigError, match=r"dtype: GPUs of compute capability 7\.5 have no bfloat16\. Build with dtype float16\."):
        options.cache_for(MODEL)


def test_cache_of_a_model() -> None:
    cache = resolve(with_layers(MODEL, 2), dtype="bfloat16").cache_for(with_layers(MODEL, 2))
    assert cache == KVCacheConfig(
        layers=(KVLayerConfig(num_kv_heads=2, head_dim=24),) * 2,
        max_batch_size=3,
        max_sequence_length=40,
        dtype="bfloat16",
        layout=KVLayout.SEPARATE,
    )
    assert resolve(MODEL).cache_for(MODEL).dtype == "float16"  # the checkpoint's


def test_full_tensorrt_builds_for_the_gpu_at_hand() -> None:
    with pytest.raises(ConfigError, match="compute_capabilities: full TensorRT builds for the GPU it runs on"):
        resolve(attention="mask", compute_capabilities=("8.6",)).check_tensorrt(full_tensorrt("11.4.0"))


@pytest.mark.trt
def test_compute_capabilities_that_rtx_supports() -> None:
    rtx = load("tensorrt_rtx")
    resolve(compute_capabilities=("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")).check_tensorrt(rtx)
    for unknown in ("9.0", "86", "8"):
        with raises(ConfigError, "compute_capabilities", expected="7.5, 8.0", got=f"'{unknown}'"):
            resolve(compute_capabilities=("8.6", unknown)).check_tensorrt(rtx)


def test_a_window_that_no_sequence_exceeds_is_none() -> None:
    resolve(with_mixer(MODEL, window=40)).cache_for(with_mixer(MODEL, window=40))


#: Of a model that the attention kernels run.
PLUGIN_MODEL = with_mixer(MODEL, head_dim=64)
STATES_ALONE = Checkpoint.read_config(GOLDEN / "mamba2")


def v_outputs(
    model: ModelConfig = PLUGIN_MODEL, release: tuple[int, ...] | None = (10, 13), *, is_rtx: bool = False, **options: Any
) -> bool:
    """Return whether V is an output of an engine of this TensorRT."""
    target = BuildTarget(tensorrt="this TensorRT", is_rtx=is_rtx, release=release)
    return ResolvedOptions.of_model(BuildOptions(**{**GOOD, **options}), model, target).v_outputs


@pytest.mark.parametrize(
    ("release", "expected"),
    [((10, 3), False), ((10, 12), False), ((10, 13), True), ((10, 14), True), ((10, 15), False), ((11, 4), False), (None, False)],
)
def test_v_is_an_output_of_engines_with_plugin_layers_of_two_releases(release: tuple[int, ...] | None, expected: bool) -> None:
    assert v_outputs(release=release) is expected
    assert v_outputs(release=release, v_outputs=True)
    assert not v_outputs(release=release, v_outputs=False)
    assert v_outputs(release=release, kv_dtype="int8") is expected
    assert v_outputs(release=release, operations={"attention": "attention"}) is expected


def test_a_model_with_per_layer_embeddings_has_no_other_operation_for_its_embedding() -> None:
    """Rows that do not belong to token ids would have no per-layer rows."""
    model = changed_model("gemma4-ple", head_dim=64, global_head_dim=64)
    with raises(ConfigError, "operations", expected="none in place of embedding for a model with per-layer embeddings", got="embedding"):
        resolve(model, attention="plugin", operations={"embedding": "embedding"})
    assert resolve(model, attention="plugin", operations={"attention": "attention"}).attention == "plugin"


def test_v_is_no_output_where_no_plugin_layer_reads_it() -> None:
    assert not v_outputs(release=(10, 15), attention="mask")
    assert not v_outputs(release=(10, 13), is_rtx=True, attention="plugin")
    assert not v_outputs(STATES_ALONE)


@pytest.mark.parametrize(
    ("model", "change", "got"),
    [
        (PLUGIN_MODEL, {"attention": "mask", "release": (10, 15)}, "mask attention with this TensorRT"),
        (PLUGIN_MODEL, {"attention": "plugin", "is_rtx": True}, "plugin attention with this TensorRT"),
        (PLUGIN_MODEL, {"attention": "plugin", "plugin_layers": "segments"}, "plugin attention with this TensorRT"),
        (MODEL, {"release": (10, 15)}, "mask attention with this TensorRT"),  # of a head_dim that our kernels do not have
        (STATES_ALONE, {}, "mamba2, which has no attention layers with this TensorRT"),
    ],
)
def test_v_as_an_output_needs_plugin_layers_of_full_tensorrt(model: ModelConfig, change: dict[str, Any], got: str) -> None:
    with raises(ConfigError, "v_outputs", expected="plugin layers of full TensorRT", got=got):
        v_outputs(model, **change, v_outputs=True)


def test_the_next_variant_has_no_v_outputs() -> None:
    target = BuildTarget(tensorrt="this TensorRT", is_rtx=False, release=(10, 15))
    options = ResolvedOptions.of_model(BuildOptions(**GOOD, v_outputs=True), PLUGIN_MODEL, target)
    following = options.next_attention()
    assert following is not None
    assert (options.attention, options.v_outputs, following.attention, following.v_outputs) == ("plugin", True, "mask", False)


def test_an_engine_for_trees_has_their_logits_and_an_input() -> None:
    wide = with_mixer(MODEL, head_dim=64)
    options = resolve(wide, max_prefill_length=40, draft_tree=24, max_batch_size=1)
    assert (options.attention, options.max_logits_per_slot, options.profiles[-1].max_width) == ("plugin", 24, 24)
    assert options.choice.reason == "no other variant takes trees of draft tokens"
    [ancestors] = options.tree_tensors(wide)
    assert (ancestors.name, ancestors.dtype, ancestors.shape) == ("ancestors", "int32", (2, 64, 2))
    assert resolve(wide, max_prefill_length=40, draft_tree=24, max_logits_per_slot=30).max_logits_per_slot == 30
    assert resolve(wide, max_prefill_length=40, attention="plugin", max_logits_per_slot=30).tree_tensors(wide) == ()
    assert resolve(wide, max_prefill_length=40, attention="plugin", max_logits_per_slot=30).profiles[-1].max_width == 17


@pytest.mark.parametrize(
    ("options", "expected", "got"),
    [
        ({"attention": "mask"}, "plugin attention", "mask"),
        ({"attention": "native"}, "plugin attention", "native"),
        ({"plugin_layers": "segments"}, "plugin_layers=one-plan", "segments"),
        ({"max_prefill_length": 23}, "max_prefill_length=23", 24),
        ({"plugin_library": "lib.so"}, "no plugin_library", "lib.so"),
        ({"operations": {"attention": "attention"}}, "no operation in place of attention", "attention"),
    ],
    ids=str,
)
def test_options_that_an_engine_for_trees_cannot_have(options: Any, expected: str, got: Any) -> None:
    with raises(ConfigError, "draft_tree", expected=expected, got=got):
        resolve(with_mixer(MODEL, head_dim=64), **{"draft_tree": 24, "max_prefill_length": 40, **options})


def test_models_that_have_no_engine_for_trees() -> None:
    with raises(ConfigError, "draft_tree", expected="a model without recurrent states", got="bamba"):
        resolve(model_of("bamba"), draft_tree=9)
    for number in (1, 65):
        with raises(ConfigError, "draft_tree", expected="2 to 64", got=number):
            BuildOptions(draft_tree=number)
