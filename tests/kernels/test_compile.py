"""From ``plugins/*.cu`` to machine code: NVRTC (on the CPU: it needs no GPU), the folder made ahead of time, the cache."""

import re
import threading

import pytest

from trt_kvcache.errors import CudaError
from trt_kvcache.kernels import compile, sources
from trt_kvcache.kernels.attention_tiles import HEAD_DIMS, STORED_TYPES

#: Of each kind of machine code one: without and with instructions for warpgroups, and the newest GPUs.
EACH_KIND = ("sm_87", "sm_90", "sm_120")
OTHERS = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_110", "sm_121")

#: Parts of all variants, which compile side by side.
PARTS = 12


def names_by_file(arch):
    """Return a variant of each source, and of attention one with quantized K and V too: others for other architectures."""
    number = compile.ARCHITECTURES.index(arch)
    shape = f"{('float16', 'bfloat16')[number % 2]}-{HEAD_DIMS[number % len(HEAD_DIMS)]}"
    of_attention = (shape, f"{shape}-{tuple(STORED_TYPES)[number % len(STORED_TYPES)]}")
    found = {}
    for name in sources.source_names():
        found.setdefault(name.partition("-")[0], []).append(name)
    for file, names in found.items():
        attention = [name for name in names if name.partition("-")[2] in of_attention]
        found[file] = attention or [names[number % len(names)]]
    return found


def assert_compiles(names, arch):
    for name in names:
        code = compile.compile_cubin(name, arch)
        assert code[:4] == b"\x7fELF"
        assert int.from_bytes(code[18:20], "little") == 190  # EM_CUDA


@pytest.mark.long
@pytest.mark.parametrize("arch", EACH_KIND)
def test_each_source_for_one_architecture(arch):
    """Prefill, which has instructions for warpgroups on one of them, for another one too."""
    names = names_by_file(arch)
    assert_compiles([name for file in sorted(names)[EACH_KIND.index(arch) :: len(EACH_KIND)] for name in names[file]], arch)
    if arch != "sm_87":
        assert_compiles(names["attention_prefill"][:1], arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*EACH_KIND, *OTHERS])
def test_every_source_for_every_architecture(arch):
    assert_compiles([name for of_file in names_by_file(arch).values() for name in of_file], arch)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", EACH_KIND)
def test_every_variant(arch, part):
    assert_compiles(sources.source_names()[part::PARTS], arch)


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["", *(f"-{kind}" for kind in STORED_TYPES)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_heads_of_512_spill_no_registers(arch, stored, monkeypatch):
    monkeypatch.syspath_prepend(str(sources.source_folder().parent / "benchmarks"))
    from cubin import kernel_resources

    code = compile.compile_cubin(f"attention_prefill-float16-512{stored}", arch)
    assert {name: found.local_nbytes for name, found in kernel_resources(code, arch).items() if found.local_nbytes} == {}


def test_what_nvrtc_says():
    with pytest.raises(CudaError, match=r"^NVRTC: lengths\.cu for sm_1 does not compile: .*") as caught:
        compile.compile_cubin("lengths", "sm_1")
    assert "gpu-architecture" in str(caught.value)


def test_headers_are_found_from_the_folder_of_the_sources(tmp_path, monkeypatch):
    (tmp_path / "part").mkdir()
    (tmp_path / "one.cu").write_text('#include "part/common.cuh"\nextern "C" __global__ void one(int* p) { *p = VALUE; }\n')
    (tmp_path / "part" / "common.cuh").write_text("#define VALUE 1\n")
    for module in (compile, sources):
        monkeypatch.setattr(module, "source_folder", lambda: tmp_path)
    assert compile.compile_cubin("one", "sm_90")[:4] == b"\x7fELF"


class TestWhereFrom:
    @pytest.fixture
    def compiled(self, tmp_path, monkeypatch):
        """What is compiled, into fresh folders for the cache and for what was compiled ahead of time."""
        compiled = []

        def compile_cubin(name, arch):
            compiled.append((name, arch))
            return f"{name} for {arch}".encode()

        monkeypatch.setattr(compile, "compile_cubin", compile_cubin)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("TRT_KVCACHE_CUBIN_DIR", str(tmp_path / "ahead"))
        return compiled

    def make_ahead(self, folder):
        (folder / "ahead").mkdir()
        (folder / "ahead" / sources.cubin_name("lengths", "sm_90")).write_bytes(b"ahead of time")

    def test_compiled_once(self, tmp_path, compiled):
        for _ in range(2):
            assert compile.cubin("lengths", "sm_90") == b"lengths for sm_90"
        assert compile.cubin("lengths", "sm_80") == b"lengths for sm_80"
        assert compiled == [("lengths", "sm_90"), ("lengths", "sm_80")]
        files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
        names = [re.escape(sources.cubin_name("lengths", arch)) for arch in ("sm_80", "sm_90")]
        for path, name in zip(files, names, strict=True):
            assert re.fullmatch(rf"cache/trt_kvcache/cubins/nvrtc-\d+\.\d+/{name}", path)

    def test_ahead_of_time_comes_first(self, tmp_path, compiled):
        compile.cubin("lengths", "sm_90")
        self.make_ahead(tmp_path)
        assert compile.cubin("lengths", "sm_90") == b"ahead of time"
        assert compile.cubin("lengths", "sm_80") == b"lengths for sm_80"
        assert compiled == [("lengths", "sm_90"), ("lengths", "sm_80")]

    def test_a_cache_that_cannot_be_written(self, tmp_path, compiled):
        (tmp_path / "cache").write_text("a file in the place of the folder")
        for _ in range(2):
            assert compile.cubin("lengths", "sm_90") == b"lengths for sm_90"
        assert len(compiled) == 2

    def test_ahead_of_the_launch(self, compiled, monkeypatch):
        """A launch waits for a variant that is being compiled, and each is compiled once."""
        monkeypatch.setattr(compile, "_ahead", set())
        may_end, compile_now = threading.Event(), compile.compile_cubin

        def compile_later(name, arch):
            assert may_end.wait(30)
            return compile_now(name, arch)

        monkeypatch.setattr(compile, "compile_cubin", compile_later)
        for _ in range(2):
            compile.compile_ahead(["kv", "lengths", "kv"], "sm_90")
        found = []
        launches = [threading.Thread(target=lambda: found.append(compile.cubin("lengths", "sm_90"))) for _ in range(2)]
        for launch in launches:
            launch.start()
        assert compiled == []
        may_end.set()
        for launch in launches:
            launch.join()
        assert found == [b"lengths for sm_90"] * 2
        assert compile.cubin("kv", "sm_90") == b"kv for sm_90"
        assert sorted(compiled) == [("kv", "sm_90"), ("lengths", "sm_90")]

    def test_an_error_ahead_of_the_launch_is_raised_by_the_launch(self, compiled, monkeypatch):
        monkeypatch.setattr(compile, "_ahead", set())

        def fail(name, arch):
            compiled.append((name, arch))
            raise CudaError(f"{name} does not compile")

        monkeypatch.setattr(compile, "compile_cubin", fail)
        compile.compile_ahead(["lengths"], "sm_90")
        with pytest.raises(CudaError, match="lengths does not compile"):
            compile.cubin("lengths", "sm_90")

    @pytest.mark.usefixtures("compiled")
    def test_without_nvrtc(self, tmp_path, monkeypatch):
        from cuda.bindings import nvrtc
        from cuda.pathfinder import DynamicLibNotFoundError

        def not_found():
            raise DynamicLibNotFoundError("libnvrtc.so.13")

        monkeypatch.setattr(nvrtc, "nvrtcVersion", not_found)
        with pytest.raises(CudaError) as caught:
            compile.cubin("lengths", "sm_90")
        assert str(caught.value) == (
            "NVRTC was not found, which compiles the CUDA kernels. Install trt-kvcache[cuda], or set TRT_KVCACHE_CUBIN_DIR "
            "to a folder made by `make plugins`."
        )
        self.make_ahead(tmp_path)
        assert compile.cubin("lengths", "sm_90") == b"ahead of time"

    @pytest.mark.usefixtures("compiled")
    def test_make_plugins(self, tmp_path, capsys):
        output = tmp_path / "plugins"
        output.mkdir()
        (output / "lengths-0123456789abcdef.sm_90.cubin").write_bytes(b"of older sources")
        compile.main(["--output", str(output)])
        expected = {sources.cubin_name(name, arch) for name in sources.source_names() for arch in compile.ARCHITECTURES}
        assert {path.name for path in output.iterdir()} == expected
        assert len(capsys.readouterr().out.splitlines()) == len(expected)
        compile.main(["--output", str(output), "--arch", "sm_90", "--arch", "sm_87"])
        assert len(list(output.iterdir())) == 2 * len(sources.source_names())
