"""Builds of engines with K and V in 8 bits: what the folder says, which engines open it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.models import write_model
from trt_kvcache import InferenceSession, build_engine, estimate_build
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import ConfigError, EngineError

SIZES = {"max_batch_size": 2, "max_sequence_length": 38}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", head_dim=64)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tensorrt_rtx")
    path = tmp_path_factory.mktemp("engine") / "engine"
    build_engine(model, path, **SIZES, dtype="float16", kv_dtype="int8", flavour="tensorrt_rtx", compute_capabilities=["8.9"])
    return path


@pytest.mark.trt
class TestBuild:
    def test_the_folder_says_how(self, engine: Path) -> None:
        config = EngineFolder.open(engine).config
        assert (config.dtype, config.cache.dtype, config.cache.kv.scales, config.attention_variant) == (
            "float16",
            "int8",
            "token",
            "plugin",
        )
        names = {spec.name: (spec.dtype, spec.shape, spec.alias) for spec in config.tensors if "kv_scales" in spec.name}
        assert names == {
            "kv_scales_0": ("float32", (-1, 2, 2, 40), None),
            "present_kv_scales_0": ("float32", (-1, 2, 2, 40), "kv_scales_0"),
        }

    @pytest.mark.parametrize("name", ["reference", "torch"])
    def test_other_engines_open_it(self, engine: Path, model: Path, name: str) -> None:
        if name == "torch":
            pytest.importorskip("torch")
        with InferenceSession.open(engine, engine=name) as session:
            found = session.prefill([[1, 2, 3]])
            assert (session.cache_config.dtype, session.cache_config.scales) == ("int8", "token")
        with InferenceSession.from_model(model, engine="reference", dtype="float32", **SIZES) as session:
            assert_close(np.asarray(found, np.float32), session.prefill([[1, 2, 3]]), 0.05)

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"computed_dtype": None}, "computed_dtype: expected one for K and V in int8, got None."),
            ({"computed_dtype": "int8"}, "computed_dtype: expected one of float16, bfloat16, float32, got 'int8'."),
        ],
    )
    def test_an_altered_folder_is_refused(self, engine: Path, change: dict[str, object], text: str) -> None:
        path = engine / "config.json"
        before = path.read_text()
        path.write_text(json.dumps({**json.loads(before), **change}))
        try:
            with pytest.raises(EngineError) as caught:
                EngineFolder.open(engine)
            assert text in str(caught.value)
        finally:
            path.write_text(before)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"kv_dtype": "int4"}, "kv_dtype: expected one of fp8, float8_e4m3fn, int8, got 'int4'."),
            ({"kv_scales": "token"}, "kv_scales: expected kv_dtype with it, fp8 or int8, got token alone."),
            (
                {"kv_dtype": "fp8", "attention": "native"},
                "kv_dtype: expected plugin attention for K and V in float8_e4m3fn, got native: TensorRT's layers take no ",
            ),
            (
                {"kv_dtype": "fp8", "kv_scales": "head"},
                "kv_scales: expected token, as the checkpoint has no static scales of K and V in fp8",
            ),
        ],
    )
    def test_what_is_refused(self, model: Path, tmp_path: Path, options: dict[str, str], text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            build_engine(model, tmp_path / "engine", **SIZES, dtype="float16", flavour="tensorrt_rtx", **options)
        assert str(caught.value).startswith(text)
        assert not (tmp_path / "engine").exists()


def test_the_estimate_counts_the_scales(model: Path) -> None:
    sizes = [
        estimate_build(model, **SIZES, dtype="float16", attention="plugin", **options).cache_nbytes
        for options in ({}, {"kv_dtype": "int8"})
    ]
    rows = 2 * 2 * 2 * 38 * 64
    assert sizes == [2 * rows, rows + 2 * 2 * 2 * 40 * 4]
