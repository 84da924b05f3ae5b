"""How a model is meant to be sampled, read from ``generation_config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trt_kvcache.checkpoint.fields import Fields
from trt_kvcache.checkpoint.json_file import read_json_if_present
from trt_kvcache.errors import CheckpointError, ConfigError

GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults of a model folder; what the file does not say is as in transformers.

    Parameters
    ----------
    eos_token_ids : tuple of int
        Empty where the file names none: then those of the model configuration hold.
    do_sample : bool
        False: greedy.
    temperature : float
    top_k : int
        0: off.
    top_p : float
        1.0: off.
    """

    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0

    @classmethod
    def open(cls, folder: str | Path) -> GenerationDefaults:
        """Read ``generation_config.json`` of a model folder; without the file, return the defaults.

        Raises
        ------
        CheckpointError
            The file is not JSON, or a value makes no sense. The message names the file.
        """
        path = Path(folder) / GENERATION_FILE
        fields = Fields(read_json_if_present(path))
        try:
            top_p = fields.number("top_p", cls.top_p)
            if top_p > 1:
                raise fields.refusal("top_p", "a number in (0, 1]")
            return cls(
                eos_token_ids=fields.token_ids("eos_token_id"),
                do_sample=fields.flag("do_sample", cls.do_sample),
                temperature=fields.number("temperature", cls.temperature) if fields.get("temperature") != 0 else 0.0,
                top_k=fields.integer("top_k", cls.top_k) if fields.get("top_k") != 0 else 0,
                top_p=top_p,
            )
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from error
