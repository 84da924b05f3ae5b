"""A shared library without code, written byte by byte: it gives another library, which is loaded already, a second name.

An ELF file is loaded by its program headers and its dynamic section alone, so that is all it has: no sections, no symbols.
"""

import struct

#: ``e_machine`` of a shared library, by ``platform.machine()``. Both are little-endian with addresses of 64 bits.
MACHINES = {"x86_64": 62, "aarch64": 183}

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_DYNAMIC_ENTRY = struct.Struct("<QQ")
_SYMBOL_NBYTES = 24
_HASH_TABLE = struct.pack("<4I", 1, 1, 0, 0)  # one bucket, one symbol: the undefined one that every table begins with

_ET_DYN = 3
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_READ_WRITE = 6  # some releases of glibc write addresses into the dynamic section; the mapping is private
_LARGEST_PAGE = 0x10000
_DT_NULL, _DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 0, 1, 4, 5, 6, 10, 11, 14


def stub_library(name: str, *, needed: str, machine: str) -> bytes:
    """Return the file of a shared library ``name`` (its SONAME) that needs the library ``needed``; symbols are found there."""
    strings = b"\0" + name.encode() + b"\0" + needed.encode() + b"\0"
    program_headers, dynamic_entries = 3, 8
    dynamic = _HEADER.size + program_headers * _PROGRAM_HEADER.size
    dynamic_nbytes = dynamic_entries * _DYNAMIC_ENTRY.size
    symbols = dynamic + dynamic_nbytes
    hash_table = symbols + _SYMBOL_NBYTES
    string_table = hash_table + len(_HASH_TABLE)
    nbytes = string_table + len(strings)
    identity = b"\x7fELF\2\1\1"  # 64 bits, little-endian, version 1
    header = _HEADER.pack(
        identity, _ET_DYN, MACHINES[machine], 1, 0, _HEADER.size, 0, 0, _HEADER.size, _PROGRAM_HEADER.size, program_headers, 0, 0, 0
    )
    segments = (
        (_PT_LOAD, _READ_WRITE, 0, 0, 0, nbytes, nbytes, _LARGEST_PAGE),
        (_PT_DYNAMIC, _READ_WRITE, dynamic, dynamic, dynamic, dynamic_nbytes, dynamic_nbytes, 8),
        (_PT_GNU_STACK, _READ_WRITE, 0, 0, 0, 0, 0, 16),  # without it, glibc asks for a stack that can be executed
    )
    entries = (
        (_DT_SONAME, 1),
        (_DT_NEEDED, 1 + len(name.encode()) + 1),
        (_DT_HASH, hash_table),
        (_DT_STRTAB, string_table),
        (_DT_STRSZ, len(strings)),
        (_DT_SYMTAB, symbols),
        (_DT_SYMENT, _SYMBOL_NBYTES),
        (_DT_NULL, 0),
    )
    parts = [header, *(_PROGRAM_HEADER.pack(*one) for one in segments), *(_DYNAMIC_ENTRY.pack(*one) for one in entries)]
    return b"".join([*parts, bytes(_SYMBOL_NBYTES), _HASH_TABLE, strings])
