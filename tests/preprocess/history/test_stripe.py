"""Stripes hold 64-bit integers and float32 to the last bit, in the bytes that the reference makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import DataError
from gmeta.preprocess.history.shard_reader import MAX_EVENTS, StripeEncoder, as_floats, read_stripe
from support.reference import history as reference

LEAST, MOST = -(1 << 63), (1 << 63) - 1
ANY = st.integers(LEAST, MOST)
SMALL = st.integers(-3, 300)
RARE = st.integers(0, 19).flatmap(lambda draw: st.just(0) if draw else ANY)
OUTLIERS = st.integers(0, 9).flatmap(lambda draw: SMALL if draw else ANY)


@st.composite
def columns(draw, count):
    kind = draw(st.sampled_from([ANY, SMALL, RARE, OUTLIERS, st.sampled_from([7, -5, MOST, LEAST]), None]))
    if kind is not None:
        return draw(st.lists(kind, min_size=count, max_size=count))
    steps = draw(st.lists(st.integers(0, 5000) | st.just(86400), min_size=count, max_size=count))
    return np.cumsum(steps, dtype=np.int64).tolist()


@st.composite
def stripes(draw):
    events = draw(st.integers(0, 40) | st.integers(250, 260))
    return [draw(columns(events)) for _ in range(draw(st.integers(1, 4)))]


def encode(*columns):
    encoder = StripeEncoder()
    data, _ = encoder.encode([np.array(column, np.int64) for column in columns], [len(columns[0])])
    encoder.close()
    return data


@given(stripes())
def test_bytes_are_the_references_and_give_the_events(drawn):
    data = encode(*drawn)
    assert data == reference.make_stripe(drawn)
    assert reference.read_stripe(data) == drawn
    assert [column.tolist() for column in read_stripe(data)] == drawn


@pytest.mark.parametrize(
    ("values", "form"),
    [
        ([5] * 300, reference.CONSTANT),
        ([], reference.CONSTANT),
        ([i * i * 7919 % 1009 for i in range(300)], reference.FRAME),
        (list(range(10**9, 10**9 + 300 * 50, 50)), reference.STEPS),
        ([(i * i) % 7 * 10**12 for i in range(300)], reference.DICTIONARY),
        ([int(i % 3 == 0) * (10**9 + i * i) for i in range(300)], reference.SPARSE),
    ],
)
def test_each_form_is_the_smallest_of_something(values, form):
    data = encode(values)
    assert data[16 + 8] == form
    assert read_stripe(data)[0].tolist() == values


def test_one_outlier_does_not_widen_the_others():
    even = list(np.random.default_rng(0).integers(0, 256, 256))
    one_more = [*even[:-1], 1 << 40]
    assert len(encode(one_more)) <= len(encode(even)) + 8


@pytest.mark.parametrize("width", range(65))
def test_numbers_of_every_width_come_back(width):
    rng = np.random.default_rng(width)
    for count in (1, 2, 7, 8, 9, 63, 64, 65, 256):
        values = [int(rng.integers(0, 1 << 62)) * 4 % (1 << width) for _ in range(count - 1)]
        values.append((1 << width) - 1)
        signed = [value - (1 << 64) if value > MOST else value for value in values]
        data = encode(signed)
        assert read_stripe(data)[0].tolist() == signed
        assert data == reference.make_stripe([signed])


@given(st.lists(st.floats(width=32), max_size=40))
def test_floats_come_back_to_the_last_bit(drawn):
    values = np.array(drawn, np.float32)
    encoder = StripeEncoder()
    data, _ = encoder.encode([values], [len(values)])
    (found,) = read_stripe(data)
    assert as_floats(found).tobytes() == values.tobytes()


@given(stripes(), st.data())
def test_only_the_columns_that_are_asked_for_are_read(drawn, data):
    chosen = data.draw(st.lists(st.integers(0, len(drawn) - 1)))
    found = read_stripe(encode(*drawn) + b"more", chosen)
    assert [column.tolist() for column in found] == [drawn[each] for each in chosen]


def test_several_stripes_are_those_made_one_by_one():
    times, kinds = np.arange(1000) ** 2, np.arange(1000) % 3
    encoder = StripeEncoder()
    data, ends = encoder.encode([times, kinds], [256, 256, 700, 1000])
    parts = [slice(0, 256), slice(256, 256), slice(256, 700), slice(700, 1000)]
    assert data == b"".join(encode(times[part], kinds[part]) for part in parts)
    assert ends.tolist() == np.cumsum([len(encode(times[part], kinds[part])) for part in parts]).tolist()


def test_damage_is_told():
    data = encode([1, 2, 300], [0, 0, 7])
    with pytest.raises(DataError, match=r"^shard 3, byte 96: it isn't a stripe of events"):
        read_stripe(b"X" + data[1:], where="shard 3, byte 96")
    with pytest.raises(DataError, match="a newer gmeta wrote it"):
        read_stripe(data[:4] + b"\2" + data[5:])
    with pytest.raises(DataError, match="its directory doesn't match"):
        read_stripe(data[:8] + b"\4" + data[9:])
    for size in (10, 20, len(data) - 1):
        with pytest.raises(DataError, match="it ends early"):
            read_stripe(data[:size])
    with pytest.raises(DataError, match="column 1 doesn't match its checksum"):
        read_stripe(data[:-1] + bytes([data[-1] ^ 1]))
    assert read_stripe(data[:-1] + bytes([data[-1] ^ 1]), [0])[0].tolist() == [1, 2, 300]
    with pytest.raises(DataError, match="it has 2 columns, and column 2 is requested"):
        read_stripe(data, [2])


@pytest.mark.parametrize(
    ("columns", "ends", "what"),
    [
        ([np.zeros(3, np.int64), np.zeros(2, np.int64)], [3], "columns have shapes"),
        ([np.zeros(3, np.int64)], [2], "must rise to the 3 events"),
        ([np.zeros(3, np.int64)], [2, 1, 3], "must rise"),
        ([np.zeros(MAX_EVENTS + 1, np.int64)], [MAX_EVENTS + 1], "by 0 to 65536 each"),
        ([np.zeros(3, np.int32)], [3], "of int64 or float32, got int32"),
    ],
)
def test_what_is_no_stripe_is_refused(columns, ends, what):
    with pytest.raises(DataError, match=what):
        StripeEncoder().encode(columns, ends)
