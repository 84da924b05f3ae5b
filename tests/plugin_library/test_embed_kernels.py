"""The script that compiles the kernels for a plugin library and writes their table."""

import re
from pathlib import Path

import pytest

from tests.plugin_library.build import embed_kernels
from trt_kvcache.kernels.compile import CUBIN_DIR_VARIABLE, nvrtc_version
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


@pytest.fixture
def ptx(tmp_path, monkeypatch):
    """PTX that was compiled before: for each source bytes that name it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / f"cache/trt_kvcache/ptx/nvrtc-{nvrtc_version()}"
    folder.mkdir(parents=True)
    for variant in ("float16-64", "float16-64-int8"):
        for source in _SOURCES:
            name = f"{source}-{variant}"
            (folder / cubin_name(name, "sm_86")).with_suffix(".ptx").write_bytes(f"PTX of {name}".encode())


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.usefixtures("cubins", "ptx")
def test_kernels_of_all_combinations_are_embedded(tmp_path, jobs):
    archs, variants = ["--arch", "sm_86", "--arch", "sm_90"], ["--variant", "float16-64", "--kv-dtype", "same", "--kv-dtype", "int8"]
    embed_kernels().main([*archs, *variants, "--jobs", jobs, "--output", str(tmp_path / "out")])
    table = (tmp_path / "out/kernels.cpp").read_text()
    rows = re.findall(r'\{(\d+), (\w+), "float16", 64, (\S+), (\w+),', table)
    assert rows == [
        (arch, is_ptx, kv_dtype, early)
        for arch, is_ptx, early in (("86", "false", "false"), ("90", "false", "true"), ("86", "true", "false"))
        for kv_dtype in ("nullptr", '"int8"')
    ]
    assert "kNumAttentionKernels = 6;" in table
    included = re.findall(r'\.incbin "(.*)"', (tmp_path / "out/kernels.S").read_text())
    expected = [
        f"{source}-{variant} {arch}" for arch in ("sm_86", "sm_90") for variant in ("float16-64", "float16-64-int8") for source in _SOURCES
    ]
    expected += [f"PTX of {source}-{variant}" for variant in ("float16-64", "float16-64-int8") for source in _SOURCES]
    assert [Path(path).read_text() for path in included] == expected


@pytest.mark.usefixtures("cubins")
def test_a_library_may_have_machine_code_alone(tmp_path):
    embed_kernels().main(["--arch", "sm_86", "--variant", "float16-64", "--kv-dtype", "same", "--ptx", "none", "--output", str(tmp_path)])
    assert (tmp_path / "kernels.S").read_text().count(".incbin") == len(_SOURCES)


def test_ptx_of_an_architecture_with_instructions_of_its_own_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        embed_kernels().main(["--arch", "sm_90", "--variant", "float16-64", "--ptx", "sm_90", "--output", str(tmp_path)])
    assert "invalid choice: 'sm_90'" in capsys.readouterr().err


def test_a_variant_that_no_kernel_has_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        embed_kernels().main(["--arch", "sm_86", "--variant", "float16-72", "--output", str(tmp_path)])
    assert "invalid choice: 'float16-72'" in capsys.readouterr().err
