"""Sets of K experts out of E as numbers below C(E, K), and their orders as numbers below K!. Pure, vectorised over rows.

A set a_1 < .. < a_K has the colexicographic rank sum_k C(a_k, k). Taken apart from the top: a_K is the largest a with C(a, K) <= rank,
and the rest has rank minus C(a_K, K). Instead of a search, the leading bits of the rank as a float look up a first guess, which is
right or one too small. Ranks from 2^62 on are two words; after the first few elements what is left fits one.

An order is numbered by its Lehmer code: digit j counts the later experts with a smaller id.

Shapes: R rows (one a token and layer), K experts a row.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[Any]
"""Expert ids, uint8 for up to 256 experts, uint16 beyond."""
Words = NDArray[np.uint64]
"""[R, words] little-endian words of one number a row."""

NARROW = 2**62
"""Numbers up to it are computed with in one signed word."""
WIDEST = 2**128
"""Numbers below it are computed with in two words."""


@dataclass(frozen=True)
class _Element:
    """What it takes to find a_k: the binomials C(a, k) for a = 0 .. E, and guesses of a from the leading bits of rank + 1."""

    low: Words
    """[E + 1] low word of C(a, k)."""
    high: Words | None
    """[E + 1] high word; None where no C(a, k) needs one."""
    bits: int
    """Mantissa bits that a guess looks at."""
    guess: NDArray[np.intp]
    """[exponents << bits] the largest a, or the one before it, with C(a, k) <= rank."""


def set_count(experts: int, k: int) -> int:
    """C(E, K)."""
    return math.comb(experts, k)


def widest_count(experts: int, k: int) -> int:
    """The largest C(E, n) for n <= K: what the arithmetic on ranks must hold. At most `WIDEST` can be ranked."""
    return math.comb(experts, min(k, experts // 2))


def word_count(experts: int, k: int) -> int:
    """Words of a rank."""
    return 1 if widest_count(experts, k) <= NARROW else 2


@functools.lru_cache(maxsize=8)
def _elements(experts: int, k: int) -> tuple[_Element, ...]:
    """For a_1 .. a_K."""
    return tuple(_element(experts, n) for n in range(1, k + 1))


def _element(experts: int, k: int) -> _Element:
    binomials = [math.comb(a, k) for a in range(experts + 1)]
    # Neighbours differ by a factor of E / (E - k) or more; a bin half as wide holds one of them at most.
    bits = max(1, math.ceil(math.log2(2 * max(1, experts - k) / k)))
    lows = np.outer(2.0 ** np.arange((binomials[-1] + 1).bit_length() + 1), 1 + np.arange(1 << bits) / (1 << bits)).ravel()
    # Rounding to a float may have lifted the rank into its bin, hence the margin. C(k - 1, k) = 0 is below every rank.
    found = np.searchsorted(np.array(binomials, np.float64) + 1, lows * (1 - 2.0**-50), side="right") - 1
    guess = found.clip(k - 1, experts - 1)
    high = None if binomials[-1] <= NARROW else np.array([b >> 64 for b in binomials], np.uint64)
    return _Element(np.array([b % 2**64 for b in binomials], np.uint64), high, bits, guess)


def digits(columns: list[Ids]) -> tuple[Ids, Ids]:
    """([K, R] how many experts of the row have a smaller id, [K, R] how many of those come later in the row).

    Args:
        columns: K arrays [R]; the ids of a row are distinct.
    """
    later, below = np.zeros((2, len(columns), len(columns[0])), columns[0].dtype)
    for j, second in enumerate(columns):
        for i, first in enumerate(columns[:j]):
            rises = first < second
            below[j] += rises
            later[i] += ~rises
    below += later
    return below, later


def has_repeats(columns: list[Ids]) -> NDArray[np.bool_]:
    """[R] whether a row names an expert twice."""
    same = np.zeros(len(columns[0]), np.bool_)
    for j, second in enumerate(columns):
        for first in columns[:j]:
            same |= first == second
    return same


def rank_sets(columns: list[Ids], below: Ids, experts: int) -> Words:
    """[R, words] rank of each row's set.

    Args:
        columns: K arrays [R] of distinct ids below `experts`.
        below: [K, R] as `digits` gives it.
    """
    k = len(columns)
    elements = _elements(experts, k)
    low_table = np.stack([e.low for e in elements]).ravel()
    places = [place.astype(np.intp) * (experts + 1) + ids for place, ids in zip(below, columns, strict=True)]
    words = np.zeros((len(columns[0]), word_count(experts, k)), np.uint64)
    low = words[:, 0]
    if words.shape[1] == 1:
        for place in places:
            low += low_table.take(place)
        return words
    no_high = np.zeros(experts + 1, np.uint64)
    high_table = np.stack([no_high if e.high is None else e.high for e in elements]).ravel()
    for place in places:
        term = low_table.take(place)
        low += term
        words[:, 1] += high_table.take(place) + (low < term)
    return words


def unrank_sets(words: Words, experts: int, k: int) -> list[NDArray[np.intp]]:
    """K arrays [R], the experts of each rank's set, ascending; the inverse of `rank_sets` for ranks below C(E, K)."""
    elements = _elements(experts, k)
    found: list[NDArray[np.intp]] = []
    remaining = [np.ascontiguousarray(words[:, n]) for n in range(words.shape[1])]
    for element in elements[:0:-1]:
        found.append(_take_wide(remaining, element) if element.high is not None else _take_narrow(remaining[0], element))
    found.append(remaining[0].astype(np.intp))
    return found[::-1]


def _look_up(plus_one: NDArray[Any], element: _Element) -> NDArray[np.intp]:
    """Args: plus_one: float64 [R] rank + 1."""
    index = plus_one.view(np.int64)
    index >>= 52 - element.bits
    index -= 1023 << element.bits  # the exponent's bias
    return element.guess.take(index)


def _take_narrow(remaining: Words, element: _Element) -> NDArray[np.intp]:
    """The largest element of each set, whose term is taken off `remaining`."""
    rank, table = remaining.view(np.int64), element.low.view(np.int64)
    found = _look_up(rank + 1.0, element)
    found += rank >= table[1:].take(found)
    rank -= table.take(found)
    return found


def _take_wide(remaining: list[Words], element: _Element) -> NDArray[np.intp]:
    low, high = remaining
    assert element.high is not None
    found = _look_up(high * 2.0**64 + low + 1.0, element)
    next_low, next_high = element.low[1:].take(found), element.high[1:].take(found)
    found += (high > next_high) | ((high == next_high) & (low >= next_low))
    term = element.low.take(found)
    high -= element.high.take(found) + (low < term)
    low -= term
    return found


def rank_orders(later: Ids) -> Words:
    """[R, 1] number of each row's order, from the Lehmer digits [K, R] that `digits` gives."""
    number = np.zeros((later.shape[1], 1), np.uint64)
    for place, digit in enumerate(later):
        number[:, 0] += digit * np.uint64(math.factorial(len(later) - 1 - place))
    return number


def apply_orders(ascending: list[NDArray[np.intp]], numbers: Words) -> list[NDArray[np.intp]]:
    """K arrays [R]: the sorted experts put into the order that `rank_orders` numbered."""
    k, rows = len(ascending), len(numbers)
    rest = numbers[:, 0].copy()
    places: list[NDArray[np.uint8]] = []
    for place in range(k):
        weight = np.uint64(math.factorial(k - 1 - place))
        digit = rest // weight
        rest -= digit * weight
        places.append(digit.astype(np.uint8))
    for j in range(k - 2, -1, -1):
        for later in places[j + 1 :]:
            later += later >= places[j]
    flat, row = np.concatenate(ascending), np.arange(rows)
    return [flat.take(place.astype(np.intp) * rows + row) for place in places]
