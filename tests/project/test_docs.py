"""The documentation: nothing public is left out, its pictures and tables are those of the code."""

import importlib
import inspect
import re
import subprocess
import sys

import pytest

import trt_kvcache
from tests.paths import ROOT
from tests.project.test_layers import LAYERS
from trt_kvcache import errors

DOCS = ROOT / "docs"

#: Every public function, field and kernel of the C++ interfaces that the managers and kernels follow.
CPP_NAMES = {
    "append",
    "CacheConfig",
    "captureConvStates",
    "captureKVCache",
    "captureRecurrentStates",
    "captureSSMStates",
    "clearMambaStates",
    "commitSequenceLength",
    "compactBatch",
    "create_sequence",
    "destroy_all_sequences",
    "destroy_sequence",
    "deviceLayerInfos",
    "enable_swapping",
    "get",
    "getActiveBatchSize",
    "getCombinedKVCache",
    "getCombinedKVCacheForDecoderLayer",
    "getConfig",
    "getConvState",
    "getConvStateForLayer",
    "getKVCacheAllEmpty",
    "getKVCacheBuffer",
    "getKVCacheLengths",
    "getKVCacheManager",
    "getKVHeadDimGroups",
    "getLayerConfig",
    "getMambaCacheManager",
    "getRecurrentState",
    "getSeparateKVCache",
    "getSeparateKVCacheForDecoderLayer",
    "getSSMStateForLayer",
    "headDim",
    "incrementLengthTensor",
    "initialize",
    "instantiateKVCacheBatched",
    "instantiateKVCacheLayerFromTensor",
    "is_initialized",
    "isUniform",
    "kAttention",
    "kMamba",
    "KVHeadDimGroupView",
    "KVLayerConfig",
    "KVLayerInfo",
    "length",
    "max_batch_size",
    "max_seq_len",
    "max_sequences",
    "maxKVHeads",
    "memory_capacity",
    "memory_per_seq",
    "memory_used",
    "num_sequences",
    "numKVHeads",
    "numLayers",
    "reserve",
    "resetForNewSequences",
    "restoreKVCache",
    "saveKVCacheBatched",
    "saveKVCacheLayerIntoTensor",
    "setActiveBatchSize",
    "swap_threshold",
    "truncate",
}


def page(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def api():
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "_ext"))
        yield importlib.import_module("public_api")


def test_every_public_name_is_on_one_page_of_the_reference(api):
    listed = [one.name for area in api.AREAS for one in api.names_of(area)]
    assert len(listed) == len(set(listed))
    assert {name for name in trt_kvcache.__all__ if not name.startswith("__")} <= set(listed)


def test_every_public_name_has_a_summary(api):
    without = [one.full for one in api.public_names() if (inspect.isclass(one.value) or inspect.isroutine(one.value)) and not one.summary]
    assert without == []


def test_every_package_is_on_a_page_or_internal(api):
    assert api.missing_areas() == []
    assert set(api.rooms()) == set(LAYERS)


def test_a_package_without_a_page_is_found(api, monkeypatch):
    monkeypatch.setattr(api, "AREAS", {name: rooms for name, rooms in api.AREAS.items() if name != "kernels"})
    assert api.missing_areas() == ["kernels"]


def test_every_area_has_its_page(api):
    pages = {path.stem for path in (DOCS / "reference").glob("*.md")} - {"index"}
    assert pages == set(api.AREAS)
    for area in api.AREAS:
        assert f"```{{public-names}} {area}\n" in page(f"reference/{area}")
        assert re.search(rf"^{area}$", page("reference/index"), re.MULTILINE)


def test_the_pictures_are_those_of_the_script():
    done = subprocess.run([sys.executable, str(DOCS / "images" / "draw.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_tables_of_formats_are_those_of_the_code():
    done = subprocess.run([sys.executable, str(DOCS / "formats_table.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_tables_of_kernels_are_those_of_the_results():
    done = subprocess.run([sys.executable, str(DOCS / "kernels_table.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_tables_of_attention_are_those_of_the_code():
    done = subprocess.run([sys.executable, str(DOCS / "attention_table.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_errors_of_quantized_k_and_v_are_those_of_the_script():
    done = subprocess.run([sys.executable, str(DOCS / "kv_error_table.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_picture_of_the_layers_has_all_of_them_in_their_order(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "images"))
    rows = importlib.import_module("draw").ROWS
    drawn = [name for _, rooms in reversed(rows) for name, _ in reversed(rooms)]
    assert sorted(drawn) == sorted(LAYERS)
    assert drawn.index("cache") < drawn.index("engine") < drawn.index("session") < drawn.index("cli")
    bottom = {"errors", "dtypes", "_util", "plot"}
    assert [name for name in drawn if name not in bottom] == [name for name in LAYERS if name not in bottom]


def test_every_error_is_in_troubleshooting():
    text = page("troubleshooting")
    headings = " ".join(re.findall(r"^## (.*)$", text, re.MULTILINE))
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value is not errors.KVCacheError:
            assert re.search(rf"\b{name}\b", headings), name
            builtin = value.__mro__[2]
            assert re.search(rf"^\| \[[^]]*\b{name}\b[^]]*\]\([^)]*\) \| `{builtin.__name__}` \|", text, re.MULTILINE), name


def test_every_cpp_name_has_its_row():
    column = "\n".join(re.findall(r"^\| (.*?) \|", page("from-cpp"), re.MULTILINE))
    assert {name for name in CPP_NAMES if not re.search(rf"\b{name}\b", column)} == set()


@pytest.mark.slow
def test_a_broken_reference_fails_the_build(api, tmp_path):
    extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "public_api"]
    conf = f"import sys\nsys.path[:0] = {[str(ROOT), str(DOCS / '_ext')]}\nextensions = {extensions}\nautodoc_typehints = 'none'\n"
    (tmp_path / "conf.py").write_text(conf)
    (tmp_path / "index.md").write_text("# Page\n\n`KVCacheManager.compact_batch` and `KVCacheManager.no_such_method`\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    broken = [line for line in done.stderr.splitlines() if "index.md" in line and "reference target not found" in line]
    assert len(broken) == 1
    assert "KVCacheManager.no_such_method" in broken[0]
