"""The weights of a checkpoint, in the dtype that the engine computes in."""

from typing import Any, Protocol

import numpy as np

from trt_kvcache.dtypes import dtype_name, numpy_dtype
from trt_kvcache.errors import BuildError


class TensorSource(Protocol):
    """What weights are read from: a :class:`~trt_kvcache.checkpoint.Checkpoint`, or anything with this method."""

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """Return a weight.

        Parameters
        ----------
        name : str
            Its Hugging Face name.

        Returns
        -------
        ndarray
            In its stored dtype.
        """


class Weights:
    """Weights by their Hugging Face names.

    Parameters
    ----------
    checkpoint : TensorSource
        The open checkpoint.
    dtype : str
        The dtype to return them in.

    Examples
    --------
    >>> from trt_kvcache.checkpoint import Checkpoint
    >>> with Checkpoint.open("examples/tiny-llama") as checkpoint:
    ...     Weights(checkpoint, "float16")("model.norm.weight").dtype
    dtype('float16')
    """

    def __init__(self, checkpoint: TensorSource, dtype: str) -> None:
        self._checkpoint = checkpoint
        self.dtype = dtype

    def __call__(self, name: str) -> np.ndarray[Any, Any]:
        """Return one weight.

        Parameters
        ----------
        name : str
            Its Hugging Face name.

        Returns
        -------
        ndarray
            A view of the checkpoint's memory if it is stored in this dtype, else a converted copy.

        Raises
        ------
        BuildError
            A value is too large for the dtype (float16 ends at 65504).
        """
        stored = self._checkpoint.tensor(name)
        dtype = numpy_dtype(self.dtype)
        if stored.dtype == dtype:
            return stored
        with np.errstate(over="ignore"):
            converted = stored.astype(dtype)
        if self.dtype == "float16" and not np.isfinite(converted).all():
            raise BuildError(
                f"weight `{name}`: it holds {dtype_name(stored.dtype)} values that float16 cannot hold (up to 65504). "
                "Build with dtype bfloat16 or float32."
            )
        return converted
