"""examples/cpp: compiled against the declarations, and run over a stand-in for TensorRT and CUDA, which computes nothing."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.helpers.engine_files import make_config, make_engine_folder
from tests.paths import GOLDEN, ROOT, SHIPPED
from tests.plugin_library.build import build_program, need_cmake
from tests.plugin_library.creators import DATA_TYPES
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.adapter_inputs import AdapterInputs
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.records import FileRecord
from trt_kvcache.engine_folder.v_outputs import v_outputs
from trt_kvcache.ops.int32_packing import packed_as_int32

need_cmake()

_HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def reader():
    """A program that prints what the example reads."""
    return build_program("print_config", _HERE / "print_config.cpp")


@pytest.fixture(scope="module")
def decode():
    """The program, over the stand-in."""
    return build_program("decode", ROOT / "examples/cpp/decode.cpp", _HERE / "runtime_stand_in.cpp")


def make_engine(folder, model, **changes):
    """Return an engine folder whose plan the stand-in reads."""
    with Checkpoint.open(model) as checkpoint:
        config = make_config(checkpoint, **changes)
        tensors = [*map(packed_as_int32, config.tensors), *config.v_outputs]
        lines = [f"{one.name} {DATA_TYPES[one.dtype]} {' '.join(map(str, one.shape))}" for one in tensors]
    return make_engine_folder(model, folder, plan="\n".join(lines).encode(), **changes)


_PLUGIN = {"attention_variant": "plugin", "tensorrt_flavour": "tensorrt"}
_LIBRARY = {"plugin_library": FileRecord.of([b"library"])}
_HYBRID = GOLDEN / "qwen3_next"
_V_OUTPUTS, _HYBRID_V_OUTPUTS = ({"v_outputs": v_outputs(Checkpoint.read_config(model), "float16")} for model in (SHIPPED, _HYBRID))


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (SHIPPED, {}),
        (SHIPPED, _PLUGIN | _LIBRARY),
        (SHIPPED, _PLUGIN | {"quantized": QuantizedKV("int8")}),
        (SHIPPED, _PLUGIN | _V_OUTPUTS),
        (_HYBRID, _PLUGIN),
        (_HYBRID, _PLUGIN | _HYBRID_V_OUTPUTS),
        (GOLDEN / "mamba2", {}),
    ],
)
def test_steps_are_those_of_a_session(decode, tmp_path, model, changes):
    """Profiles, tokens, lengths; caches in place, states from one buffer into the other, V outputs."""
    config = make_engine(tmp_path / "engine", model, **changes).config
    prompt = (1, 15, 27, 3, 4, 6, 7, 8, 9)
    arguments = [decode, tmp_path / "engine", "3", *map(str, prompt)]
    shown = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    lines = shown.splitlines()
    assert lines[0] == f"host code {int('plugin_library' in changes)}"
    assert lines[2::2] == ["5", "6", "7"]
    has_states = config.cache.mamba is not None
    expected = []
    for step, (profile, tokens, start) in enumerate(((0, prompt, 0), (1, (5,), 9), (1, (6,), 10))):
        words = [f"profile {profile}:", *map(str, tokens), f"kvcache_start_index={start}", f"last_token_ids={len(tokens) - 1}"]
        words += [f"new_lengths={len(tokens)}"] if has_states else []
        for one in config.tensors:
            if one.name.startswith("present_"):
                past = one.alias or one.name.removeprefix("present_")
                words.append(f"{past}={step}" + (" in place" if one.alias else ""))
        words += [f"v_outputs in {len(config.v_outputs)}"] if "v_outputs" in changes else []
        expected.append(" ".join(words))
    assert lines[1::2] == expected


def test_static_scales_have_no_values_here(decode, tmp_path):
    """The program does not read those of config.json."""
    make_engine(tmp_path / "engine", SHIPPED, **_PLUGIN, quantized=QuantizedKV("int8", "tensor", [(0.5, 0.25)] * 2))
    done = subprocess.run([decode, tmp_path / "engine", "1", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "finding values for the input kv_scales_0 failed.\n")


def test_inputs_for_adapters_and_for_rows_have_no_values_here(decode, tmp_path):
    inputs = AdapterInputs.of(Checkpoint.read_config(SHIPPED), rank=8)
    for changes, what in (({"adapters": inputs}, "inputs for adapters"), ({"max_embeddings": 4}, "an input for rows")):
        folder = make_engine(tmp_path / what, SHIPPED, **changes).path
        done = subprocess.run([decode, folder, "1", "1"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, f"an engine with {what} needs Python: opening {folder} failed.\n")


def test_an_engine_for_trees_needs_python(decode, tmp_path):
    folder = make_engine(tmp_path / "engine", SHIPPED, **_PLUGIN, max_logits_per_slot=9, draft_tree=9).path
    done = subprocess.run([decode, folder, "1", "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"an engine for trees of draft tokens needs Python: opening {folder} failed.\n")


@pytest.mark.parametrize(
    ("model", "changes"),
    [(SHIPPED, {}), (SHIPPED, _PLUGIN | _LIBRARY | _V_OUTPUTS), (SHIPPED, {"segmented": True}), (_HYBRID, _PLUGIN)],
)
def test_the_reader_reads_what_a_build_writes(reader, tmp_path, model, changes):
    make_engine_folder(model, tmp_path / "engine", **changes)
    config = EngineFolder.open(tmp_path / "engine").config
    shown = subprocess.run([reader, tmp_path / "engine"], capture_output=True, text=True, check=True).stdout.splitlines()
    names = config.names
    assert shown[0].split() == [names.input_ids, names.kvcache_start_index, names.last_token_ids, names.logits]
    flags = [str(int(flag)) for flag in (config.segments is None, "plugin_library" in changes)]
    assert shown[1].split() == [str(config.cache.max_sequence_length), str(config.model.vocab_size), *flags]
    count = len(config.profiles)
    assert shown[2 : 2 + count] == [f"{one.max_batch} {one.min_width} {one.max_width}" for one in config.profiles]
    assert shown[2 + count :] == [
        f"{one.name} {int(one.mode.value == 'input')} {one.alias or ''}/"
        + (one.name.removeprefix("present_") if "state" in one.name and one.mode.value == "output" and not one.alias else "")
        for one in config.tensors
    ] + [one.name for one in config.v_outputs]


def test_a_folder_of_before_has_no_v_outputs(reader, tmp_path):
    path = make_engine_folder(SHIPPED, tmp_path / "engine").path / "config.json"
    data = json.loads(path.read_text())
    del data["v_outputs"]
    before = subprocess.run([reader, tmp_path / "engine"], capture_output=True, text=True, check=True).stdout
    path.write_text(json.dumps(data))
    assert subprocess.run([reader, tmp_path / "engine"], capture_output=True, text=True, check=True).stdout == before


def test_an_output_that_is_neither_cache_nor_states_is_refused(reader, tmp_path):
    path = make_engine_folder(SHIPPED, tmp_path / "engine").path / "config.json"
    data = json.loads(path.read_text())
    next(one for one in data["tensors"] if one["name"] == "present_k_cache_0")["alias"] = None
    path.write_text(json.dumps(data))
    done = subprocess.run([reader, tmp_path / "engine"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "config.json: expected the alias, or the states, of `present_k_cache_0`, got neither.\n"


def test_a_folder_without_a_configuration_is_refused(reader, tmp_path):
    done = subprocess.run([reader, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path}: expected an engine folder, it has no config.json.\n"
