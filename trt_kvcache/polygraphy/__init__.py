"""Polygraphy runners with a KV cache, loaders, and comparisons of several paths of one model, in one namespace.

Each name is imported when it is first used, so that parts which need no TensorRT, or no Polygraphy, do not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors: the same names as below
    from trt_kvcache.polygraphy.compare_func import SessionCompareFunc as SessionCompareFunc
    from trt_kvcache.polygraphy.comparison import (
        Comparison as Comparison,
        PairComparison as PairComparison,
        PathRun as PathRun,
        TokenDifference as TokenDifference,
        comparison_lines as comparison_lines,
    )
    from trt_kvcache.polygraphy.feeds import greedy_feeds as greedy_feeds, make_feed as make_feed
    from trt_kvcache.polygraphy.first_difference import Difference as Difference
    from trt_kvcache.polygraphy.loaders import (
        EngineFolderFromModel as EngineFolderFromModel,
        NetworkFromModel as NetworkFromModel,
        SessionFromFolder as SessionFromFolder,
        engine_folder_from_model as engine_folder_from_model,
        network_from_model as network_from_model,
        session_from_folder as session_from_folder,
    )
    from trt_kvcache.polygraphy.network_script import NetworkScript as NetworkScript
    from trt_kvcache.polygraphy.path_comparison import TOLERANCES as TOLERANCES, compare_paths as compare_paths
    from trt_kvcache.polygraphy.runners import (
        RecomputeRunner as RecomputeRunner,
        ReferenceRunner as ReferenceRunner,
        SessionRunner as SessionRunner,
    )

_MODULE_OF = {
    "Comparison": "comparison",
    "Difference": "first_difference",
    "EngineFolderFromModel": "loaders",
    "NetworkFromModel": "loaders",
    "NetworkScript": "network_script",
    "PairComparison": "comparison",
    "PathRun": "comparison",
    "RecomputeRunner": "runners",
    "ReferenceRunner": "runners",
    "SessionCompareFunc": "compare_func",
    "SessionFromFolder": "loaders",
    "SessionRunner": "runners",
    "TOLERANCES": "path_comparison",
    "TokenDifference": "comparison",
    "compare_paths": "path_comparison",
    "comparison_lines": "comparison",
    "engine_folder_from_model": "loaders",
    "greedy_feeds": "feeds",
    "make_feed": "feeds",
    "network_from_model": "loaders",
    "session_from_folder": "loaders",
}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'trt_kvcache.polygraphy' has no attribute {name!r}")
    value = getattr(import_module(f"trt_kvcache.polygraphy.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
