"""``InferenceSession.open`` and ``from_model``: which engine runs, with what, and what is refused."""

import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.checkpoint.tokenizer_folders import EOS, byte_level_folder
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.small_model import write_model
from trt_kvcache import InferenceSession as Session
from trt_kvcache import SamplingParams
from trt_kvcache.builder.build_engine import build_engine
from trt_kvcache.errors import BuildError, CheckpointError, ConfigError, CudaError, EngineError
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.reference import ReferenceEngine
from trt_kvcache.session import open_model
from trt_kvcache.session.open_model import EngineFallbackWarning
from trt_kvcache.session.session_source import SessionSource

NO_GPU = "there is no GPU here"
SIZES = {"max_batch_size": 3, "max_sequence_length": 38, "max_prefill_length": 11}  # of the engine folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return make_engine_folder(model, tmp_path_factory.mktemp("engines") / "engine").path


@pytest.fixture
def patch(monkeypatch):
    return partial(monkeypatch.setattr, open_model)


@pytest.fixture(params=["open", "from_model"])
def opens(request, model, folder):
    return partial(getattr(Session, request.param), folder if request.param == "open" else model)


def refuses(error, message, call, *args, **options):
    with pytest.raises(error, match=message):
        call(*args, **options)


def falls_back(why):
    return pytest.warns(EngineFallbackWarning, match=f"^running the NumPy reference engine: {why}$")


of_model = partial(Session.from_model, engine="reference")


@pytest.fixture
def memories(patch):
    made = []
    patch("HostMemory", lambda: made.append(HostMemory()) or made[-1])
    return made


@pytest.fixture
def closed(monkeypatch):
    engines = []
    monkeypatch.setattr(ReferenceEngine, "close", lambda engine: engines.append(engine))
    return engines


class FakeGPU:
    """``CudaMemory`` and ``TensorRTEngine`` over host memory and the reference engine; ``build_engine`` that builds nothing."""

    def __init__(self, patch):
        self.memory = HostMemory()
        self.failure, self.build_failure, self.opened, self.built = None, None, [], []
        patch("find_gpu", lambda device: None)
        patch("load_tensorrt", lambda flavour: None)
        patch("CudaMemory", lambda device, **_: self.memory)
        patch("TensorRTEngine", self)
        patch("build_engine", self.build)

    def open(self, folder, *, memory, flavour):
        assert memory is self.memory
        self.opened.append((folder.path, flavour))
        if self.failure is not None:
            raise self.failure
        with folder.open_checkpoint() as checkpoint:
            return ReferenceEngine(checkpoint, kv=folder.config.cache, max_prefill_length=folder.config.max_prefill_length, memory=memory)

    def build(self, path, target, **options):
        self.built.append((path, target, options))
        if self.build_failure is not None:
            raise self.build_failure
        return SimpleNamespace(path=make_engine_folder(path, target).path)


@pytest.fixture
def gpu(patch):
    return FakeGPU(patch)


def test_an_engine_folder_runs_as_the_model_does(folder, model):
    with Session.open(str(folder), engine="reference") as one, of_model(model, **SIZES) as other:
        for s in (one, other):
            kv = s.cache.kv_config
            assert (kv.max_batch_size, kv.max_sequence_length, kv.dtype) == (3, 38, "float16")
            assert [profile.max_width for profile in s.engine.profiles] == [11, 1]
            assert isinstance(s.engine, ReferenceEngine)
        prompts = [list(range(30)), [1]]
        np.testing.assert_array_equal(one.prefill(prompts), other.prefill(prompts))


@pytest.mark.parametrize(
    ("positions", "options", "want"),
    [
        (64, {}, (1, 64, 64, "float16")),
        (64, {"max_batch_size": 4, "max_sequence_length": 31, "max_prefill_length": 7, "dtype": "bfloat16"}, (4, 31, 7, "bfloat16")),
        (9000, {}, (1, 2048, 512, "float16")),
        (9000, {"max_sequence_length": 8000}, (1, 8000, 512, "float16")),
    ],
)
def test_sizes_of_a_model(tmp_path, positions, options, want):
    with of_model(write_model(tmp_path / "model", max_position_embeddings=positions), **options) as s:
        kv = s.cache.kv_config
        assert (kv.max_batch_size, kv.max_sequence_length, s.engine.profiles[0].max_width, kv.dtype) == want
        assert (s.vocab_size, s.tokenizer) == (37, None)
        assert np.isfinite(s.prefill([[1] * 31])).all()


def test_it_falls_back_with_one_warning(opens, patch):
    patch("find_gpu", lambda device: NO_GPU)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opens().close()
    assert [(str(one.message), one.category, one.filename) for one in caught] == [
        (f"running the NumPy reference engine: {NO_GPU}", EngineFallbackWarning, __file__)
    ]


def test_the_reference_engine_asks_for_no_gpu(opens, request, patch):
    patch("find_gpu", None)
    told = []
    opens(engine="reference", progress=lambda stage, done: told.append((stage, done))).close()
    assert {stage for stage, _ in told} == {"load weights"} | ({"check checkpoint"} if "[open]" in request.node.name else set())
    assert told[-1] == ("load weights", 1)


def test_tensorrt_runs_where_it_can(folder, gpu):
    with Session.open(folder, flavour="tensorrt_rtx") as s:
        assert s.cache.memory is gpu.memory
    assert (gpu.opened, gpu.memory.live_nbytes) == ([(folder, "tensorrt_rtx")], 0)


@pytest.mark.parametrize("of_folder", [True, False])
def test_the_mask_variant(model, tmp_path, of_folder):
    config = make_engine_folder(model, tmp_path / "engine").path / "config.json"
    config.write_text(config.read_text().replace('"variant": "native"', '"variant": "mask"'))
    with Session.open(config.parent, engine="reference") if of_folder else of_model(model, attention="mask") as s:
        s.prefill([[1, 2]])
        s.cache.memory.array(s.cache.get_separate_kv_cache(0)[1])[:, :, 5:] = np.nan
        assert np.isnan(s.decode([3])).all(), "it reads dead rows, with weight 0"


def test_where_tensorrt_refuses_the_engine(opens, gpu):
    gpu.failure = EngineError("not for this GPU")
    with falls_back("not for this GPU") as caught:
        opens().close()
    assert [one.filename for one in caught] == [__file__]
    refuses(EngineError, r"^not for this GPU$", opens, engine="tensorrt")
    assert not any(target.parent.exists() for _, target, _ in gpu.built)


@pytest.mark.parametrize("engine", ["auto", "tensorrt"])
def test_an_engine_is_built_for_the_session(model, gpu, engine):
    s = Session.from_model(model, engine=engine, **SIZES)
    options = {**SIZES, "dtype": "float16", "attention": "native", "flavour": "auto", "progress": None}
    ((path, place, given),) = gpu.built
    assert (path, given, gpu.opened) == (model, options, [(place, "auto")])
    assert place.is_dir()
    assert np.isfinite(s.prefill([[1, 2]])).all()
    s.close()
    assert not place.parent.exists()


@pytest.mark.trt
def test_an_engine_in_segments(gpu, patch, tmp_path):
    def refuse(folder, *, memory, flavour, cuda_graphs):
        raise EngineError(f"{len(folder.config.segments.steps)} steps, {cuda_graphs}")

    patch("SegmentedEngine", SimpleNamespace(open=refuse))
    model = write_model(tmp_path / "model", head_dim=64)
    path = build_engine(model, tmp_path / "engine", **SIZES, attention="plugin").path
    refuses(EngineError, r"^\d steps, False$", Session.open, path, engine="tensorrt", cuda_graphs=False)
    refuses(EngineError, r"^\d steps, True$", SessionSource(path, engine="tensorrt"))
    patch("build_engine", lambda *_, **options: SimpleNamespace(path=path))
    refuses(EngineError, r"^\d steps, False$", Session.from_model, model, **SIZES, engine="tensorrt", attention="plugin", cuda_graphs=False)
    assert gpu.opened == []
    with Session.open(path, engine="reference") as one, of_model(model, **SIZES, attention="plugin") as other:
        assert one.cache.kv_config == other.cache.kv_config
        np.testing.assert_array_equal(one.prefill([[3, 4, 5], [6]]), other.prefill([[3, 4, 5], [6]]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine": "onnx"}, "engine: expected one of auto, reference, tensorrt, got 'onnx'."),
        ({"flavour": "x"}, "flavour: expected one of auto, tensorrt, tensorrt_rtx, got 'x'."),
        ({"max_sequence_length": 20, "max_prefill_length": 21}, "max_prefill_length: expected an integer from 1 to 20, got 21."),
        (
            {"max_sequence_length": 65},
            "max_sequence_length: expected at most 64, the positions that the model was made for (max_position_embeddings), got 65.",
        ),
    ],
)
def test_what_is_refused(model, memories, options, text):
    with pytest.raises(ConfigError) as error:
        Session.from_model(model, **{"engine": "reference", **options})
    assert str(error.value) == text
    assert sum(memory.live_nbytes for memory in memories) == 0


@pytest.mark.parametrize("part", ["KVCacheManager", "SessionParts.arguments"])
def test_a_session_that_fails_leaves_nothing(model, memories, monkeypatch, closed, part):
    monkeypatch.setattr(f"trt_kvcache.session.open_model.{part}", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        of_model(model)
    assert len(closed) == 1
    assert [memory.live_nbytes for memory in memories] == [0]


def test_where_tensorrt_cannot_build(model, gpu):
    gpu.build_failure = BuildError("no")
    refuses(BuildError, r"^no$", Session.from_model, model, engine="tensorrt")
    with falls_back("no"):
        Session.from_model(model).close()
    assert [target.parent.exists() for _, target, _ in gpu.built] == [False, False]


def test_the_flavour_of_the_engine_must_be_there(folder, gpu, patch):
    def load(flavour):
        raise EngineError(f"{flavour} cannot be used.")

    patch("load_tensorrt", load)
    with falls_back("tensorrt_rtx cannot be used."):
        Session.open(folder).close()


def test_without_a_gpu_nothing_is_built(model, gpu, patch):
    def refuse(device, **_):
        raise CudaError(NO_GPU)

    patch("CudaMemory", refuse)
    refuses(CudaError, NO_GPU, Session.from_model, model, engine="tensorrt")
    assert gpu.built == []


@pytest.fixture
def copy(model, tmp_path):
    return Path(shutil.copytree(model, tmp_path / "copy"))


def generation(path, **values):
    (path / "generation_config.json").write_text(json.dumps(values))


def test_end_token_of_the_tokenizer_comes_last(tmp_path):
    path = write_model(tmp_path / "model", vocab_size=300, eos_token_id=None)
    byte_level_folder(path, eos_token=EOS)
    with of_model(path) as s:
        assert s._eos_token_ids == s.tokenizer.eos_token_ids != ()
        events = list(s.generate("the sea", max_new_tokens=5))
        assert "".join(event.text for event in events) == s.tokenizer.decode([event.token for event in events])


def test_end_tokens_and_defaults(copy):
    with of_model(copy) as s:
        assert s._eos_token_ids == (2,)  # of config.json
    asked = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1}
    for do_sample, want in ((False, SamplingParams()), (True, SamplingParams(**asked))):
        generation(copy, do_sample=do_sample, eos_token_id=[5, 6], **asked)
        with of_model(copy) as s:
            assert (s.defaults, s._eos_token_ids) == (want, (5, 6))


def test_a_damaged_file_is_named(copy, memories):
    (copy / "generation_config.json").write_text("{")
    refuses(CheckpointError, r"generation_config\.json", of_model, copy)
    assert [memory.live_nbytes for memory in memories] == [0]


def test_one_warning_names_what_is_not_supported(copy):
    generation(copy, repetition_penalty=1.05, no_repeat_ngram_size=3)
    text = r"generation_config\.json: ignored, as it is not supported: repetition_penalty, no_repeat_ngram_size\. Other"
    with pytest.warns(UserWarning, match=text) as caught:
        Session.from_model(copy, engine="reference").close()
    assert [one.filename for one in caught] == [__file__]
