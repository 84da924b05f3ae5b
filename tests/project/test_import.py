"""``import trt_kvcache`` needs NumPy and ml_dtypes, and nothing else. Each test asks a fresh interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trt_kvcache
from tests.paths import ROOT
from trt_kvcache import errors

NAMES = """
    CacheConfig CudaMemory DeviceTensor HostMemory InferenceSession KVCacheConfig KVCacheManager KVLayerConfig KVLayout Lengths
    LinearKVCache Memory SessionSource estimate_memory largest_batch longest_sequence
"""
USE_A_CACHE = """
memory = trt_kvcache.HostMemory()
stream = memory.create_stream()
layers = [trt_kvcache.KVLayerConfig(num_kv_heads=2, head_dim=16)]
kv = trt_kvcache.KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=7, dtype="bfloat16")
with trt_kvcache.KVCacheManager(kv, memory=memory) as cache:
    cache.reset_for_new_sequences([0, 5], stream=stream)
    cache.commit_sequence_length(2, stream=stream)
    cache.commit_sequence_length([0, 0], stream=stream)
    cache.commit_sequence_length(memory.to_device(numpy.zeros(2, numpy.int32), stream=stream), max_increment=0, stream=stream)
    cache.sync_lengths(stream=stream)
    assert cache.host_kv_cache_lengths == (2, 7)
    cache.get_combined_kv_cache(0).numpy()
trt_kvcache.longest_sequence(kv, 1 << 20)
"""
IMPORTED = """
import sys, numpy, ml_dtypes
before = set(sys.modules)
import trt_kvcache
{use}
print({{name.split(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names))
"""
NOTHING_ELSE = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {{"numpy", "ml_dtypes", "trt_kvcache", *sys.stdlib_module_names}}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Nothing())
import numpy, trt_kvcache
{use}
try:
    import hypothesis
except ModuleNotFoundError:
    print("refused")
"""


@pytest.mark.parametrize(
    ("program", "use", "printed"),
    [(IMPORTED, "", "{'trt_kvcache'}"), (IMPORTED, USE_A_CACHE, "{'trt_kvcache'}"), (NOTHING_ELSE, USE_A_CACHE, "refused")],
    ids=["imported", "imported and used", "nothing else is there"],
)
def test_only_numpy_and_ml_dtypes_are_needed(program, use, printed):
    command = [sys.executable, "-c", program.format(use=use)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{printed}\n", "")


SHIPPED = str(ROOT / "examples" / "tiny-llama")
OWN_ENGINE = f"""
import runpy
example = runpy.run_path({str(ROOT / "examples" / "bring_your_own_engine.py")!r})
memory = trt_kvcache.HostMemory()
engine, cache = example["InductionEngine"](memory), trt_kvcache.KVCacheManager(example["KV"], memory=memory)
with trt_kvcache.InferenceSession(engine, cache, names=example["NAMES"]) as session:
    assert len(list(session.generate([[1, 2, 3, 1, 2]], max_new_tokens=6))) == 6
"""


def run_alone(use):
    """Run a program where NumPy and ml_dtypes alone are installed."""
    command = [sys.executable, "-c", NOTHING_ELSE.format(use=use)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_engine_of_your_own_needs_no_extra():
    done = run_alone(OWN_ENGINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


@pytest.mark.parametrize(
    ("use", "library", "extra"),
    [
        (
            f"trt_kvcache.InferenceSession.from_model({str(ROOT / 'examples' / 'tiny-llama')!r}, engine='reference')",
            "safetensors",
            "models",
        ),
        (f"trt_kvcache.Tokenizer.open({str(ROOT / 'examples' / 'tiny-llama')!r})", "tokenizers", "models"),
        ("trt_kvcache.compare_paths", "polygraphy", "polygraphy"),
    ],
)
def test_what_needs_an_extra_names_it(use, library, extra):
    done = run_alone(use)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: {library}")
    assert last.endswith(f" is not installed. Run: pip install 'trt-kvcache[{extra}]'")


def test_the_names_of_the_package():
    names = trt_kvcache.__all__
    assert set(NAMES.split()) <= set(names)
    assert dir(trt_kvcache) == sorted(names)
    assert len(set(names)) == len(names)
    assert None not in [getattr(trt_kvcache, name) for name in names]
    with pytest.raises(AttributeError, match=r"^module 'trt_kvcache' has no attribute 'KVCache'$"):
        trt_kvcache.KVCache  # noqa: B018


def test_type_checkers_see_the_names_that_are_imported_lazily():
    tree = ast.parse(Path(trt_kvcache.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: f"{node.module}.{alias.name}" for node in block.body for alias in node.names}
    assert seen == {name: f"trt_kvcache.{module}.{name}" for name, module in trt_kvcache._MODULE_OF.items()}


def test_every_error_is_a_name_of_the_package():
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.KVCacheError)}
    assert raised <= set(trt_kvcache.__all__)
