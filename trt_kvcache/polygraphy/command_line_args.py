"""Our options of ``polygraphy run``, which finds :func:`get_arg_groups` by the entry point group ``polygraphy.run.plugins``.

The model argument is a folder: an engine folder or a Hugging Face folder. Each ``--kvcache-*`` runner flag adds a runner with a
session, and so a cache, of its own.
"""

from pathlib import Path
from typing import Any

from polygraphy.tools.args import ComparatorCompareArgs, DataLoaderArgs, ModelArgs, util as args_util
from polygraphy.tools.args.base import BaseArgs, BaseRunnerArgs
from polygraphy.tools.script import make_invocable

from trt_kvcache.builder.options import PLUGIN_LAYERS
from trt_kvcache.checkpoint.json_file import read_json
from trt_kvcache.dtypes import MODEL_DTYPES, dtype_in_full
from trt_kvcache.engine.attention_variants import ATTENTION_SETTINGS
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.engine_folder.folder import EngineFolder, is_engine_folder
from trt_kvcache.errors import KVCacheError
from trt_kvcache.model import ModelConfig
from trt_kvcache.polygraphy.feeds import INPUT_IDS, NEW_LENGTHS
from trt_kvcache.session.session_options import ENGINE_ALIASES, ENGINES


def get_arg_groups() -> list[Any]:
    """Return the argument groups that ``polygraphy run`` adds to its own.

    Returns
    -------
    list of BaseArgs
        The shared options, and one group for each runner.
    """
    return [KVCacheArgs(), KVCacheSessionArgs(), KVCacheRecomputeArgs(), KVCacheReferenceArgs()]


class KVCacheArgs(BaseArgs):  # type: ignore[misc]  # polygraphy has no types
    """
    KV Cache Sessions: the runners --kvcache-session, --kvcache-recompute and --kvcache-reference.

    Depends on:

        - ModelArgs
        - DataLoaderArgs
    """

    def add_parser_args_impl(self) -> None:
        """Add the options of all our runners."""
        add = self.group.add_argument
        add(
            "--kvcache-engine",
            type=lambda name: ENGINE_ALIASES.get(name, name),
            choices=ENGINES,
            help="Engine of --kvcache-session and --kvcache-recompute: TensorRT, PyTorch, NumPy, or the first of them that runs here",
        )
        add("--kvcache-flavour", choices=FLAVOURS, help="Which TensorRT; auto chooses the one that built the engine")
        add(
            "--kvcache-max-batch-size",
            metavar="B",
            type=int,
            help="Slots of the cache. This option and the next five apply to model folders only",
        )
        add("--kvcache-max-sequence-length", metavar="S", type=int, help="Tokens that a slot can hold")
        add("--kvcache-max-prefill-length", metavar="N", type=int, help="The most new tokens per slot in one enqueue")
        add("--kvcache-dtype", type=dtype_in_full, choices=MODEL_DTYPES, help="Dtype of computation and cache")
        add(
            "--kvcache-attention",
            choices=ATTENTION_SETTINGS,
            help="TensorRT's attention with lengths, with an explicit mask, or the attention of our plugin; auto chooses",
        )
        add(
            "--kvcache-plugin-layers",
            choices=PLUGIN_LAYERS,
            help="With our plugin: one plan with plugin layers, or a plan for each segment",
        )
        add("--kvcache-no-live-rows", action="store_true", default=None, help="Return logits only, not the live rows of the cache")

    def parse_impl(self, args: Any) -> None:
        """Store the options under the names of ``SessionSource``; None for options that were not given.

        Parameters
        ----------
        args : argparse.Namespace
            The parsed command line.
        """
        names = ("flavour", "max_batch_size", "max_sequence_length", "max_prefill_length", "dtype", "attention", "plugin_layers")
        self.engine: str | None = args_util.get(args, "kvcache_engine")
        self.options: dict[str, Any] = {name: args_util.get(args, f"kvcache_{name}") for name in names}
        self._compares_by_default = args_util.get(args, "compare") in (None, ["simple"]) and all(
            args_util.get(args, name) is None for name in ("atol", "rtol", "check_error_stat", "error_quantile")
        )
        self.live_rows: bool | None = False if args_util.get(args, "kvcache_no_live_rows") else None

    def set_defaults(self) -> None:
        """Set defaults: random tokens of the whole vocabulary, and our tolerances."""
        found = _vocabulary_and_dtype(self.arg_groups[ModelArgs].path)
        if found is None:
            return
        vocab_size, dtype = found
        loader, comparison = self.arg_groups[DataLoaderArgs], self.arg_groups[ComparatorCompareArgs]
        if loader.val_range is None:
            loader.val_range = {INPUT_IDS: (0, vocab_size - 1)}
        if self._compares_by_default and comparison.compare_func_script is None:
            comparison.compare_func_script = str(Path(__file__).with_name("tolerances.py"))
            comparison.compare_func_name = self.options["dtype"] or dtype

    def add_loader_to_script(self, script: Any, *, engine: str | None) -> Any:
        """Add a ``SessionFromFolder`` to the script that Polygraphy generates.

        Parameters
        ----------
        script : polygraphy.tools.script.Script
            The script, which is changed.
        engine : str or None
            Name of the engine; None for the default.

        Returns
        -------
        str
            Name of the variable that holds the loader.
        """
        script.add_import(imports=["SessionFromFolder"], frm="trt_kvcache.polygraphy")
        loader = make_invocable("SessionFromFolder", self.arg_groups[ModelArgs].path, engine=engine, **self.options)
        return script.add_loader(loader, "kvcache_load_session")

    @property
    def tokens_only(self) -> bool | None:
        """True if the inputs are random and the command line does not ask for lengths, else None."""
        random = self.arg_groups[DataLoaderArgs].is_using_random_data()
        return True if random and NEW_LENGTHS not in (self.arg_groups[ModelArgs].input_shapes or {}) else None


def _vocabulary_and_dtype(path: str) -> tuple[int, str] | None:
    """Return the vocabulary size of a model and the dtype of its cache; None if it is no such folder, which the session refuses later."""
    folder = Path(path)
    try:
        if is_engine_folder(folder):
            config = EngineFolder.open(folder).config
            return config.model.vocab_size, config.cache.dtype
        model = ModelConfig.from_dict(read_json(folder / "config.json"))
    except (KVCacheError, OSError):
        return None
    return model.vocab_size, model.dtype


class _RunnerArgs(BaseRunnerArgs):  # type: ignore[misc]
    """Flag of one of our runners, and the class that it adds to the script."""

    _NAME_AND_FLAG: tuple[str, str]
    _RUNNER: str
    #: The only engine of the runner, if there is only one.
    _ENGINE: str | None = None
    #: Name of the runner, if not the default one.
    _NAME: str | None = None

    def get_name_opt_impl(self) -> tuple[str, str]:
        """Return the runner's name and its flag."""
        return self._NAME_AND_FLAG

    def add_to_script_impl(self, script: Any) -> None:
        """Add the runner."""
        shared = self.arg_groups[KVCacheArgs]
        script.add_import(imports=[self._RUNNER], frm="trt_kvcache.polygraphy")
        if shared.tokens_only:
            shared.set_defaults()
        loader = shared.add_loader_to_script(script, engine=self._ENGINE or shared.engine)
        options = {"name": self._NAME, "live_rows": shared.live_rows, "tokens_only": shared.tokens_only}
        script.add_runner(make_invocable(self._RUNNER, loader, **options))


class KVCacheSessionArgs(_RunnerArgs):
    """
    KV Cache Session Runner: running sessions that keep their cache from one iteration to the next.

    Depends on:

        - KVCacheArgs
    """

    _NAME_AND_FLAG = "a KV cache session", "kvcache-session"
    _RUNNER = "SessionRunner"


class KVCacheRecomputeArgs(_RunnerArgs):
    """
    KV Cache Recompute Runner: running sessions that start new sequences with all tokens so far at every iteration.

    Depends on:

        - KVCacheArgs
    """

    _NAME_AND_FLAG = "a KV cache session that recomputes everything at every iteration", "kvcache-recompute"
    _RUNNER = "RecomputeRunner"


class KVCacheReferenceArgs(_RunnerArgs):
    """
    KV Cache Reference Runner: running sessions on the NumPy reference engine.

    Depends on:

        - ModelArgs
        - KVCacheArgs
    """

    _NAME_AND_FLAG = "a KV cache session on the NumPy reference engine", "kvcache-reference"
    _RUNNER = "SessionRunner"
    _ENGINE = "numpy"
    _NAME = "kvcache-reference"
