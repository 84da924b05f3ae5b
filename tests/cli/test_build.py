import pytest

from trt_kvcache.cli import build as build_module
from trt_kvcache.errors import BuildError

from .conftest import SHIPPED


@pytest.fixture
def asked(monkeypatch):
    seen = {}

    def refuse(model, target, **options):
        seen.update(options, model=model, target=target)
        raise BuildError("the engine could not be built. TensorRT says: no")

    monkeypatch.setattr(build_module, "build_engine", refuse)
    return seen


SIZES = ["--max-batch-size", 3, "--max-sequence-length", 99, "--max-prefill-length", 17, "--dtype", "float32", "--embed-weights"]
OTHER = ["--attention", "mask", "--flavour", "tensorrt_rtx", "--compute-capability", "8.6", "--compute-capability", "12.0"]
NAMES = [
    "max_batch_size",
    "max_sequence_length",
    "max_prefill_length",
    "dtype",
    "embed_weights",
    "attention",
    "flavour",
    "compute_capabilities",
]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (1, 512, 512, None, False, "native", "auto", None)),
        (SIZES + OTHER, (3, 99, 17, "float32", True, "mask", "tensorrt_rtx", ["8.6", "12.0"])),
        (["--max-sequence-length", 40], (1, 40, 40, None, False, "native", "auto", None)),
    ],
)
def test_options_reach_the_builder(run, asked, tmp_path, options, expected):
    done = run("build", SHIPPED, "-o", tmp_path / "engine", *options)
    assert (done.code, done.out, done.err) == (1, "", "error: the engine could not be built. TensorRT says: no\n")
    assert callable(asked.pop("progress"))
    assert asked == {**dict(zip(NAMES, expected, strict=True)), "model": SHIPPED, "target": tmp_path / "engine"}


@pytest.mark.trt
class TestWithTensorRT:
    def test_an_engine_folder_is_made_and_runs(self, run, tmp_path):
        target = tmp_path / "[red]new folder[/]" / "engine"
        done = run("build", SHIPPED, "-o", target, "--max-batch-size", 2)
        assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
        assert done.out.startswith(f"{target}: ")
        assert " by tensorrt_rtx 1." in done.out
        generated = run("generate", target, "--engine", "reference", "-p", "The rabbit-hole went straight", "--max-new-tokens", 9)
        assert generated.out.startswith("The rabbit-hole went straight on like a tunnel")
