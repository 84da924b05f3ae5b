"""Options for sampling, of ``generate``, ``chat`` and ``serve-file``."""

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from trt_kvcache.cli.console import note
from trt_kvcache.errors import RangeError
from trt_kvcache.generation.sampling import SamplingParams

_PANEL = "Sampling"

_SEED_BITS = 32

#: Options without effect at temperature 0.
_UNUSED_IF_GREEDY = ("top_k", "top_p", "min_p")

MaxNewTokens = Annotated[
    int,
    typer.Option(
        *("--max-new-tokens", "-n", "--max-tokens", "--n-predict"),
        min=1,
        metavar="N",
        help="Generate at most this many tokens for a prompt.",
        rich_help_panel=_PANEL,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        *("--temperature", "--temp"),
        metavar="X",
        help="Divide logits by it; 0 is greedy: always the most likely token. Default: the model's.",
        rich_help_panel=_PANEL,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(min=0, metavar="K", help="Keep the k most likely tokens; 0 keeps all. Default: the model's.", rich_help_panel=_PANEL),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="P", help="Keep the most likely tokens until their probabilities sum to p. Default: the model's.", rich_help_panel=_PANEL
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="P", help="Drop tokens that are less likely than p times the most likely one. Default: the model's.", rich_help_panel=_PANEL
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="N", help="Seed of the random numbers: the same seed gives the same text. Default: random.", rich_help_panel=_PANEL
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End the output before this text. Can be given several times.", rich_help_panel=_PANEL),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Above 1: make tokens of the prompt and of the answer less likely. Default: the model's.",
        rich_help_panel=_PANEL,
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(metavar="X", help="Subtract it from the logits of tokens in the answer. Default: 0.", rich_help_panel=_PANEL),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Subtract it from the logit of a token for each occurrence in the answer. Default: 0.", rich_help_panel=_PANEL
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=BIAS",
        help="Add BIAS to the logit of token ID; ID=-inf excludes it. Can be given several times.",
        rich_help_panel=_PANEL,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Add the log-probabilities of each token and of the N most likely tokens to the answer. For a prompt: `score`.",
        rich_help_panel=_PANEL,
    ),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Continue past the model's end token.", rich_help_panel=_PANEL)]


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling options. Options that are not given have the model's defaults."""

    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    seed: Seed = None
    stop: Stop = None
    ignore_eos: IgnoreEos = False
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    logit_bias: LogitBias = None

    def options(self, logprobs: int | None = None) -> dict[str, Any]:
        """Return the given options as fields of ``SamplingParams``. Not every command has ``logprobs``."""
        given: dict[str, Any] = {} if logprobs is None else {"logprobs": logprobs}
        given |= {name: value for name, value in asdict(self).items() if value not in (None, []) and value is not False}
        if "stop" in given:
            given["stop"] = tuple(given["stop"])
        if "logit_bias" in given:
            given["logit_bias"] = dict(_bias(text) for text in given["logit_bias"])
        try:
            SamplingParams(**given)
        except RangeError as error:
            name, _, text = str(error).removeprefix("SamplingParams.").partition(": ")
            raise typer.BadParameter(text, param_hint=f"--{name.replace('_', '-')}") from None
        return given


def _bias(text: str) -> tuple[int, float]:
    """Parse ``id=bias``."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise typer.BadParameter(f"expected ID=BIAS such as 42=-1.5, got {text!r}.", param_hint="--logit-bias") from None


def with_drawn_seed(params: SamplingParams) -> SamplingParams:
    """Return sampling parameters with a random seed if they sample and have none, so that the seed can be printed and used again."""
    return replace(params, seed=secrets.randbits(_SEED_BITS)) if params.temperature > 0 and params.seed is None else params


def note_unused(options: Mapping[str, Any], defaults: SamplingParams) -> None:
    """Print a note on options without effect, as decoding is greedy."""
    unused = [f"--{name.replace('_', '-')}" for name in _UNUSED_IF_GREEDY if name in options]
    if unused and options.get("temperature", defaults.temperature) == 0:
        note(f"{' and '.join(unused)}: without effect at temperature 0, which takes the most likely token. Give --temperature.")
