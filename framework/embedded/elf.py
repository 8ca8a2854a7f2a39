"""Makes the extension module of `mesos.scheduler` loadable without the libraries it was linked against.

The module contains all of Mesos, including its daemons, but needs seven libraries of Ubuntu 16.04 and CPython 2.7.
`make_loadable` edits a copy of the file:

* removes the seven libraries: their DT_NEEDED and version need entries;
* redirects every reference to them and to CPython to a function of the file that only returns 0;
* cuts off data after the last loaded segment (debugging symbols).

Unavailable afterwards are SSL, SASL authentication and the URI fetcher's downloads.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass

PATCH_VERSION = 1
"""Part of the cached file's name; incremented when the output of `make_loadable` changes."""

DROPPED_LIBRARIES = frozenset(
    {
        b"libssl.so.1.0.0",
        b"libcrypto.so.1.0.0",
        b"libcurl.so.4",
        b"libsasl2.so.2",
        b"libapr-1.so.0",
        b"libsvn_delta-1.so.1",
        b"libsvn_subr-1.so.1",
    }
)
REDIRECTED_PREFIXES = (b"Py", b"_Py_", b"apr_", b"svn_")
"""Prefixes of unversioned names of the removed libraries."""
RETURN_ZERO = b"\x31\xc0\xc3"
"""Machine code of `xor eax, eax; ret`."""

MACHINE_X86_64 = 62
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 0, 1, 2, 5, 6, 7, 8, 23
DT_VERSYM, DT_VERNEED, DT_VERNEEDNUM = 0x6FFFFFF0, 0x6FFFFFFE, 0x6FFFFFFF
GLOBAL_FUNCTION = 0x12
"""`st_info` of an exported function: STB_GLOBAL << 4 | STT_FUNC."""
VERSION_GLOBAL = 1
"""Version index of a symbol that needs no particular version."""

# Elf64 records, little-endian.
HEADER_PHOFF, HEADER_SHOFF, HEADER_PHENTSIZE, HEADER_SHENTSIZE = 32, 40, 54, 58
PROGRAM_HEADER = struct.Struct("<IIQQQQ")  # type, flags, offset, address, physical address, size in the file
DYNAMIC = struct.Struct("<QQ")  # tag, value
SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
RELOCATION = struct.Struct("<QQq")  # place, symbol << 32 | type, addend
VERSION_NEED = struct.Struct("<HHIII")  # version, number of auxiliaries, library, first auxiliary, next need
VERSION_AUXILIARY = struct.Struct("<IHHII")  # hash, flags, version index, name, next auxiliary


class ElfError(ValueError):
    """The file is not the expected shared library."""


@dataclass(frozen=True)
class _Segment:
    address: int
    offset: int
    size: int


class _SharedLibrary:
    """A shared library's bytes and the offsets of its tables."""

    def __init__(self, image: bytes) -> None:
        if image[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", image, 18)[0] != MACHINE_X86_64:
            raise ElfError("not a 64-bit x86 ELF file")
        self.data = bytearray(image)
        self.segments: list[_Segment] = []
        self.dynamic_offset = self.dynamic_size = 0
        (table,) = struct.unpack_from("<Q", image, HEADER_PHOFF)
        entry_size, count = struct.unpack_from("<HH", image, HEADER_PHENTSIZE)
        for position in range(table, table + entry_size * count, entry_size):
            kind, _, offset, address, _, size = PROGRAM_HEADER.unpack_from(image, position)
            if kind == PT_LOAD:
                self.segments.append(_Segment(address, offset, size))
            elif kind == PT_DYNAMIC:
                self.dynamic_offset, self.dynamic_size = offset, size
        self.dynamic: list[tuple[int, int]] = []
        for position in range(self.dynamic_offset, self.dynamic_offset + self.dynamic_size, DYNAMIC.size):
            tag, value = DYNAMIC.unpack_from(image, position)
            if tag == DT_NULL:
                break
            self.dynamic.append((tag, value))
        self.tags = dict(self.dynamic)
        missing = {DT_STRTAB, DT_SYMTAB, DT_RELA, DT_JMPREL, DT_VERSYM, DT_VERNEED, DT_VERNEEDNUM} - self.tags.keys()
        if missing:
            raise ElfError(f"no dynamic entries {sorted(missing)}")
        self.strings = self.offset_of(self.tags[DT_STRTAB])
        self.symbols = self.offset_of(self.tags[DT_SYMTAB])
        self.versions = self.offset_of(self.tags[DT_VERSYM])

    def offset_of(self, address: int) -> int:
        for segment in self.segments:
            if segment.address <= address < segment.address + segment.size:
                return address - segment.address + segment.offset
        raise ElfError(f"address {address:#x} is in no segment")

    def string(self, position: int) -> bytes:
        start = self.strings + position
        return bytes(self.data[start : self.data.index(0, start)])

    def symbol_indices(self) -> range:
        """Indices of the dynamic symbols; their table ends where the strings begin."""
        return range(1, (self.tags[DT_STRTAB] - self.tags[DT_SYMTAB]) // SYMBOL.size)

    def symbol(self, index: int) -> tuple[int, int, int, int, int, int]:
        return SYMBOL.unpack_from(self.data, self.symbols + SYMBOL.size * index)

    def version_needs(self) -> Iterator[tuple[int, bytes, list[int]]]:
        """Yields offset in the file, library and version indices of each entry of the linked list of version needs."""
        position = self.offset_of(self.tags[DT_VERNEED])
        for _ in range(self.tags[DT_VERNEEDNUM]):
            _, count, library, first, step = VERSION_NEED.unpack_from(self.data, position)
            indices, auxiliary = [], position + first
            for _ in range(count):
                _, _, index, _, auxiliary_step = VERSION_AUXILIARY.unpack_from(self.data, auxiliary)
                indices.append(index)
                auxiliary += auxiliary_step
            yield position, self.string(library), indices
            position += step


def make_loadable(image: bytes) -> bytes:
    """Edits `image`, the bytes of `_scheduler.so`.

    Raises:
        ElfError: `image` is another file.
    """
    try:
        library = _SharedLibrary(image)
        needs = list(library.version_needs())
        kept = [place for place, name, _ in needs if name not in DROPPED_LIBRARIES]
        dropped_versions = {index for _, name, indices in needs if name in DROPPED_LIBRARIES for index in indices}
        _relink_version_needs(library, kept)
        _redirect(library, dropped_versions)
        _rewrite_dynamic(library, kept)
    except (struct.error, IndexError) as error:
        raise ElfError(f"cut short or damaged: {error}") from error
    struct.pack_into("<Q", library.data, HEADER_SHOFF, 0)
    struct.pack_into("<HHH", library.data, HEADER_SHENTSIZE, 0, 0, 0)
    return bytes(library.data[: max(segment.offset + segment.size for segment in library.segments)])


def _relink_version_needs(library: _SharedLibrary, kept: list[int]) -> None:
    """Removes the dropped libraries from the linked list; `kept` are the offsets of the others."""
    step_field = VERSION_NEED.size - 4
    for place, following in itertools.pairwise(kept):
        struct.pack_into("<I", library.data, place + step_field, following - place)
    struct.pack_into("<I", library.data, kept[-1] + step_field, 0)


def _redirect(library: _SharedLibrary, dropped_versions: set[int]) -> None:
    """Redirects every unsatisfied reference to a function that returns 0."""
    unsatisfied: set[int] = set()
    replacement: int | None = None
    for index in library.symbol_indices():
        name, info, _, section, value, _ = library.symbol(index)
        if section == 0:
            version_place = library.versions + 2 * index
            (version,) = struct.unpack_from("<H", library.data, version_place)
            if version in dropped_versions or library.string(name).startswith(REDIRECTED_PREFIXES):
                unsatisfied.add(index)
                struct.pack_into("<H", library.data, version_place, VERSION_GLOBAL)
        elif replacement is None and info == GLOBAL_FUNCTION:
            code = library.offset_of(value)
            if library.data[code : code + len(RETURN_ZERO)] == RETURN_ZERO:
                replacement = index
    if replacement is None:
        raise ElfError("no exported function that returns 0")
    for table, size in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
        start = library.offset_of(library.tags[table])
        for position in range(start, start + library.tags[size], RELOCATION.size):
            place, info, addend = RELOCATION.unpack_from(library.data, position)
            if info >> 32 in unsatisfied:
                RELOCATION.pack_into(library.data, position, place, replacement << 32 | info & 0xFFFFFFFF, addend)


def _rewrite_dynamic(library: _SharedLibrary, kept: list[int]) -> None:
    first_need = library.tags[DT_VERNEED] + kept[0] - library.offset_of(library.tags[DT_VERNEED])
    changed = {DT_VERNEED: first_need, DT_VERNEEDNUM: len(kept)}
    entries = [
        (tag, changed.get(tag, value))
        for tag, value in library.dynamic
        if not (tag == DT_NEEDED and library.string(value) in DROPPED_LIBRARIES)
    ]
    for number in range(library.dynamic_size // DYNAMIC.size):
        entry = entries[number] if number < len(entries) else (DT_NULL, 0)
        DYNAMIC.pack_into(library.data, library.dynamic_offset + DYNAMIC.size * number, *entry)
