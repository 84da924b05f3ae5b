"""``GGUFModel``: the GGUF files of one model, with their metadata as the files of a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.gguf.architectures import architecture_of, check_is_read
from trt_kvcache.checkpoint.gguf.header import GGUFHeader, StoredBlocks
from trt_kvcache.checkpoint.gguf.metadata import Metadata
from trt_kvcache.checkpoint.gguf.tokenizer_files import has_tokenizer, tokenizer_config, tokenizer_json
from trt_kvcache.errors import CheckpointError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 1 << 12


class GGUFModel:
    """A model in one GGUF file or a split one (``path``: the first file, ``...-00001-of-0000N.gguf``). Only headers are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        first = GGUFHeader(path)
        self._headers = [first, *(GGUFHeader(part) for part in _other_parts(first))]
        self._place: dict[str, GGUFHeader] = {}
        for header in self._headers:
            for name in header.tensors:
                if name in self._place:
                    raise CheckpointError(f"{header.path}: expected tensors that {self._place[name].path.name} has not, got {name}.")
                self._place[name] = header
        self.tensors: dict[str, StoredBlocks] = {name: header.tensors[name] for name, header in self._place.items()}
        self.metadata = Metadata(first, self.tensors)
        self.architecture = architecture_of(self.metadata)
        check_is_read(self.metadata)

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files of the model."""
        return tuple(header.path for header in self._headers)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The fields of ``config.json``."""
        return {"model_type": self.architecture.family, **self.architecture.config(self.metadata)}

    @property
    def has_tokenizer(self) -> bool:
        """True if the metadata has a tokenizer."""
        return has_tokenizer(self.metadata)

    @cached_property
    def tokenizer_json(self) -> str:
        """The text of ``tokenizer.json``."""
        return tokenizer_json(self.metadata)

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """The fields of ``tokenizer_config.json``."""
        return tokenizer_config(self.metadata)


def first_of_split(files: Sequence[Path]) -> Path | None:
    """Return the first file of a split model, or None if the names are not of one split model."""
    named = [_PART.fullmatch(file.name) for file in files]
    if len({(one[1], one[3]) if one else None for one in named}) != 1 or named[0] is None or int(named[0][2]) != 1:
        return None
    return files[0]


def _other_parts(first: GGUFHeader) -> list[Path]:
    """Return the other files of a split model. Raises CheckpointError if ``first`` is not the first one or others are missing."""
    count, number = first.fields.get("split.count", 0), first.fields.get("split.no", 0)
    if not isinstance(count, int) or not isinstance(number, int) or not 0 <= number <= max(count, 1) - 1 or count > _MAX_PARTS:
        raise CheckpointError(
            f"{first.path}: expected split.no from 0 to split.count - 1, got {short_repr(number)} of {short_repr(count)}."
        )
    if count <= 1:
        return []
    named = _PART.fullmatch(first.path.name)
    if number or named is None or (int(named[2]), int(named[3])) != (1, count):
        stem = named[1] if named else first.path.stem
        raise CheckpointError(
            f"{first.path}: expected the first file of a model in {count} files, {stem}-00001-of-{count:05}.gguf, "
            f"got number {number + 1} of them. The files keep their names, and the first one is opened."
        )
    parts = [first.path.with_name(f"{named[1]}-{part:05}-of-{count:05}.gguf") for part in range(2, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{first.path}: expected all {count} files of the model in one folder, got none of the name {missing[0]}"
            f"{f' (and {len(missing) - 1} more are missing)' if len(missing) > 1 else ''}. Fetch or copy it."
        )
    return parts
