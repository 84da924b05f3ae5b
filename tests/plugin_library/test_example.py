"""examples/cpp: compiled against the declarations, and not run; its reader of config.json is run."""

import subprocess

import pytest

from tests.helpers.engine_files import make_engine_folder
from tests.paths import ROOT
from tests.plugin_library.build import DECLARATIONS, need_cmake, run
from trt_kvcache.engine_folder.folder import EngineFolder

need_cmake()

_COMPILE = ("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-isystem", DECLARATIONS)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A program that prints what the example reads."""
    program = tmp_path_factory.mktemp("reader") / "print_config"
    run(*_COMPILE, ROOT / "tests/plugin_library/print_config.cpp", "-o", program)
    return program


def test_the_program_compiles(tmp_path):
    run(*_COMPILE, "-c", ROOT / "examples/cpp/decode.cpp", "-o", tmp_path / "decode.o")


@pytest.mark.parametrize("changes", [{}, {"attention_variant": "plugin", "tensorrt_flavour": "tensorrt"}, {"segmented": True}])
def test_the_reader_reads_what_a_build_writes(reader, tmp_path, changes):
    make_engine_folder(ROOT / "examples/tiny-llama", tmp_path / "engine", **changes)
    config = EngineFolder.open(tmp_path / "engine").config
    shown = subprocess.run([reader, tmp_path / "engine"], capture_output=True, text=True, check=True).stdout.splitlines()
    names = config.names
    assert shown[0].split() == [names.input_ids, names.kvcache_start_index, names.last_token_ids, names.logits]
    assert shown[1].split() == ["38", str(config.model.vocab_size), str(int(config.segments is None))]
    count = len(config.profiles)
    assert shown[2 : 2 + count] == [f"{one.max_batch} {one.min_width} {one.max_width}" for one in config.profiles]
    assert shown[2 + count :] == [f"{one.name} {int(one.mode.value == 'input')} {one.alias or ''}" for one in config.tensors]


def test_a_folder_without_a_configuration_is_refused(reader, tmp_path):
    done = subprocess.run([reader, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path}: expected an engine folder, it has no config.json.\n"
