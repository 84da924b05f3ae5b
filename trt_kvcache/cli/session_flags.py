"""Options for model, engine and sizes of a session, and opening the session."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trt_kvcache.builder.options import DEFAULT_MAX_SEQUENCE_LENGTH, MTP
from trt_kvcache.cli.console import note, progress_bar, size
from trt_kvcache.cli.formats import kv_format
from trt_kvcache.cli.option_groups import Changed, choice, logits_per_slot
from trt_kvcache.cli.verbosity import is_quiet
from trt_kvcache.dtypes import DTYPE_SHORT_NAMES
from trt_kvcache.engine.attention_variants import AttentionSetting
from trt_kvcache.engine_folder.folder import is_engine_folder
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.session.model_headers import model_headers
from trt_kvcache.session.model_location import NEEDED_FILES, locate_adapter, locate_model
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.session_options import (
    ENGINE_ALIASES,
    EngineChoice,
    KVDTypeChoice,
    KVScalesChoice,
    PerLayerTableChoice,
    PluginLayersChoice,
)
from trt_kvcache.session.session_source import SessionSource

DTYPE_HELP = "Data type of weights, K and V. Default: the checkpoint's."
MAX_SEQUENCE_LENGTH_HELP = f"Tokens that a slot can hold. Default: the model's limit, at most {DEFAULT_MAX_SEQUENCE_LENGTH}."

ATTENTION_HELP = (
    "native: TensorRT's causal attention. mask: with an explicit mask. plugin: this package's kernels. auto: chosen by TensorRT, GPU and "
    "model; the build says why."
)

PLUGIN_LAYERS_HELP = "With plugin attention: one plan with plugin layers, or (TensorRT for RTX) a plan for each segment between them."

QUANTIZE_HELP = (
    "Quantize the weights of linear layers without calibration: int8, int4 (groups of 32) or int4:128, optionally followed by "
    ",embedding=... and ,head=..., which otherwise stay as stored."
)

ADAPTER_HELP = "Merge a LoRA adapter of PEFT into the weights: its folder, or an id of the Hugging Face Hub."

ADAPTERS_HELP = (
    "A LoRA adapter that runs next to the weights, with a name: its folder, or an id of the Hugging Face Hub. Can be given several times. "
    "A TensorRT engine folder needs a build with --adapters-rank."
)

DRAFT_HEAD_HELP = (
    "Count a draft head too: mtp for the multi-token prediction head in the model folder, or the folder of an EAGLE-3 head, or its id of "
    "the Hugging Face Hub. Default: none."
)

PER_LAYER_TABLE_HELP = (
    "Place of the table of per-layer embeddings (Gemma 4 E2B and E4B): GPU memory, or pinned host memory, of which PyTorch on a GPU reads "
    "the rows of each step."
)

KV_DTYPE_HELP = "Quantize K and V to 8 bits, with plugin attention. Default: --dtype."
KV_SCALES_HELP = (
    "Scales of quantized K and V: computed for each token and head, or static for each layer or head, from the checkpoint. "
    "Default: static if the checkpoint has them for this --kv-dtype, else token."
)

#: Default of the slots for many prompts.
MAX_SLOTS = 8

SLOTS_FOR_MANY = Changed("max_batch_size", help=f"Slots of the cache. Default: one per prompt, at most {MAX_SLOTS}.")

#: Default of the logits per slot, for a model folder: 39 MB a slot at a vocabulary of 152k.
_LOGITS_PER_SLOT = 64

_PANEL, MODEL_PANEL = "Engine", "For a model folder (an engine folder has them from its build)"


DTypeName = Literal["float16", "bfloat16", "float32"]
FlavourName = Literal["auto", "tensorrt", "tensorrt_rtx"]

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="ENGINE|MODEL", help="An engine folder, a Hugging Face model folder, or an id of the Hugging Face Hub (organisation/name)."
    ),
]
EngineOption = Annotated[
    EngineChoice,
    choice(
        EngineChoice,
        "--engine",
        aliases=ENGINE_ALIASES,
        help="auto uses TensorRT if it is installed, a supported GPU is present, and it can run the model; otherwise prints a warning "
        "and falls back to PyTorch if it is installed, else to the NumPy reference engine.",
        rich_help_panel=_PANEL,
    ),
]
FlavourOption = Annotated[
    FlavourName, choice(FlavourName, "--flavour", help="Which TensorRT to use if both are installed.", rich_help_panel=_PANEL)
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        metavar="ngram|mtp|MODEL",
        help="Speculative decoding: verify several proposed tokens in one step. The answers stay the same. ngram: prompt lookup, for "
        "answers that repeat parts of the prompt. mtp: the multi-token prediction head in a model folder of Qwen3-Next, Qwen3.5 or "
        "Nemotron-H. MODEL: drafts of a small model with the same tokenizer, of an EAGLE-3 head or of a Gemma 4 assistant. An engine "
        "folder needs a build with --max-logits-per-slot 17, or with --draft-head for mtp or an EAGLE-3 head.",
        rich_help_panel=_PANEL,
    ),
]
DraftTreeOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=MAX_TREE_TOKENS,
        metavar="TOKENS",
        help="Drafts of --draft MODEL as trees of at most this number of tokens, the token before them included, which propose several "
        "tokens for a position. Not with TensorRT. Default: chains.",
        rich_help_panel=_PANEL,
    ),
]
PrefillChunk = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="TOKENS",
        help="Chunked prefill: most prompt tokens of a step while other requests decode. Fewer make the time between tokens more even, "
        "more the first token of a long prompt earlier.",
        rich_help_panel=_PANEL,
    ),
]
CudaGraphs = Annotated[bool, typer.Option(help="Replay decode steps of a TensorRT engine as CUDA graphs.", rich_help_panel=_PANEL)]
PerLayerTable = Annotated[
    PerLayerTableChoice,
    choice(PerLayerTableChoice, "--per-layer-table", help=PER_LAYER_TABLE_HELP, rich_help_panel=_PANEL),
]
MaxBatchSize = Annotated[
    int | None, typer.Option(min=1, metavar="SLOTS", help="Slots of the cache. Default: one per prompt.", rich_help_panel=MODEL_PANEL)
]
MaxSequenceLength = Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help=MAX_SEQUENCE_LENGTH_HELP, rich_help_panel=MODEL_PANEL)]
DTypeOption = Annotated[
    DTypeName | None, choice(DTypeName, "--dtype", aliases=DTYPE_SHORT_NAMES, help=DTYPE_HELP, rich_help_panel=MODEL_PANEL)
]
AttentionOption = Annotated[
    AttentionSetting | None, choice(AttentionSetting, "--attention", help=f"{ATTENTION_HELP} Default: auto.", rich_help_panel=MODEL_PANEL)
]
PluginLayersOption = Annotated[
    PluginLayersChoice | None,
    choice(PluginLayersChoice, "--plugin-layers", help=f"{PLUGIN_LAYERS_HELP} Default: one-plan.", rich_help_panel=MODEL_PANEL),
]
QuantizeOption = Annotated[str | None, typer.Option("--quantize", metavar="FORMAT", help=QUANTIZE_HELP, rich_help_panel=MODEL_PANEL)]
AdapterOrName = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="ADAPTER|NAME",
        help=f"{ADAPTER_HELP} With --adapters: the name of the one to use. Default: none.",
        rich_help_panel=MODEL_PANEL,
    ),
]
AdaptersOption = Annotated[list[str] | None, typer.Option("--adapters", metavar="NAME=ADAPTER", help=ADAPTERS_HELP, rich_help_panel=_PANEL)]
KVDTypeOption = Annotated[KVDTypeChoice | None, choice(KVDTypeChoice, "--kv-dtype", help=KV_DTYPE_HELP, rich_help_panel=MODEL_PANEL)]
KVScalesOption = Annotated[KVScalesChoice | None, choice(KVScalesChoice, "--kv-scales", help=KV_SCALES_HELP, rich_help_panel=MODEL_PANEL)]


@dataclass(frozen=True, kw_only=True)
class SessionFlags:
    """Options of a session."""

    engine: EngineOption = "auto"
    flavour: FlavourOption = "auto"
    cuda_graphs: CudaGraphs = True
    per_layer_table: PerLayerTable = "device"
    max_batch_size: MaxBatchSize = None
    max_sequence_length: MaxSequenceLength = None
    dtype: DTypeOption = None
    attention: AttentionOption = None
    plugin_layers: PluginLayersOption = None
    quantize: QuantizeOption = None
    adapter: AdapterOrName = None
    adapters: AdaptersOption = None
    kv_dtype: KVDTypeOption = None
    kv_scales: KVScalesOption = None

    @property
    def request_adapter(self) -> str | None:
        """Name of the adapter that requests use; None for the base model, or for one with a merged adapter."""
        return self.adapter if self.adapters else None

    def source(self, folder: Path, *, slots: int, prompt_cache_bytes: int = 0) -> SessionSource:
        """Return the source of the session, which opens it later. ``slots`` is the default batch size of a model folder."""
        max_batch_size = self.max_batch_size if is_engine_folder(folder) else self.max_batch_size or slots
        return SessionSource(
            folder,
            engine=self.engine,
            flavour=self.flavour,
            cuda_graphs=self.cuda_graphs,
            per_layer_table=self.per_layer_table,
            prompt_cache_bytes=prompt_cache_bytes,
            max_batch_size=max_batch_size,
            max_sequence_length=self.max_sequence_length,
            dtype=self.dtype,
            attention=self.attention,
            plugin_layers=self.plugin_layers,
            quantize=self.quantize,
            adapter=None if self.adapters else located_adapter(self.adapter),
            adapters=_located_adapters(self.adapters),
            kv_dtype=self.kv_dtype,
            kv_scales=self.kv_scales,
        )


@dataclass(frozen=True, kw_only=True)
class ScoringFlags(SessionFlags):
    """Options of commands that score tokens: the engine returns the logits of several tokens per slot."""

    max_logits_per_slot: Annotated[
        Any,
        logits_per_slot(
            help=f"Tokens of a text that one enqueue scores; longer texts run in chunks. Default: {_LOGITS_PER_SLOT}.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None

    def source(self, folder: Path, *, slots: int, prompt_cache_bytes: int = 0) -> SessionSource:
        """Return the source of the session, as for other commands, with ``max_logits_per_slot``."""
        source = super().source(folder, slots=slots, prompt_cache_bytes=prompt_cache_bytes)
        wanted = self.max_logits_per_slot
        if wanted is None and not is_engine_folder(folder):
            wanted = min(_LOGITS_PER_SLOT, self.max_sequence_length or _LOGITS_PER_SLOT)
        return source.replace(max_logits_per_slot=wanted)


def located(folder: Path, files: Sequence[str] = NEEDED_FILES) -> Path:
    """Return the folder of an argument; a model of the Hugging Face Hub is downloaded first."""
    if folder.exists():
        return folder
    _quieten_downloads()
    return locate_model(folder.as_posix(), files=files)


def located_adapter(adapter: str | None) -> str | None:
    """Return the folder of ``--adapter``; an adapter of the Hugging Face Hub is downloaded first."""
    if adapter is None:
        return None
    _quieten_downloads()
    return locate_adapter(adapter)


def located_draft_head(draft_head: str | None) -> str | None:
    """Return the value of ``--draft-head``, with the folder of an EAGLE-3 head; one of the Hugging Face Hub is downloaded first."""
    return draft_head if draft_head in (None, MTP) else str(located(Path(draft_head)))


def _located_adapters(adapters: Sequence[str] | None) -> dict[str, str] | None:
    """Return the folders of ``--adapters`` by name."""
    found: dict[str, str] = {}
    for given in adapters or ():
        name, equals, adapter = given.partition("=")
        if not (name and equals and adapter):
            raise typer.BadParameter(f"expected NAME=ADAPTER, got {given}.", param_hint="--adapters")
        if name in found:
            raise typer.BadParameter(f"expected each name once, got {name} twice.", param_hint="--adapters")
        found[name] = str(located_adapter(adapter))
    return found or None


def located_headers(folder: Path) -> AbstractContextManager[Path]:
    """Return a context manager of the folder of an argument. Of a model of the Hub it has only the headers of weight files."""
    if not folder.exists():
        _quieten_downloads()
    return model_headers(folder.as_posix())


def _quieten_downloads() -> None:
    if is_quiet():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()


def open_session(source: SessionSource) -> InferenceSession:
    """Open a session with a progress bar. Prints the formats of quantized weights, K and V."""
    with progress_bar() as progress:
        session = source(progress)
    if session.weights is not None and session.weights.is_quantized:
        note(f"weights: {session.weights.format}")
    if session.adapters:
        note(f"adapters: {', '.join(session.adapters)}, {size(session.adapters_nbytes)}")
    kv = session.cache_config.kv
    if kv is not None and kv.scales is not None:
        note(f"K and V: {kv_format(kv.dtype, kv.scales)}")
    return session
