"""``SessionCompareFunc``: our tolerances for Polygraphy's ``Comparator.compare_accuracy`` and ``polygraphy run --compare-func-script``."""

from collections import OrderedDict
from typing import Any

from polygraphy.comparator.compare import BaseCompareFunc
from polygraphy.logger import G_LOGGER

from trt_kvcache._util.checks import one_of
from trt_kvcache.errors import RangeError
from trt_kvcache.polygraphy.comparison import difference_lines
from trt_kvcache.polygraphy.first_difference import compare_arrays, first_difference, outputs_in_order
from trt_kvcache.polygraphy.path_comparison import TOLERANCES


class SessionCompareFunc(BaseCompareFunc):  # type: ignore[misc]  # polygraphy has no types
    """Compares the outputs of two of our runners, relative to the largest value of the same slot (and head).

    Polygraphy's own default compares each element with 1e-5, absolute and relative to itself, which 16-bit values exceed where an
    element is small next to its neighbours.

    Parameters
    ----------
    dtype : {"float32", "float16", "bfloat16", "int8", "float8_e4m3fn"}
        Dtype of the cache; of two, the one with the larger tolerance.
    tolerance : float, optional
        Largest accepted difference, instead of the tolerance of the dtype
        (:data:`~trt_kvcache.polygraphy.path_comparison.TOLERANCES`).

    Raises
    ------
    ConfigError
        There is no tolerance for the dtype.
    RangeError
        The tolerance is negative.

    Examples
    --------
    >>> from polygraphy.comparator import Comparator
    >>> from polygraphy.logger import G_LOGGER
    >>> from trt_kvcache.polygraphy import RecomputeRunner, SessionCompareFunc, SessionFromFolder, SessionRunner, make_feed
    >>> load = SessionFromFolder("examples/tiny-llama", engine="numpy", max_batch_size=1)
    >>> feeds = [make_feed([[5, 6, 7]], reset=True), make_feed([[8]], reset=False)]
    >>> with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
    ...     results = Comparator.run([SessionRunner(load, "cached"), RecomputeRunner(load, "recomputed")], data_loader=feeds)
    ...     bool(Comparator.compare_accuracy(results, compare_func=SessionCompareFunc(dtype="float16")))
    True
    """

    def __init__(self, *, dtype: str = "float32", tolerance: float | None = None) -> None:
        one_of("dtype", dtype, TOLERANCES)
        if tolerance is not None and not tolerance >= 0:
            raise RangeError(f"tolerance: expected 0 or more, got {tolerance}.")
        #: Largest accepted difference.
        self.tolerance = TOLERANCES[dtype] if tolerance is None else tolerance

    def __call__(self, iter_result0: Any, iter_result1: Any) -> "OrderedDict[str, bool]":
        """Compare one inference: True for each output that agrees. The first difference is logged. Other lengths: rows are skipped."""
        names = iter_result0.runner_name, iter_result1.runner_name
        agreed: OrderedDict[str, bool] = OrderedDict()
        for output in outputs_in_order(name for name in iter_result0 if name in iter_result1):
            ours, theirs = iter_result0[output.name], iter_result1[output.name]
            if ours.shape != theirs.shape:
                G_LOGGER.error(f"FAILED | `{output.name}`: {names[0]} has shape {ours.shape}, {names[1]} has {theirs.shape}.")
                agreed[output.name] = False
                continue
            outcome = compare_arrays(ours, theirs, 0.0 if output.kind == "length" else self.tolerance)
            agreed[output.name] = not outcome.wrong.any()
            difference = first_difference(0, output, ours, theirs, outcome)
            if difference is not None:
                place, values = difference_lines(difference, *names)
                G_LOGGER.error(f"FAILED | {place.removeprefix('first at the prefill ')}\n{values}")
                if output.kind == "length":
                    break
            else:
                G_LOGGER.info(f"`{output.name}`: largest difference {outcome.share:.2g}, at most {self.tolerance:.2g}")
        return agreed
