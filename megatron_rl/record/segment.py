"""One segment of a record: rows, their routes, and the index that says which of them are whole.

    NAME.arrow    an Arrow IPC stream, one message a row: any Arrow reader takes it as it is
    NAME.routes   the routes' payloads (`routing.payloads`), end to end
    NAME.index    a header, then 16 bytes a row: step i32, message bytes u32, payload bytes u32, crc32 of message and payload u32

All little-endian. Rows are appended to the first two, then to the index. A row is whole where its entry is and both files reach as far
as the entries up to it say; so a segment that is cut anywhere, in any of its files, opens to the last whole row. Checksums are compared
when a row is read, and of the last row when the segment is opened: what a crash of the machine left unwritten shows there.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_rl.record.schema import VERSION
from megatron_rl.routing.codec import FORMS
from megatron_rl.routing.payloads import RouteKind

logger = logging.getLogger(__name__)

MAGIC = b"mrlI"
_HEADER = struct.Struct("<4sHBBIIIIII")
"""magic, version, form (255 without routes), 0, experts, layers, K, bytes of the Arrow schema, their crc32, crc32 of what stands before."""
_ENTRY = np.dtype([("step", "<i4"), ("message", "<u4"), ("payload", "<u4"), ("crc", "<u4")])
_NO_ROUTES = 255
ROUTE_INDEX_BYTES = 4
"""Of an entry, what routes add."""
SUFFIXES = (".index", ".arrow", ".routes")
"""In the order in which files are removed: without its index a segment is none."""


@dataclass(frozen=True)
class Row:
    """One row on its way to the files."""

    step: int
    message: memoryview
    payload: bytes = b""

    @property
    def bytes(self) -> int:
        """On disk, index included."""
        return len(self.message) + len(self.payload) + _ENTRY.itemsize


class SegmentWriter:
    """A new segment, open at its end.

    Args:
        path: of its files, without suffix; what was left of files without an index there is replaced.
        kind: of its routes; None where rows have none.
    """

    def __init__(self, path: Path, schema: pa.Schema, kind: RouteKind | None) -> None:
        head = schema.serialize().to_pybytes()
        self.path, self.rows, self.last_step = path, 0, -1
        form, numbers = (_NO_ROUTES, (0, 0, 0)) if kind is None else (FORMS.index(kind.form), (kind.experts, kind.layers, kind.k))
        start = _HEADER.pack(MAGIC, VERSION, form, 0, *numbers, len(head), zlib.crc32(head), 0)[:-4]
        first = (start + struct.pack("<I", zlib.crc32(start)), head, b"")
        self._files = {}
        for suffix, data in reversed(list(zip(SUFFIXES, first, strict=True))):
            # Unbuffered: what was written survives a crash of the process.
            self._files[suffix] = path.with_suffix(suffix).open("wb", buffering=0)
            _write(self._files[suffix], data)
        self.bytes = sum(map(len, first))

    def append(self, rows: Sequence[Row]) -> None:
        """Writes rows in one go."""
        entries = [(r.step, len(r.message), len(r.payload), zlib.crc32(r.payload, zlib.crc32(r.message))) for r in rows]
        _write(self._files[".arrow"], b"".join(row.message for row in rows))
        _write(self._files[".routes"], b"".join(row.payload for row in rows))
        _write(self._files[".index"], np.array(entries, _ENTRY).tobytes())
        self.bytes += sum(row.bytes for row in rows)
        self.rows += len(rows)
        self.last_step = max(self.last_step, *(row.step for row in rows))

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


def _write(file: object, data: bytes) -> None:
    """All of it: an unbuffered file may take less at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]  # type: ignore[attr-defined]


def remove(path: Path) -> None:
    """The files of a segment."""
    for suffix in SUFFIXES:
        path.with_suffix(suffix).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Spans:
    """Where each row's bytes stand in a file."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @staticmethod
    def of(sizes: NDArray[np.uint32], first: int) -> _Spans:
        ends = first + np.cumsum(sizes, dtype=np.int64)
        return _Spans(ends - sizes, ends)

    def of_row(self, data: memoryview, index: int) -> memoryview:
        return data[int(self.starts[index]) : int(self.ends[index])]


class Segment:
    """A segment to read: as far as it is whole at the time of opening.

    Raises:
        ValueError: a file is missing, is not what its name says, is of another version, or is damaged elsewhere than at its end.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self._schema = path, schema
        self._index, self._arrow, self._routes = (_map(path.with_suffix(suffix)) for suffix in SUFFIXES)
        self.kind, schema_bytes = self._read_header()
        entries = np.empty(0, _ENTRY)
        if schema_bytes is not None:
            size = (len(self._index) - _HEADER.size) // _ENTRY.itemsize
            entries = np.frombuffer(self._index, _ENTRY, size, _HEADER.size)
        self._messages = _Spans.of(entries["message"], schema_bytes or 0)
        self._payloads = _Spans.of(entries["payload"], 0)
        reached = (self._messages.ends <= len(self._arrow)) & (self._payloads.ends <= len(self._routes)) & (entries["message"] > 0)
        whole = len(entries) if reached.all() else int(reached.argmin())
        while whole and self._broken(entries, whole - 1):
            whole -= 1
        if whole < reached.sum():
            logger.warning("%s: the last %d rows are damaged and left out", path, reached.sum() - whole)
        self._entries = entries[:whole]

    @property
    def steps(self) -> NDArray[np.int32]:
        """[rows] the step of each whole row."""
        return self._entries["step"]

    @property
    def bytes(self) -> int:
        """On disk."""
        return len(self._index) + len(self._arrow) + len(self._routes)

    def __len__(self) -> int:
        return len(self._entries)

    def row(self, index: int) -> tuple[pa.RecordBatch, memoryview]:
        """A batch of one row, and the payload of its routes.

        Raises:
            ValueError: its bytes are not those that were written.
        """
        if self._broken(self._entries, index):
            raise ValueError(f"{self.path}: row {index} is damaged: the checksum of its message and routes does not fit")
        data = self._messages.of_row(self._arrow, index)
        return pa.ipc.read_record_batch(pa.py_buffer(data), self._schema), self._payloads.of_row(self._routes, index)

    def cut(self, rows: int) -> None:
        """Takes everything behind the first `rows` rows off the files. The object is of no use afterwards."""
        if not rows:
            remove(self.path)
            return
        sizes = (_HEADER.size + rows * _ENTRY.itemsize, self._messages.ends[rows - 1], self._payloads.ends[rows - 1])
        for suffix, size in zip(SUFFIXES, sizes, strict=True):
            os.truncate(self.path.with_suffix(suffix), int(size))

    def _broken(self, entries: NDArray[np.void], index: int) -> bool:
        message, payload = self._messages.of_row(self._arrow, index), self._payloads.of_row(self._routes, index)
        return bool(zlib.crc32(payload, zlib.crc32(message)) != entries["crc"][index])

    def _read_header(self) -> tuple[RouteKind | None, int | None]:
        """What routes there are, and the bytes of the schema; None where header or schema were cut."""
        file = self.path.with_suffix(".index")
        head = bytes(self._index[: _HEADER.size])
        if head[: len(MAGIC)] != MAGIC[: len(head)]:
            raise ValueError(f"{file}: is no index of a record: it begins with {head[:4]!r}")
        if len(head) < _HEADER.size:
            return None, None
        _, version, form, _, experts, layers, k, size, schema_crc, crc = _HEADER.unpack(head)
        if version != VERSION:
            raise ValueError(
                f"{file}: a record of version {version}, and this program reads version {VERSION}; read it with the one it was made by"
            )
        if zlib.crc32(head[:-4]) != crc or (form != _NO_ROUTES and form >= len(FORMS)):
            raise ValueError(f"{file}: its header is damaged: its checksum does not fit")
        kind = None if form == _NO_ROUTES else RouteKind(experts, layers, k, FORMS[form])
        if len(self._arrow) < size:
            return kind, None
        found = self._arrow[:size]
        if zlib.crc32(found) != schema_crc or not pa.ipc.read_schema(pa.py_buffer(found)).equals(self._schema, check_metadata=True):
            raise ValueError(f"{self.path.with_suffix('.arrow')}: does not begin with the columns of version {VERSION}; another file?")
        return kind, size


def _map(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b"")
    except FileNotFoundError:
        raise ValueError(f"{path}: is missing; a segment is three files, put it back or remove the other two") from None
