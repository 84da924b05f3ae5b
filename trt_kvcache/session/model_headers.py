"""``model_headers``: names, dtypes and shapes of a model's weights, without downloading the weights."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trt_kvcache._util.caller_warning import warn_caller
from trt_kvcache.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, is_weight_file, open_weight_files
from trt_kvcache.errors import CheckpointError
from trt_kvcache.session.model_location import NEEDED_FILES, expanded, locate_model

_FILES_WITHOUT_WEIGHTS = tuple(name for name in NEEDED_FILES if "safetensors" not in name)

#: The number 1 in the dtypes of scales. Static scales of K and V must be above 0; how large they are changes no size.
_ONE = {"F32": b"\x00\x00\x80\x3f", "F16": b"\x00\x3c", "BF16": b"\x80\x3f"}
_KV_SCALES = ("k_scale", "v_scale")


@contextmanager
def model_headers(path_or_hub_id: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder with all of a model but the values of its weights: a few hundred kilobytes of a model of the Hub.

    Weight files of the temporary folder are sparse: headers only. If these cannot be downloaded, there is a warning and no weight file.
    """
    path = expanded(path_or_hub_id)
    snapshot = locate_model(path_or_hub_id, files=_FILES_WITHOUT_WEIGHTS)
    if path.exists() or _has_weights(snapshot):
        yield snapshot
        return
    with tempfile.TemporaryDirectory(prefix="trt_kvcache-") as place:
        folder = Path(place) / path.name
        folder.mkdir()
        for file in snapshot.iterdir():
            if file.is_file() and not is_weight_file(file):
                shutil.copyfile(file, folder / file.name)
        _write_headers(str(path_or_hub_id), folder)
        yield folder


def _has_weights(snapshot: Path) -> bool:
    try:
        return bool(open_weight_files(snapshot))
    except CheckpointError:
        return False


def _write_headers(hub_id: str, folder: Path) -> None:
    """Write the files of weights of a Hub model with their headers alone; warn and write nothing where they cannot be had."""
    from huggingface_hub import get_safetensors_metadata, list_repo_files

    try:
        names = list_repo_files(hub_id)
        metadata = get_safetensors_metadata(hub_id) if {SINGLE_FILE, INDEX_FILE} & set(names) else None
    except Exception as error:  # noqa: BLE001  # of the library, of the network libraries below it
        first = next(iter(str(error).splitlines()), "")
        warn_caller(
            f"{hub_id}: the headers of its weights cannot be read from the Hub ({type(error).__name__}: {first}). "
            "Sizes are those of config.json alone.",
            UserWarning,
        )
        return
    if metadata is None:
        found = [name for name in names if is_weight_file(Path(name))]
        raise CheckpointError(
            f"{hub_id}: expected weights in safetensors, got {', '.join(found[:3]) or 'none'}{', ...' if len(found) > 3 else ''}. "
            "A GGUF file is read where it is on this machine, by its path; other formats must be converted first."
        )
    if metadata.sharded:
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": metadata.weight_map}), encoding="utf-8")
    for name, file in metadata.files_metadata.items():
        if Path(name).name == name:  # else the index is refused as it is read, and nothing is written elsewhere
            _write_header(folder / name, file.tensors)


def _write_header(path: Path, tensors: dict[str, Any]) -> None:
    entries = {
        name: {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": list(one.data_offsets)} for name, one in tensors.items()
    }
    text = json.dumps(entries).encode()
    header = len(text).to_bytes(8, "little") + text
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + max((one.data_offsets[1] for one in tensors.values()), default=0))
        for name, one in tensors.items():
            if name.endswith(_KV_SCALES) and one.dtype in _ONE:
                file.seek(len(header) + one.data_offsets[0])
                file.write(_ONE[one.dtype] * ((one.data_offsets[1] - one.data_offsets[0]) // len(_ONE[one.dtype])))
