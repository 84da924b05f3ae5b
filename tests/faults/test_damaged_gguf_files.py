"""GGUF files that are damaged, or made to hurt: refused with an error of ours, quickly and without much memory, or opened."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

import gguf

from tests.checkpoint.gguf.convert import convert
from tests.checkpoint.gguf.test_tokenizers import PUBLISHED, byte_level, sentencepiece
from tests.checkpoint.gguf.tokenizers_in_metadata import write_tokenizer
from tests.faults.mutations import damage_bytes
from tests.faults.watch import Findings, begin_peak, peak_growth
from tests.paths import GOLDEN
from trt_kvcache import Checkpoint, InferenceSession, Tokenizer
from trt_kvcache.checkpoint.gguf.header import GGUFHeader
from trt_kvcache.errors import CheckpointError

#: Values that counts, lengths, offsets and numbers are replaced by.
_ODD = (0, 1, 2, 7, 8, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def write(path: Path, kind: str = "gpt2") -> Path:
    def edit(writer: gguf.GGUFWriter) -> None:
        original = byte_level(PUBLISHED["gpt-2"]) if kind == "gpt2" else sentencepiece(prefix=True)
        write_tokenizer(writer, original, kind=kind, pre="gpt-2", bos=0, eos=1)
        writer.add_chat_template("{{ messages }}")

    return convert(GOLDEN / "llama", path, kind="Q8_0", edit=edit)


def run_model(path: Path) -> None:
    """Open a file as the commands do, and run two tokens."""
    with InferenceSession.from_model(path, engine="reference", max_sequence_length=16) as session:
        if session.tokenizer is not None:
            session.tokenizer.decode(session.tokenizer.encode("The rabbit"))
            if session.tokenizer.has_chat_template:
                session.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
        for _ in session.generate([[5, 6, 7]], max_new_tokens=2, temperature=0.0):
            pass


def damaged(content: bytes, header_nbytes: int, chance: random.Random) -> bytes:
    """Damage bytes of the header, or replace a number in it."""
    if chance.random() < 0.3:
        return damage_bytes(content[:header_nbytes], chance) + content[header_nbytes:]
    if chance.random() < 0.2:
        return content[: chance.randrange(len(content))]
    at, size = chance.randrange(4, header_nbytes), chance.choice(["<I", "<Q"])
    number = struct.pack(size, chance.choice(_ODD) % (1 << 8 * struct.calcsize(size)))
    return content[:at] + number + content[at + len(number) :]


def cases(tmp_path: Path, seeds: range) -> None:
    originals = [write(tmp_path / f"{kind}.gguf", kind) for kind in ("gpt2", "llama")]
    findings, before = Findings(), begin_peak()
    for seed in seeds:
        original = originals[seed % 2].read_bytes()
        start = min(tensor.offset for tensor in GGUFHeader(originals[seed % 2]).tensors.values())
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged(original, start, random.Random(seed)))
        findings.run(f"gguf {seed}", lambda path=path: run_model(path))
    findings.check()
    assert findings.refused
    assert peak_growth(before) < 1 << 30


def test_damaged_headers(tmp_path: Path) -> None:
    cases(tmp_path, range(40))


@pytest.mark.slow
def test_thousands_of_damaged_headers(tmp_path: Path) -> None:
    cases(tmp_path, range(1000, 4000))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*fields: bytes, tensors: int = 0, count: int | None = None, version: int = 3) -> bytes:
    counts = struct.pack("<QQ", tensors, len(fields) if count is None else count)
    return b"GGUF" + struct.pack("<I", version) + counts + b"".join(fields)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def array(name: str, kind: int, count: int) -> bytes:
    return text(name) + struct.pack("<IIQ", 9, kind, count)


#: What a file says, and what is said of it.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected a whole GGUF file, got one that cannot be read: "),
    "magic": (b"GGML" + bytes(60), "it begins with b'GGML'"),
    "version 1": (header(ARCHITECTURE, version=1), "in little-endian order, got version 1."),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "got one of a big-endian machine."),
    "fields": (header(count=2**63), "it claims 0 tensors and 9223372036854775808 fields"),
    "tensors": (header(ARCHITECTURE, tensors=2**40), "it claims 1099511627776 tensors and 1 fields"),
    "few bytes": (header(ARCHITECTURE, count=2), "its header ends early"),
    "long text": (header(text("a") + struct.pack("<IQ", 8, 2**62)), "its header claims 4611686018427387904 bytes"),
    "long name": (header(struct.pack("<Q", 2**33)), "a name of it has 8589934592 bytes"),
    "numbers": (header(array("a", 4, 2**61)), "its header claims 9223372036854775808 bytes"),
    "texts": (header(array("a", 8, 2**62)), "it claims 4611686018427387904 texts"),
    "a text in texts": (header(array("a", 8, 2) + struct.pack("<QQ", 0, 2**63)), "an array of 2 texts goes beyond its end"),
    "arrays of arrays": (header(array("a", 9, 2**20) * 50), "is of type 9, an array of arrays"),
    "type": (header(text("a") + struct.pack("<I", 77)), "field 'a' is of type 77"),
    "same names": (header(ARCHITECTURE, ARCHITECTURE), "1 of its 2 fields have the name of another one"),
    "alignment": (header(ARCHITECTURE, text("general.alignment") + struct.pack("<II", 4, 3)), "general.alignment is 3 and no power of two"),
    "dimensions": (header(ARCHITECTURE, text("x") + struct.pack("<I", 2**31), tensors=1, count=1), "tensor 'x' has 2147483648 dimensions"),
    "type of a tensor": (
        header(ARCHITECTURE, text("x") + struct.pack("<IQIQ", 1, 32, 99, 0), tensors=1, count=1),
        "expected a type that the installed gguf package knows, got number 99",
    ),
    "blocks": (
        header(ARCHITECTURE, text("x") + struct.pack("<IQIQ", 1, 33, 2, 0), tensors=1, count=1),
        "rows of 33 elements in blocks of 32",
    ),
    "size of a tensor": (
        header(ARCHITECTURE, text("x") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), tensors=1, count=1),
        "'x' has 4835703278458516698824704 bytes",
    ),
    "offset": (header(ARCHITECTURE, text("x") + struct.pack("<IQIQ", 1, 32, 0, 2**63), tensors=1, count=1), "at byte 92233720368547"),
    "no architecture": (header(), "general.architecture: expected a text, got None."),
    "another architecture": (header(text("general.architecture") + struct.pack("<I", 8) + text("clip")), "expected one of llama, "),
    "an adapter": (header(ARCHITECTURE, text("general.type") + struct.pack("<I", 8) + text("adapter")), "adapters and vision towers"),
    "experts": (header(ARCHITECTURE, text("llama.expert_count") + struct.pack("<II", 4, 8)), "mixture of experts is not supported, got 8."),
    "an encoder": (header(ARCHITECTURE, text("llama.attention.causal") + struct.pack("<IB", 7, 0)), "it is an encoder."),
    "no sizes": (header(ARCHITECTURE), "llama.vocab_size: expected an integer of at least 0, got None."),
    "part of a model": (
        header(ARCHITECTURE, text("split.count") + struct.pack("<IH", 2, 3), text("split.no") + struct.pack("<IH", 2, 1)),
        "expected the first file of a model in 3 files, model-00001-of-00003.gguf, got number 2 of them.",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    content, complaint = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    before = begin_peak()
    for open_it in (Checkpoint.open, Checkpoint.read_config):
        with pytest.raises(CheckpointError) as caught:
            open_it(path)
        assert complaint in str(caught.value)
        assert str(path) in str(caught.value)
    assert peak_growth(before) < 1 << 26


def test_a_sparse_file_of_empty_texts(tmp_path: Path) -> None:
    """Every text of it has a length of 0, so that it never ends before the file does."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(header(array("tokenizer.ggml.tokens", 8, 2**33)))
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="it claims 8589934592 texts"):
        Tokenizer.open(path)


def changed(path: Path, **fields: Any) -> Path:
    """Write a model with some fields replaced."""

    def edit(writer: gguf.GGUFWriter) -> None:
        for name, value in fields.items():
            key = f"llama.{name.replace('__', '.')}"
            writer.kv_data[0][key] = gguf.GGUFValue(value=value, type=gguf.GGUFValueType.get_type(value))

    return convert(GOLDEN / "llama", path, edit=edit)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"block_count": 0}, "num_hidden_layers: expected a positive integer, got 0."),
        ({"block_count": 2**30}, "llama.block_count: expected at most"),
        ({"attention__head_count": 0}, "num_attention_heads: expected a positive integer, got 0."),
        ({"attention__head_count": -1}, "llama.attention.head_count: expected an integer of at least 0, got -1."),
        ({"attention__head_count_kv": [1, 2]}, "llama.attention.head_count_kv: expected one number for all layers, got [1, 2]."),
        ({"attention__head_count_kv": [1]}, "expected an integer, or 2 of them, got 1 elements."),
        ({"attention__key_length": 10**9}, "of shape (2000000000, 32) by model.gguf, got (32, 32)."),
        ({"rope__freq_base": float("nan")}, "llama.rope.freq_base: expected a finite number, got nan."),
        ({"rope__dimension_count": 8}, "partial_rotary_factor: expected 1"),
        ({"rope__scaling__type": "new"}, "llama.rope.scaling.type: expected none, linear, yarn, or longrope"),
        ({"embedding_length": 64}, "got (61, 32)."),
    ],
)
def test_sizes_that_contradict(tmp_path: Path, fields: dict[str, Any], complaint: str) -> None:
    path = changed(tmp_path / "model.gguf", **fields)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert complaint in str(caught.value)
