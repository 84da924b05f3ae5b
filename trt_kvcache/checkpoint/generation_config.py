"""``GenerationDefaults``: the sampling options that the authors of a model recommend, read from ``generation_config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_kvcache.checkpoint.json_file import read_json_if_present
from trt_kvcache.errors import CheckpointError, ConfigError
from trt_kvcache.model.config_fields import ConfigFields

GENERATION_FILE = "generation_config.json"

# Fields that change which tokens are generated and that are not supported, with the value that disables each. Null and an empty
# list disable it too.
_IGNORED_FIELDS: dict[str, Any] = {
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "exponential_decay_length_penalty": None,
    "bad_words_ids": None,
    "force_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "watermarking_config": None,
    "dola_layers": None,
}

# Fields that only matter with sampling.
_IGNORED_IF_SAMPLED: dict[str, Any] = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Default sampling options of a model folder. Options that the file does not set have the defaults of Hugging Face transformers.

    Parameters
    ----------
    eos_token_ids : tuple of int
        Tokens that end a sequence. Empty if the file names none: then the model configuration decides.
    do_sample : bool
        True to sample tokens. If False, the most likely token is chosen (greedy decoding).
    temperature : float
        Divides the logits before sampling.
    top_k : int
        Sample from this many most likely tokens; 0 disables the limit, as does -1 in the file.
    top_p : float
        Sample from the most likely tokens whose probabilities reach this sum; 1.0 disables the limit.
    min_p : float
        Sample from tokens that have at least this share of the highest probability; 0.0 disables the limit.
    repetition_penalty : float
        Makes tokens of the prompt and of the answer less likely; 1.0 disables it.
    stop_strings : tuple of str
        Texts that end an answer.
    ignored : tuple of str
        Fields of the file that would change which tokens are generated, but are not supported.

    Examples
    --------
    >>> from trt_kvcache.checkpoint import GenerationDefaults
    >>> defaults = GenerationDefaults.open("examples/tiny-llama")
    >>> defaults.do_sample, defaults.eos_token_ids
    (False, (1,))
    """

    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: str | Path) -> GenerationDefaults:
        """Read the ``generation_config.json`` of a model folder.

        Parameters
        ----------
        folder : path
            The model folder.

        Returns
        -------
        GenerationDefaults
            The defaults of all fields if there is no such file.

        Raises
        ------
        CheckpointError
            The file is not JSON, or a value is out of range. The message names the file.
        """
        path = Path(folder) / GENERATION_FILE
        fields = ConfigFields(read_json_if_present(path))
        try:
            top_p = fields.number("top_p", cls.top_p)
            if top_p > 1:
                raise fields.refusal("top_p", "a number in (0, 1]")
            min_p = 0.0 if fields.get("min_p") in (None, 0) else fields.number("min_p")
            if min_p >= 1:
                raise fields.refusal("min_p", "a number in [0, 1)")
            stop_strings = fields.get("stop_strings") or ()
            texts = (stop_strings,) if isinstance(stop_strings, str) else stop_strings
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
                raise fields.refusal("stop_strings", "a text or a list of texts that are not empty")
            do_sample = fields.flag("do_sample", cls.do_sample)
            candidates = {**_IGNORED_FIELDS, **(_IGNORED_IF_SAMPLED if do_sample else {})}
            return cls(
                eos_token_ids=fields.token_ids("eos_token_id"),
                do_sample=do_sample,
                temperature=fields.number("temperature", cls.temperature) if fields.get("temperature") != 0 else 0.0,
                top_k=0 if fields.get("top_k") in (0, -1) else fields.integer("top_k", cls.top_k),
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=fields.number("repetition_penalty", cls.repetition_penalty),
                stop_strings=tuple(texts),
                ignored=tuple(name for name, off in candidates.items() if fields.get(name) not in (None, off, [], {})),
            )
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from error
