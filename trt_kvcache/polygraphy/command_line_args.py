"""Our runners in ``polygraphy run``: its entry point ``polygraphy.run.plugins`` calls :func:`get_arg_groups`.

The model argument is the folder, of an engine or from Hugging Face; each ``--kvcache-*`` runner flag adds a runner with a
session, and so a cache, of its own.
"""

from typing import Any, get_args

from polygraphy.tools.args import ModelArgs, util as args_util
from polygraphy.tools.args.base import BaseArgs, BaseRunnerArgs
from polygraphy.tools.script import make_invocable

from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.reference import Attention
from trt_kvcache.session.session_options import EngineChoice


def get_arg_groups() -> list[Any]:
    """Return the argument groups that ``polygraphy run`` adds to its own."""
    return [KVCacheArgs(), KVCacheSessionArgs(), KVCacheRecomputeArgs(), KVCacheReferenceArgs()]


class KVCacheArgs(BaseArgs):  # type: ignore[misc]  # polygraphy has no types
    """
    KV Cache Sessions: the runners --kvcache-session, --kvcache-recompute and --kvcache-reference.

    Depends on:

        - ModelArgs
    """

    def add_parser_args_impl(self) -> None:
        """Add the options that all our runners share."""
        add = self.group.add_argument
        add(
            "--kvcache-engine",
            choices=get_args(EngineChoice),
            help="What --kvcache-session and --kvcache-recompute run: TensorRT, the NumPy reference engine, or TensorRT where it can run",
        )
        add("--kvcache-flavour", choices=FLAVOURS, help="Which TensorRT; auto takes the one that built the engine")
        add("--kvcache-max-batch-size", metavar="B", type=int, help="Slots of the cache. This and the next four: for model folders only")
        add("--kvcache-max-sequence-length", metavar="S", type=int, help="Tokens that a slot can hold")
        add("--kvcache-max-prefill-length", metavar="N", type=int, help="Most new tokens of a slot in one enqueue")
        add("--kvcache-dtype", choices=MODEL_DTYPES, help="What the model is computed in and the cache holds")
        add("--kvcache-attention", choices=get_args(Attention), help="Attention with lengths, with an explicit mask, or our plugin's")
        add("--kvcache-no-live-rows", action="store_true", default=None, help="Return logits only, not the live rows of the cache")

    def parse_impl(self, args: Any) -> None:
        """Keep what was given, by the names of ``SessionSource``; None for what was not."""
        names = ("flavour", "max_batch_size", "max_sequence_length", "max_prefill_length", "dtype", "attention")
        self.engine: str | None = args_util.get(args, "kvcache_engine")
        self.options: dict[str, Any] = {name: args_util.get(args, f"kvcache_{name}") for name in names}
        self.live_rows: bool | None = False if args_util.get(args, "kvcache_no_live_rows") else None

    def add_source_to_script(self, script: Any) -> Any:
        """Add the session's source to the script and return the name of its variable."""
        script.add_import(imports=["SessionSource"], frm="trt_kvcache.session.session_source")
        source = make_invocable("SessionSource", self.arg_groups[ModelArgs].path, engine=self.engine, **self.options)
        return script.add_loader(source, "kvcache_session_source")


class _RunnerArgs(BaseRunnerArgs):  # type: ignore[misc]
    """One of our runners: its name, its flag and its class."""

    _NAME_AND_FLAG: tuple[str, str]
    _RUNNER: str

    def get_name_opt_impl(self) -> tuple[str, str]:
        """Return the runner's name and its flag."""
        return self._NAME_AND_FLAG

    def add_to_script_impl(self, script: Any) -> None:
        """Add the runner."""
        shared = self.arg_groups[KVCacheArgs]
        script.add_import(imports=[self._RUNNER], frm="trt_kvcache.polygraphy.runners")
        source, options = self._source(shared, script)
        script.add_runner(make_invocable(self._RUNNER, source, live_rows=shared.live_rows, **options))

    def _source(self, shared: KVCacheArgs, script: Any) -> tuple[Any, dict[str, Any]]:
        """Return what the runner takes first, and its further options."""
        return shared.add_source_to_script(script), {}


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
    KV Cache Recompute Runner: running sessions that start anew with all tokens so far at every iteration.

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
    _RUNNER = "ReferenceRunner"

    def _source(self, shared: KVCacheArgs, script: Any) -> tuple[Any, dict[str, Any]]:
        return self.arg_groups[ModelArgs].path, shared.options
