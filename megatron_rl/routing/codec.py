"""Routes as bytes, for wire and disk: versioned, self-describing, checked.

A header of 40 bytes, then the payload:

    magic "mrlR" | version u8 | form u8 | bytes an id u8 | 0 u8 | N u32 | L u32 | K u32 | experts u32
    | payload bytes u64 | 0 u32 | crc32 u32

All little-endian; the checksum is over everything else. Forms:

* `raw`: [N, L, K] ids as they are, one byte each for up to 256 experts, two beyond.
* `set`: which experts, without their order (decoded ascending), as one number below C(E, K) a token-layer (`combinations`), in
  ceil(log2 C(E, K)) bits. 128 experts, top-8: 41 bits where the limit is 40.4 and raw takes 64.
* `ordered`: `set`, then the order as a number below K!, in ceil(log2 K!) bits. For bitwise parity with an engine that sums experts in
  its order.

Numbers of b bits are stored as b // 8 whole bytes each, followed by the b % 8 highest bits of all numbers, packed.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .combinations import (
    WIDEST,
    Ids,
    Words,
    apply_orders,
    digits,
    has_repeats,
    rank_orders,
    rank_sets,
    set_count,
    unrank_sets,
    widest_count,
    word_count,
)

Form = Literal["raw", "set", "ordered"]
FORMS: tuple[Form, ...] = get_args(Form)
MAGIC, VERSION = b"mrlR", 1
_HEADER = struct.Struct("<4sBBBBIIIIQII")
HEADER_BYTES = _HEADER.size
_CHECKSUM_BYTES = 4
CHUNK = 8192
"""Rows worked on at a time, so that a handful of words a row stay in the cache of a core. A multiple of 8, so that chunks of packed
bits begin on a byte."""
MOST_ORDERED = 20
"""Experts a token whose order fits one word: 20! < 2^62."""


@dataclass(frozen=True)
class Header:
    """What the bytes hold."""

    form: Form
    shape: tuple[int, int, int]
    """(N tokens, L layers, K experts)."""
    experts: int

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
        """Of the ids: the smaller type that holds them."""
        return np.dtype(np.uint8) if self.experts <= 256 else np.dtype("<u2")

    @property
    def rows(self) -> int:
        """Token-layers."""
        return self.shape[0] * self.shape[1]

    @property
    def fields(self) -> tuple[int, ...]:
        """Bits of the numbers that a row consists of, in the order in which the payload has them; none for raw."""
        k = self.shape[2]
        numbers = {"raw": (), "set": (set_count(self.experts, k),), "ordered": (set_count(self.experts, k), math.factorial(k))}
        return tuple((count - 1).bit_length() for count in numbers[self.form])

    @property
    def payload_bytes(self) -> int:
        """What must follow the header."""
        if self.form == "raw":
            return self.rows * self.shape[2] * self.dtype.itemsize
        return sum(field_bytes(bits, self.rows) for bits in self.fields)

    def problem(self) -> str | None:
        """Why there can be no such routes, or not in this form."""
        k = self.shape[2]
        if not 0 < k <= self.experts <= 65536:
            return f"{k} distinct experts out of {self.experts} (65,536 at most)"
        if self.form != "raw" and widest_count(self.experts, k) >= WIDEST:
            return f"sets of {k} out of {self.experts} experts have ranks beyond 128 bits; use the raw form"
        if self.form == "ordered" and k > MOST_ORDERED:
            return f"the order of {k} experts does not fit one word ({MOST_ORDERED} do); use the raw form"
        return None


def limit_bytes(header: Header) -> float:
    """The fewest bytes that tell all sets of experts of this shape apart: log2 C(E, K) bits a token-layer."""
    return header.rows * math.log2(set_count(header.experts, header.shape[2])) / 8


def encode(routes_NLK: NDArray[np.integer], experts: int, form: Form = "set") -> bytes:
    """The bytes of `routes_NLK`.

    Raises:
        ValueError: an id is not within `experts`, a row names an expert twice, or the form cannot hold such rows.
    """
    if routes_NLK.ndim != 3:
        raise ValueError(f"routes are [tokens, layers, experts a token], not of shape {routes_NLK.shape}")
    n, layers, k = routes_NLK.shape
    header = Header(form, (n, layers, k), experts)
    problem = header.problem()
    if problem:
        raise ValueError(f"routes of shape {routes_NLK.shape}: {problem}")
    if routes_NLK.size and not 0 <= int(routes_NLK.min()) <= int(routes_NLK.max()) < experts:
        raise ValueError(f"expert ids run from {routes_NLK.min()} to {routes_NLK.max()}, but there are experts 0 to {experts - 1}")
    ids = np.ascontiguousarray(routes_NLK, dtype=header.dtype).reshape(header.rows, k)
    if form == "raw":
        for part in _chunks(header.rows):
            _columns(ids[part], part.start, layers)
        return sealed(header, [ids.data if ids.size else b""])
    stores = [_Store.empty(bits, header.rows) for bits in header.fields]
    for part in _chunks(header.rows):
        columns = _columns(ids[part], part.start, layers)
        below, later = digits(columns)
        stores[0].put(part, rank_sets(columns, below, experts))
        if form == "ordered":
            stores[1].put(part, rank_orders(later))
    return sealed(header, [piece for store in stores for piece in (store.whole.tobytes(), store.rest.tobytes())])


def read_header(data: bytes | memoryview) -> Header:
    """What `data` holds, checked against its length but not against its checksum.

    Raises:
        ValueError: these are not routes, not of this version, cut off, or too long.
    """
    if len(data) < _HEADER.size or bytes(data[:4]) != MAGIC:
        raise ValueError(f"no encoded routes: {len(data)} bytes that begin with {bytes(data[:4])!r}, not with {MAGIC!r} and a header")
    _, version, form, itemsize, pad, n, layers, k, experts, payload, pad_too, _ = _HEADER.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"encoded routes of version {version}; this reads version {VERSION}")
    if form >= len(FORMS) or pad or pad_too:
        raise ValueError(f"encoded routes: corrupt header (form {form}, reserved fields {pad} and {pad_too})")
    header = Header(FORMS[form], (n, layers, k), experts)
    problem = header.problem()
    if problem or itemsize != header.dtype.itemsize or payload != header.payload_bytes:
        raise ValueError(f"encoded routes: corrupt header ({problem or f'{payload} bytes of {itemsize}-byte ids for {header}'})")
    if len(data) != _HEADER.size + payload:
        raise ValueError(f"encoded routes: {len(data) - _HEADER.size} bytes of payload where the header promises {payload}; cut off?")
    return header


def decode(data: bytes | memoryview) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """[N, L, K] the routes; read-only in the raw form, where they share memory with `data`.

    Raises:
        ValueError: as `read_header`, or the checksum does not fit.
    """
    header = read_header(data)
    (found,) = struct.unpack_from("<I", data, _HEADER.size - _CHECKSUM_BYTES)
    payload = memoryview(data)[_HEADER.size :]
    expected = _checksum(bytes(data[: _HEADER.size - _CHECKSUM_BYTES]), [payload])
    if found != expected:
        raise ValueError(f"encoded routes: corrupt (checksum {found:08x} stated, {expected:08x} found)")
    if header.form == "raw":
        ids: Ids = np.frombuffer(payload, header.dtype)
        if ids.size and int(ids.max()) >= header.experts:
            raise ValueError(f"encoded routes: expert {ids.max()} in a model of {header.experts}: a faulty writer")
        return ids.reshape(header.shape)
    return _decode_rows(header, payload).reshape(header.shape)


def _decode_rows(header: Header, payload: memoryview) -> Ids:
    k, count = header.shape[2], set_count(header.experts, header.shape[2])
    stores, at = [], 0
    for bits in header.fields:
        size = field_bytes(bits, header.rows)
        stores.append(_Store.of(bits, header.rows, payload[at : at + size]))
        at += size
    out = np.empty((header.rows, k), header.dtype)
    for part in _chunks(header.rows):
        ranks = stores[0].get(part, word_count(header.experts, k))
        if not _all_below(ranks, count):
            raise ValueError(f"encoded routes: a rank beyond the {count} sets of {k} out of {header.experts} experts: a faulty writer")
        columns = unrank_sets(ranks, header.experts, k)
        if header.form == "ordered":
            orders = stores[1].get(part, 1)
            if not _all_below(orders, math.factorial(k)):
                raise ValueError(f"encoded routes: an order beyond the {k}! there are: a faulty writer")
            columns = apply_orders(columns, orders)
        for place, column in enumerate(columns):
            out[part, place] = column
    return out


def _all_below(words: Words, count: int) -> bool:
    last = count - 1
    if words.shape[1] == 1:
        return not words.size or int(words.max()) <= last
    high, low = words[:, 1], words[:, 0]
    top = np.uint64(last >> 64)
    return not bool(((high > top) | ((high == top) & (low > np.uint64(last % 2**64)))).any())


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, rows)) for start in range(0, rows, CHUNK))


def _columns(ids: Ids, first: int, layers: int) -> list[Ids]:
    """The K columns [R] of rows that stand `first` rows behind the beginning."""
    columns = [np.ascontiguousarray(ids[:, place]) for place in range(ids.shape[1])]
    repeats = has_repeats(columns)
    if repeats.any():
        row = int(repeats.argmax())
        token, layer = divmod(first + row, layers)
        raise ValueError(f"token {token}, layer {layer}: {ids[row].tolist()} names one expert twice")
    return columns


def sealed(header: Header, pieces: list[bytes | memoryview]) -> bytes:
    """The encoded routes whose payload is `pieces`, as `decode` takes them."""
    n, layers, k = header.shape
    form, itemsize = FORMS.index(header.form), header.dtype.itemsize
    head = _HEADER.pack(MAGIC, VERSION, form, itemsize, 0, n, layers, k, header.experts, header.payload_bytes, 0, 0)[:-_CHECKSUM_BYTES]
    return b"".join([head, struct.pack("<I", _checksum(head, pieces)), *pieces])


def _checksum(head: bytes, pieces: list[bytes | memoryview]) -> int:
    value = zlib.crc32(head)
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value


def field_bytes(bits: int, rows: int) -> int:
    """Of `rows` numbers of `bits` bits in a payload."""
    return rows * (bits // 8) + -(-rows * (bits % 8) // 8)


@dataclass(frozen=True)
class _Store:
    """Numbers of `bits` bits, as the payload has them."""

    bits: int
    whole: NDArray[np.uint8]
    """[rows, bits // 8]."""
    rest: NDArray[np.uint8]
    """The remaining high bits of all rows, packed, the first in the lowest bit."""

    @classmethod
    def empty(cls, bits: int, rows: int) -> _Store:
        """To be filled by `put`."""
        return cls(bits, np.empty((rows, bits // 8), np.uint8), np.empty(-(-rows * (bits % 8) // 8), np.uint8))

    @classmethod
    def of(cls, bits: int, rows: int, data: memoryview) -> _Store:
        """To be read by `get`."""
        raw = np.frombuffer(data, np.uint8)
        whole = rows * (bits // 8)
        return cls(bits, raw[:whole].reshape(rows, bits // 8), raw[whole:])

    def put(self, part: slice, words: Words) -> None:
        """Stores the numbers of the rows `part`."""
        whole, rest = divmod(self.bits, 8)
        raw = words.astype("<u8", copy=False).view(np.uint8)
        self.whole[part] = raw[:, :whole]
        if rest:
            flags = np.unpackbits(raw[:, whole : whole + 1], axis=1, count=rest, bitorder="little")
            packed = np.packbits(flags.ravel(), bitorder="little")
            self.rest[part.start * rest // 8 :][: len(packed)] = packed

    def get(self, part: slice, words: int) -> Words:
        """[R, words] the numbers of the rows `part`."""
        whole, rest = divmod(self.bits, 8)
        rows = part.stop - part.start
        raw = np.zeros((rows, 8 * words), np.uint8)
        raw[:, :whole] = self.whole[part]
        if rest:
            begin = part.start * rest // 8
            flags = np.unpackbits(self.rest[begin : begin + -(-rows * rest // 8)], count=rows * rest, bitorder="little").reshape(rows, rest)
            for bit in range(rest):
                raw[:, whole] |= flags[:, bit] << bit
        return raw.view("<u8").astype(np.uint64, copy=False)
