"""The models of the checks: two with random weights, the shipped one, and the user's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.doctor.random_model import write_random_model
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model import AttentionConfig

_PACKAGE = Path(__file__).resolve().parents[1]

#: Heads of 16, which the attention kernels do not have.
_TINY = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
#: Head dim, query heads for each K/V head and length of models in use, so that TensorRT and this package take their usual kernels.
_WIDE = {
    **_TINY,
    "vocab_size": 515,
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


class CheckedModel(NamedTuple):
    """A model folder, and the sizes that it is run with."""

    name: str
    path: Path
    slots: int
    length: int  # tokens of a slot, S
    width: int  # most new tokens of a slot in one enqueue
    dtypes: tuple[str, ...]

    @property
    def head_dim(self) -> int:
        """Head dim of the first attention layer; 0 without one."""
        mixers = [layer.mixer for layer in Checkpoint.read_config(self.path).layers]
        return next((mixer.head_dim for mixer in mixers if isinstance(mixer, AttentionConfig)), 0)


def tiny_model(settings: Settings) -> CheckedModel:
    """Return the tiny Llama with random weights."""
    return CheckedModel("tiny", _random(settings, "tiny", _TINY), slots=4, length=64, width=16, dtypes=("float32",))


def wide_model(settings: Settings) -> CheckedModel:
    """Return the model with random weights, head dim 128, 2 query heads for each K/V head, and S = 2048."""
    return CheckedModel("wide", _random(settings, "wide", _WIDE), slots=4, length=2048, width=128, dtypes=("float16", "bfloat16"))


def short_model(settings: Settings) -> CheckedModel:
    """Return the wide model with a cache that a prompt fills."""
    return wide_model(settings)._replace(name="short", length=96, width=32, dtypes=("float16",))


def shipped_model() -> CheckedModel:
    """Return the trained model in the package."""
    return CheckedModel("shipped", shipped_model_folder(), slots=2, length=1024, width=128, dtypes=("float16",))


def own_model(settings: Settings) -> CheckedModel | None:
    """Return the user's model, if one was given."""
    if settings.model is None:
        return None
    config = Checkpoint.read_config(Path(settings.model))
    length = min(config.max_position_embeddings, 2048)
    return CheckedModel("own", Path(settings.model), slots=4, length=length, width=min(128, length), dtypes=(config.dtype,))


def shipped_model_folder() -> Path:
    """Return the folder of the trained model: ``_models/tiny-chat`` of an installed package, in ``examples`` of a checkout."""
    for folder in (_PACKAGE / "_models" / "tiny-chat", _PACKAGE.parent / "examples" / "tiny-chat"):
        if (folder / "model.safetensors").is_file():
            return folder
    raise CheckpointError(f"the model of trt_kvcache is missing: expected {_PACKAGE / '_models'}. Install the package again.")


def _random(settings: Settings, name: str, config: dict[str, object]) -> Path:
    """Return a folder in the scratch folder, which the first check that needs it writes."""
    folder = settings.folder / f"model-{name}"
    return folder if folder.is_dir() else write_random_model(folder, config)
