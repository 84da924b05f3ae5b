"""The script that compiles the kernels for a plugin library and writes their table."""

import re
from pathlib import Path

import pytest

from tests.plugin_library.build import embed_kernels
from trt_kvcache.kernels.compile import CUBIN_DIR_VARIABLE
from trt_kvcache.kernels.sources import cubin_name

_SOURCES = ("attention_decode", "attention_decode_few", "attention_prefill")


@pytest.fixture
def cubins(tmp_path, monkeypatch):
    """A folder of machine code that was compiled ahead of time: for each source bytes that name it."""
    for arch in ("sm_86", "sm_90"):
        for variant in ("float16-64", "float16-64-int8"):
            for source in _SOURCES:
                name = f"{source}-{variant}"
                (tmp_path / cubin_name(name, arch)).write_bytes(f"{name} {arch}".encode())
    monkeypatch.setenv(CUBIN_DIR_VARIABLE, str(tmp_path))


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.usefixtures("cubins")
def test_kernels_of_all_combinations_are_embedded(tmp_path, jobs):
    archs, variants = ["--arch", "sm_86", "--arch", "sm_90"], ["--variant", "float16-64", "--kv-dtype", "same", "--kv-dtype", "int8"]
    embed_kernels().main([*archs, *variants, "--jobs", jobs, "--output", str(tmp_path / "out")])
    table = (tmp_path / "out/kernels.cpp").read_text()
    rows = re.findall(r'\{"(sm_\d+)", "float16", 64, (\S+), (\w+),', table)
    assert rows == [("sm_86", "nullptr", "false"), ("sm_86", '"int8"', "false"), ("sm_90", "nullptr", "true"), ("sm_90", '"int8"', "true")]
    assert "kNumAttentionKernels = 4;" in table
    included = re.findall(r'\.incbin "(.*)"', (tmp_path / "out/kernels.S").read_text())
    expected = [
        f"{source}-{variant} {arch}" for arch in ("sm_86", "sm_90") for variant in ("float16-64", "float16-64-int8") for source in _SOURCES
    ]
    assert [Path(path).read_text() for path in included] == expected


def test_a_variant_that_no_kernel_has_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        embed_kernels().main(["--arch", "sm_86", "--variant", "float16-72", "--output", str(tmp_path)])
    assert "invalid choice: 'float16-72'" in capsys.readouterr().err
