"""``WeightFile``: what a file of weights has, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from trt_kvcache.checkpoint.safetensors_file import StoredTensor


class WeightFile(Protocol):
    """A memory-mapped file of tensors under the names of Hugging Face transformers."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files that the tensors are in."""

    @property
    def keeps_values(self) -> bool:
        """Whether a tensor keeps the dtype that it is stored in until somebody computes with it, whatever the dtype of the model is."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by name."""

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as a read-only array, in the stored dtype.

        Parameters
        ----------
        name : str
            One of :attr:`tensors`.
        """

    def release(self, name: str) -> None:
        """Let the operating system take the memory of a tensor. Arrays of it stay valid: they are read from the file again.

        Parameters
        ----------
        name : str
            One of :attr:`tensors`.
        """

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tensors other names.

        Parameters
        ----------
        names : mapping of str to str
            The new name of each tensor that changes its name.
        """
