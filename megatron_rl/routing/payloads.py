"""Routes of many trajectories at once, as payloads without headers: what they share is said once, and encoding costs little for short ones.

A trajectory's payload is, to the last bit, what `codec.encode` writes of it behind the header.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .codec import HEADER_BYTES, Form, Header, decode, encode, field_bytes, sealed
from .combinations import Ids


@dataclass(frozen=True)
class RouteKind:
    """What all routes of a run have in common."""

    experts: int
    layers: int
    """L."""
    k: int
    form: Form

    @staticmethod
    def smallest(experts: int, layers: int, k: int) -> RouteKind:
        """In the form `set`, or in `raw` where sets of that many experts have no numbers (`Header.problem`)."""
        usable = Header("set", (0, layers, k), experts).problem() is None
        return RouteKind(experts, layers, k, "set" if usable else "raw")

    def header(self, tokens: int) -> Header:
        """Of the routes of so many tokens."""
        return Header(self.form, (tokens, self.layers, self.k), self.experts)


def encode_each(routes: Sequence[NDArray[np.integer]], kind: RouteKind) -> list[bytes]:
    """The payload of each [N, L, K].

    Raises:
        ValueError: as `codec.encode`, or routes of other layers or experts a token than `kind`.
    """
    for one in routes:
        if one.ndim != 3 or one.shape[1:] != (kind.layers, kind.k):
            raise ValueError(f"routes of shape {one.shape} where the run has {kind.layers} layers x {kind.k} experts a token")
    if kind.form == "raw":
        return [encode(one, kind.experts, kind.form)[HEADER_BYTES:] for one in routes]
    # Padded to whole bytes of packed bits, the numbers of each trajectory can be cut out of those of all.
    unit = 8 // math.gcd(8, kind.layers)
    filler = np.broadcast_to(np.arange(kind.k), (unit, kind.layers, kind.k))
    padded = [part for one in routes for part in (one, filler[: -len(one) % unit])]
    if not padded:
        return []
    whole = np.concatenate(padded)
    data = memoryview(encode(whole, kind.experts, kind.form))[HEADER_BYTES:]
    header = kind.header(len(whole))
    payloads, start = [], 0
    for one in routes:
        rows = len(one) * kind.layers
        payloads.append(_cut(data, header, start, rows))
        start += rows + (-len(one) % unit) * kind.layers
    return payloads


def _cut(data: memoryview, header: Header, start: int, rows: int) -> bytes:
    """The payload of `rows` rows from `start` on, which is a multiple of 8."""
    pieces, at = [], 0
    for bits in header.fields:
        whole, rest = divmod(bits, 8)
        pieces.append(bytes(data[at + start * whole : at + (start + rows) * whole]))
        begin = at + header.rows * whole + start * rest // 8
        packed = bytearray(data[begin : begin + -(-rows * rest // 8)])
        if rows * rest % 8:
            packed[-1] &= (1 << rows * rest % 8) - 1
        pieces.append(bytes(packed))
        at += field_bytes(bits, header.rows)
    return b"".join(pieces)


def decode_one(payload: bytes | memoryview, tokens: int, kind: RouteKind) -> Ids:
    """[tokens, L, K] the routes of one trajectory; ascending in the form `set`.

    Raises:
        ValueError: a payload of another length, or with numbers that stand for no routes.
    """
    return decode(sealed(kind.header(tokens), [payload]))
