"""Encoded routes: what comes back is what went in, near the information limit, and bytes that were touched are refused."""

from __future__ import annotations

import itertools
import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_rl.routing.codec import CHUNK, FORMS, Form, Header, decode, encode, limit_bytes, read_header
from megatron_rl.routing.combinations import digits, rank_orders, rank_sets, set_count, unrank_sets, word_count

MODELS = {
    "Mixtral": (8, 2),
    "gpt-oss": (128, 4),
    "Qwen3": (128, 8),
    "GLM-4.5": (160, 8),
    "DeepSeek-V3": (256, 8),
    "Kimi-K2": (384, 8),
    "Qwen3-Next": (512, 10),
}


def distinct(rows: int, layers: int, k: int, experts: int, seed: int = 0) -> NDArray[np.int64]:
    """[rows, layers, k] distinct experts in no order."""
    return np.random.default_rng(seed).random((rows, layers, experts)).argsort(-1)[..., :k]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    experts = draw(st.integers(1, 600))
    return draw(st.integers(0, 20)), draw(st.integers(1, 3)), draw(st.integers(1, min(12, experts))), experts


@given(shape=shapes(), form=st.sampled_from(FORMS), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_what_comes_back_is_what_went_in(shape: tuple[int, int, int, int], form: Form, seed: int) -> None:
    rows, layers, k, experts = shape
    routes = distinct(rows, layers, k, experts, seed)
    data = encode(routes, experts, form)
    found = decode(data)
    np.testing.assert_array_equal(found, np.sort(routes, -1) if form == "set" else routes)
    assert found.dtype == (np.uint8 if experts <= 256 else np.uint16)
    assert read_header(data) == Header(form, (rows, layers, k), experts)


@pytest.mark.parametrize("form", ["set", "ordered"])
def test_more_rows_than_are_worked_on_at_a_time(form: Form) -> None:
    """2 x CHUNK + 3 rows: the packed bits of the last chunk end inside a byte."""
    routes = distinct(2 * CHUNK + 3, 1, 3, 11)
    np.testing.assert_array_equal(decode(encode(routes, 11, form)), np.sort(routes, -1) if form == "set" else routes)


@pytest.mark.parametrize(("experts", "k"), MODELS.values(), ids=MODELS)
def test_sizes_are_near_the_limit(experts: int, k: int) -> None:
    """Whole bits a row: at most one bit above log2 C(E, K), 4 % of the smallest (8 choose 2: 5 bits for 4.8). 10 % is what is asked."""
    data = encode(distinct(100, 48, k, experts), experts, "set")
    bits = math.ceil(math.log2(math.comb(experts, k)))
    payload = 4800 * bits // 8
    assert len(data) == 40 + payload
    assert payload <= 1.1 * limit_bytes(read_header(data))


def test_ranks_are_colexicographic() -> None:
    """All 56 sets of 3 out of 8, against itertools."""
    sets = sorted(itertools.combinations(range(8), 3), key=lambda s: s[::-1])
    columns = list(np.array(sets, np.uint8).T.copy())
    below, _ = digits(columns)
    assert rank_sets(columns, below, 8)[:, 0].tolist() == list(range(56))


@pytest.mark.parametrize(("experts", "k"), [*MODELS.values(), (512, 22), (300, 2), (257, 3), (20, 20), (30, 25), (65, 1)])
def test_guesses_are_right_at_every_boundary(experts: int, k: int) -> None:
    """Around each C(a, n), where the n-th element steps to a: the ranks there, told apart by one, go to sets and back.

    512 choose 22 is 2^127.4: two words, with borrows between them.
    """
    count = set_count(experts, k)
    steps = {math.comb(a, n) + d for n in range(1, k + 1) for a in range(n, experts + 1) for d in (-1, 0, 1)}
    ranks = sorted(r for r in {0, count - 1, 2**53, 2**53 + 1, 2**62, 2**64 - 1, 2**64, *steps} if 0 <= r < count)
    words = np.array([[r >> (64 * w) & (2**64 - 1) for w in range(word_count(experts, k))] for r in ranks], np.uint64)
    columns = unrank_sets(words.copy(), experts, k)
    whole = sum(np.array([math.comb(int(a), n) for a in column], object) for n, column in enumerate(columns, 1))
    assert list(whole) == ranks
    assert all((a < b).all() for a, b in itertools.pairwise(columns)) and int(columns[-1].max()) < experts
    ids = [column.astype(np.uint16) for column in columns]
    np.testing.assert_array_equal(rank_sets(ids, digits(ids)[0], experts), words)


def test_orders_are_numbered_without_gaps() -> None:
    """The 24 orders of 4 experts get 24 different numbers below 24."""
    columns = list(np.array(list(itertools.permutations([3, 5, 6, 9])), np.uint8).T.copy())
    assert sorted(rank_orders(digits(columns)[1])[:, 0].tolist()) == list(range(24))


@pytest.mark.parametrize("form", FORMS)
def test_every_flipped_bit_is_noticed(form: Form) -> None:
    """Of header, checksum and payload alike."""
    data = encode(distinct(3, 2, 4, 60), 60, form)
    for bit in range(8 * len(data)):
        touched = bytearray(data)
        touched[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="encoded routes"):
            decode(bytes(touched))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_cut_off_or_too_long_is_refused(form: Form) -> None:
    data = encode(distinct(3, 2, 4, 60), 60, form)
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"no encoded routes|cut off\?"):
            decode(data[:length])
    with pytest.raises(ValueError, match="where the header promises"):
        decode(data + b"\0")


@given(data=st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no encoded routes"):
        decode(data)


def resealed(data: bytes) -> bytes:
    """With the checksum that belongs to it, as a faulty writer would make it."""
    return data[:36] + struct.pack("<I", zlib.crc32(data[40:], zlib.crc32(data[:36]))) + data[40:]


def test_a_newer_version_says_so() -> None:
    data = bytearray(encode(distinct(1, 1, 2, 8), 8))
    data[4] = 2
    with pytest.raises(ValueError, match="of version 2; this reads version 1"):
        decode(resealed(bytes(data)))


def test_impossible_numbers_of_a_faulty_writer() -> None:
    """C(8, 2) = 28: the 5 bits can say 28 to 31, which are no set. 3! = 6: 3 bits can say 6."""
    sets = encode(distinct(8, 1, 2, 8), 8, "set")
    with pytest.raises(ValueError, match="a rank beyond the 28 sets of 2 out of 8"):
        decode(resealed(sets[:40] + b"\xff" * 5))
    ordered = encode(distinct(8, 1, 3, 8), 8, "ordered")
    with pytest.raises(ValueError, match="an order beyond the 3!"):
        decode(resealed(ordered[:-3] + b"\xff" * 3))
    wide = encode(distinct(8, 1, 10, 512), 512, "set")
    with pytest.raises(ValueError, match="a rank beyond"):
        decode(resealed(wide[:40] + b"\xff" * (len(wide) - 40)))
    raw = encode(distinct(8, 1, 3, 8), 8, "raw")
    with pytest.raises(ValueError, match=r"expert 8 .* of 8: a faulty writer"):
        decode(resealed(raw[:-1] + b"\x08"))


@pytest.mark.parametrize("form", FORMS)
def test_malformed_routes_are_not_encoded(form: Form) -> None:
    routes = distinct(4, 3, 2, 8)
    with pytest.raises(ValueError, match="expert ids run from 0 to 7, but there are experts 0 to 6"):
        encode(np.sort(routes, -1), 7, form)
    with pytest.raises(ValueError, match="expert ids run from -1 to"):
        encode(routes - 1, 8, form)
    routes[2, 1] = 5
    with pytest.raises(ValueError, match=r"token 2, layer 1: \[5, 5\] names one expert twice"):
        encode(routes, 8, form)
    with pytest.raises(ValueError, match=r"not of shape \(4, 2\)"):
        encode(routes[:, 0], 8, form)


def test_forms_that_cannot_hold_the_rows_name_one_that_can() -> None:
    """C(1024, 20) is 2^138; 21! is beyond 2^62, while 21 of 30 experts are few sets."""
    many = np.arange(20)[None, None]
    with pytest.raises(ValueError, match="beyond 128 bits; use the raw form"):
        encode(many, 1024, "set")
    np.testing.assert_array_equal(decode(encode(many, 1024, "raw")), many)
    longest = np.arange(21)[None, None]
    with pytest.raises(ValueError, match=r"order of 21 experts does not fit .* use the raw form"):
        encode(longest, 30, "ordered")
    np.testing.assert_array_equal(decode(encode(longest, 30, "set")), longest)
    with pytest.raises(ValueError, match="3 distinct experts out of 2"):
        encode(np.arange(3)[None, None], 2, "raw")
