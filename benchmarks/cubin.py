"""Resources of the kernels in a cubin, from its ELF sections."""

import struct
from typing import NamedTuple

_SECTION, _SYMBOL_NBYTES = struct.Struct("<IIQQQQIIQQ"), 24

#: Attributes of ``.nv.info``: bytes of local memory that spilled registers and arrays take, registers of a thread, threads of a block.
_FRAME_SIZE, _REGISTERS, _MAX_THREADS = 0x11, 0x2F, 0x05
_HAS_VALUE = 4

#: From sm_90 on a section of shared memory includes what the system reserves for each block.
_RESERVED_NBYTES, _FIRST_WITH_RESERVED = 1024, 90


class KernelResources(NamedTuple):
    """Resources of a kernel."""

    registers: int
    #: Bytes of local memory of a thread; 0 without spills.
    local_nbytes: int
    #: Bytes of static shared memory of a block.
    static_nbytes: int
    #: Bytes of machine code.
    code_nbytes: int
    #: Threads of a block, from ``__launch_bounds__``; 0 without.
    threads: int


def kernel_resources(cubin: bytes, arch: str) -> dict[str, KernelResources]:
    """Return the resources of all kernels of a cubin, by name."""
    sections = _sections(cubin)
    found = {name.removeprefix(".text."): {"code_nbytes": len(data)} for name, data in sections.items() if name.startswith(".text.")}
    symbols = _symbol_names(sections)
    for attribute, value in _attributes(sections[".nv.info"]):
        symbol, *values = struct.unpack(f"<{len(value) // 4}I", value)
        key = {_FRAME_SIZE: "local_nbytes", _REGISTERS: "registers"}.get(attribute)
        if key and symbols[symbol] in found:
            found[symbols[symbol]][key] = values[0]
    reserved = _RESERVED_NBYTES if int(arch.removeprefix("sm_")) >= _FIRST_WITH_RESERVED else 0
    resources = {}
    for name, values in found.items():
        bounds = [value for attribute, value in _attributes(sections[f".nv.info.{name}"]) if attribute == _MAX_THREADS]
        static = max(len(sections.get(f".nv.shared.{name}", b"")) - reserved, 0)
        resources[name] = KernelResources(**values, static_nbytes=static, threads=struct.unpack("<3I", bounds[0])[0] if bounds else 0)
    return resources


def _sections(elf: bytes) -> dict[str, bytes]:
    """Return the contents of all sections by name; of one without contents, zeros."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    count, names = struct.unpack_from("<HH", elf, 60)
    headers = [_SECTION.unpack_from(elf, start + number * _SECTION.size) for number in range(count)]
    strings = elf[headers[names][4] :]
    no_bits = 8
    return {
        _text(strings, name): bytes(size) if kind == no_bits else elf[offset : offset + size]
        for name, kind, _, _, offset, size, *_ in headers
    }


def _symbol_names(sections: dict[str, bytes]) -> list[str]:
    table = sections[".symtab"]
    return [_text(sections[".strtab"], struct.unpack_from("<I", table, at)[0]) for at in range(0, len(table), _SYMBOL_NBYTES)]


def _attributes(info: bytes) -> list[tuple[int, bytes]]:
    """Return the attributes of a section ``.nv.info`` that have a value."""
    found, at = [], 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == _HAS_VALUE:
            found.append((attribute, info[at : at + size]))
            at += size
    return found


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()
