"""The weight files of a model folder: a safetensors file, shards with an index, or a GGUF file."""

from collections.abc import Mapping
from pathlib import Path

from trt_kvcache._util.caller_warning import warn_caller
from trt_kvcache.checkpoint.gguf.model import GGUFModel, first_of_split
from trt_kvcache.checkpoint.gguf.weights import GGUFWeights
from trt_kvcache.checkpoint.json_file import read_json
from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile
from trt_kvcache.checkpoint.weight_file import WeightFile
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.families.family import Family

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

#: Suffixes of weight files and their indices: of the formats that are read, and of others in use.
_ENDINGS = tuple(
    ending + more for ending in (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack") for more in ("", ".index.json")
)


def has_weight_files(folder: Path) -> bool:
    """Return True if a model has weights or claims to, so that they can be checked."""
    return folder.is_file() or any(map(is_weight_file, folder.iterdir()))


def is_weight_file(path: Path) -> bool:
    """Return True for a weight file, or an index of such files, by its name."""
    return path.name.endswith(_ENDINGS)


def open_weight_files(folder: Path, family: Family | None = None) -> dict[str, WeightFile]:
    """Map the weight files of a model into memory, and return the file of each tensor.

    Shards that hold only what the family ignores stay closed. Raises CheckpointError; warns of GGUF files that are not read.
    """
    if folder.is_file():
        return _open_gguf(folder)
    single, ggufs = folder / SINGLE_FILE, sorted(folder.glob("*.gguf"))
    if ggufs and gguf_path(folder) is None:
        warn_caller(f"{folder}: weights are read from safetensors, and not from {ggufs[0].name}, which is there too.", UserWarning)
    if single.is_file():
        file = SafetensorsFile(single)
        return dict.fromkeys(file.tensors, file)
    index = folder / INDEX_FILE
    if index.is_file():
        return _open_shards(index, family)
    gguf = gguf_path(folder)
    if gguf is not None:
        return _open_gguf(gguf)
    found = sorted(path.name if path.is_file() else f"{path.name}, which is no file" for path in folder.iterdir() if is_weight_file(path))
    raise CheckpointError(
        f"{folder}: expected {SINGLE_FILE}, or shards with {INDEX_FILE}, got {', '.join(found[:3]) or 'neither'}. "
        "Weights in another format (pytorch_model.bin) must be converted to safetensors first. "
        "A GGUF file is read where it is the only one."
    )


def gguf_path(folder: Path) -> Path | None:
    """Return the GGUF file of a model's weights (of a split model the first); None for safetensors, or without weights."""
    if folder.is_file():
        return folder
    if any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        first = first_of_split(files)
        if first is not None:
            return first
        raise CheckpointError(
            f"{folder}: expected one GGUF file, got {', '.join(file.name for file in files[:3])}. Keep one of them there."
        )
    return files[0] if files else None


def family_names(files: Mapping[str, WeightFile], family: Family, folder: Path) -> dict[str, WeightFile]:
    """Rename the tensors in ``files`` to the names of the family, and return them without those that the family ignores."""
    names: dict[str, str] = {}
    for stored in files:
        name = family.own_name(stored)
        if name in names:
            raise CheckpointError(f"{folder}: expected one tensor {name} of a {family.name} model, got {names[name]} and {stored}.")
        names[name] = stored
    new_names = {stored: name for name, stored in names.items()}
    kept = {name: files[stored] for name, stored in names.items() if not family.ignores(stored)}
    for file in dict.fromkeys(files.values()):
        file.rename(new_names)
    return kept


def _open_gguf(path: Path) -> dict[str, WeightFile]:
    weights = GGUFWeights(GGUFModel(path))
    return dict.fromkeys(weights.tensors, weights)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # not a valid file name
        return False


def _open_shards(index: Path, family: Family | None) -> dict[str, WeightFile]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: expected an object `weight_map` from tensor names to file names, got {type(weight_map).__name__}.")
    files: dict[str, SafetensorsFile] = {}
    for shard in sorted({shard for name, shard in weight_map.items() if family is None or not family.ignores(name)}):
        path = index.parent / shard
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: expected shards next to the index, got {shard!r}.")
        if not _is_file(path):
            raise CheckpointError(f"{path}: expected a shard that {index.name} names, got nothing there. Fetch or copy it again.")
        files[shard] = SafetensorsFile(path)
        stray = sorted(name for name in files[shard].tensors if weight_map.get(name) != shard)
        if stray:
            raise CheckpointError(
                f"{path}: holds {stray[0]!r}, which {INDEX_FILE} does not place there. The files are of different checkpoints."
            )
    found = {name: shard for name, shard in weight_map.items() if shard in files}
    for name, shard in found.items():
        if name not in files[shard].tensors:
            raise CheckpointError(f"{files[shard].path}: {INDEX_FILE} places {name!r} there, but the file has no such tensor.")
    return {name: files[shard] for name, shard in found.items()}
