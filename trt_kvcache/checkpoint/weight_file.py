"""``WeightFile``: the interface of memory-mapped weight files of all formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from trt_kvcache.checkpoint.safetensors_file import StoredTensor


class WeightFile(Protocol):
    """Memory-mapped tensors under their names in Hugging Face transformers."""

    @property
    def path(self) -> Path:
        """The file; of a split model the first one."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files of the tensors."""

    @property
    def keeps_values(self) -> bool:
        """True if tensors keep their stored dtype until they are used, whatever the dtype of the model is."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by name."""

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as a read-only array in the stored dtype, over the mapping: a copy only if it is not aligned or was converted.

        Parameters
        ----------
        name : str
            One of :attr:`tensors`.
        """

    def release(self, name: str) -> None:
        """Let the operating system drop the pages of a tensor. Its arrays stay valid: an access reads the file again.

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
            New name of each tensor that changes its name; all names differ.
        """
