"""The options that say how tokens are chosen, which ``generate`` and ``chat`` share."""

from typing import Annotated, Any

import typer

from trt_kvcache.errors import RangeError
from trt_kvcache.generation.sampling import SamplingParams

_PANEL = "Sampling"

MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate for a prompt.", rich_help_panel=_PANEL)]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. The model's own default if left out.", rich_help_panel=_PANEL)]
TopK = Annotated[int | None, typer.Option(min=0, help="Keep the k most likely tokens; 0 keeps all.", rich_help_panel=_PANEL)]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens that sum to p.", rich_help_panel=_PANEL)]
MinP = Annotated[float | None, typer.Option(help="Drop tokens less likely than p times the most likely one.", rich_help_panel=_PANEL)]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed gives the same text.", rich_help_panel=_PANEL)]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="A text that ends the output and is no part of it; may be repeated.", rich_help_panel=_PANEL),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end token.", rich_help_panel=_PANEL)]


def sampling_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``given``, the parameters of a command, that are set: the model's defaults hold for the others."""
    fields = SamplingParams.__dataclass_fields__
    options = {name: value for name, value in given.items() if name in fields and value not in (None, []) and value is not False}
    if "stop" in options:
        options["stop"] = tuple(options["stop"])
    try:
        SamplingParams(**options)
    except RangeError as error:
        name, _, text = str(error).removeprefix("SamplingParams.").partition(": ")
        raise typer.BadParameter(text, param_hint=f"--{name.replace('_', '-')}") from None
    return options
