"""The command-line options for sampling, which ``generate``, ``chat`` and ``serve-file`` share."""

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

#: Options that matter only where a token is drawn.
_OF_DRAWING = ("top_k", "top_p", "min_p")

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
        help="Logits are divided by it; 0 always takes the most likely token. Default: the model's.",
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
    typer.Option(min=0, metavar="N", help="The same seed gives the same text. Default: another one each time.", rich_help_panel=_PANEL),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End the output before this text. Can be given several times.", rich_help_panel=_PANEL),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Make tokens of the prompt and of the answer less likely: above 1. Default: the model's.",
        rich_help_panel=_PANEL,
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(metavar="X", help="Subtract it from the logits of tokens that the answer has. Default: 0.", rich_help_panel=_PANEL),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(metavar="X", help="Subtract it for each time that the answer has a token. Default: 0.", rich_help_panel=_PANEL),
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
        help="Add the log-probability of each token to the answer, and those of the N most likely ones. Those of a prompt: `score`.",
        rich_help_panel=_PANEL,
    ),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Continue past the model's end token.", rich_help_panel=_PANEL)]


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The sampling options of a command line. The model's defaults hold for those that were not given."""

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
    """Return token id and bias of ``id=bias``."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise typer.BadParameter(f"expected ID=BIAS such as 42=-1.5, got {text!r}.", param_hint="--logit-bias") from None


def with_drawn_seed(params: SamplingParams) -> SamplingParams:
    """Return sampling parameters with a seed of their own, if they sample and have none: so the seed can be printed, and given again."""
    return replace(params, seed=secrets.randbits(_SEED_BITS)) if params.temperature > 0 and params.seed is None else params


def note_unused(options: Mapping[str, Any], defaults: SamplingParams) -> None:
    """Print which options of a command line change nothing, as the most likely token is always taken."""
    unused = [f"--{name.replace('_', '-')}" for name in _OF_DRAWING if name in options]
    if unused and options.get("temperature", defaults.temperature) == 0:
        note(f"{' and '.join(unused)}: without effect at temperature 0, which takes the most likely token. Give --temperature.")
