"""Histories that plain Python rebuilds from appended events, and small days of events for tests."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from support.reference.reader import crc32c


class Event(NamedTuple):
    """An event of a user; `price` is a float32."""

    user: int
    ts: int
    item: int
    price: float


class Born(NamedTuple):
    """An event, with the generation that first held it."""

    ts: int
    born: int
    item: int
    price: float


def write_day(path: Path, events: Sequence[Event]) -> Path:
    """Write events into a Parquet file."""
    columns = list(zip(*events, strict=True)) or [(), (), (), ()]
    types = [pa.int64(), pa.int64(), pa.int64(), pa.float32()]
    arrays = [pa.array(values, kind) for values, kind in zip(columns, types, strict=True)]
    pq.write_table(pa.table(arrays, names=list(Event._fields)), path)
    return path


def draw_day(seed: int, events: int, users: int = 30, day: int = 1) -> list[Event]:
    """Draw a day's events; a few of them happened on the previous day."""
    drawn = np.random.default_rng(seed)
    return [
        Event(
            int(drawn.integers(users)),
            int(drawn.integers(1000 * day - 300, 1000 * (day + 1))),
            int(drawn.zipf(1.5) % 1000),
            float(np.float32(drawn.random())),
        )
        for _ in range(events)
    ]


def history_of(
    days: Sequence[Sequence[Event]],
    user: int,
    *,
    start: int = -(2**63),
    until: int = 2**63 - 1,
    generation: int | None = None,
    longest: int = 2**63 - 1,
) -> list[Born]:
    """Return a user's history at a moment; ``days[g - 1]`` was appended as generation ``g``."""
    found = [
        Born(event.ts, born, event.item, event.price)
        for born, events in enumerate(days, 1)
        for event in events
        if event.user == user and start <= event.ts < until and (generation is None or born <= generation)
    ]
    # Prices are not negative, so their bits are in the order of their values.
    found.sort()
    return found[max(0, len(found) - longest) :]


def crc_of(columns: Sequence[Sequence[int] | Sequence[float]]) -> int:
    """Compute the checksum of one history, bit by bit; columns of floats are float32."""
    words = b"".join(
        struct.pack("<fI", value, 0) if isinstance(value, float) else struct.pack("<q", value)
        for column in columns
        for value in column
    )
    crc = 0xFFFFFFFF
    for byte in words:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class Shown(NamedTuple):
    """An exposure: the generation that the ranker read, and its additional (time, item)."""

    ts: int
    generation: int = 1
    tail: tuple[tuple[int, int], ...] = ()


def windows_of(shown: Sequence[Shown], within: int) -> list[list[Shown]]:
    """Cut a user's exposures, in the order of time, into the windows of ``gmeta.io.late(share="window")``."""
    windows: list[list[Shown]] = []
    for exposure in shown:
        if windows:
            first, before = windows[-1][0], windows[-1][-1]
            known = tuple(event for event in exposure.tail if event[0] < before.ts)
            same = exposure.generation == before.generation and known == before.tail
            if same and exposure.ts < first.ts + within:
                windows[-1].append(exposure)
                continue
        windows.append([exposure])
    return windows


# Stripes of events in plain Python, as a reference for the native code.
#
# ``io/history/stripe.h`` and the headers beside it describe the layout and its reasons.

CONSTANT, FRAME, STEPS, DICTIONARY, SPARSE = range(5)
_WIDTHS = (64, *range(56, -1, -1))
_HEADER, _ENTRY = struct.Struct("<4sHHI"), struct.Struct("<II")
_WORD = (1 << 64) - 1


def make_stripe(columns: Sequence[Sequence[int]]) -> bytes:
    """Return the stripe of columns of 64-bit integers, all with a value for each event."""
    made = [make_column(column) for column in columns]
    start = _HEADER.pack(b"GHST", 1, len(columns), len(columns[0]) if columns else 0)
    entries = b"".join(_ENTRY.pack(len(column), crc32c(column)) for column in made)
    return start + struct.pack("<I", crc32c(entries + start)) + entries + b"".join(made)


def read_stripe(stripe: bytes) -> list[list[int]]:
    """Return the columns of a sound stripe."""
    _, _, columns, events = _HEADER.unpack_from(stripe)
    at, found = 16 + _ENTRY.size * columns, []
    for number in range(columns):
        size, _ = _ENTRY.unpack_from(stripe, 16 + _ENTRY.size * number)
        found.append(read_column(stripe[at : at + size], events))
        at += size
    return found


def make_column(values: Sequence[int], may_be_sparse: bool = True) -> bytes:
    """Return the column of some values: the smallest of its forms, of equal ones the first."""
    distinct = sorted(set(values))
    if len(distinct) <= 1:
        return bytes([CONSTANT]) + _varint(_zigzag(values[0] if values else 0))
    forms = [bytes([FRAME]) + _frame(values), bytes([STEPS]) + _steps(values)]
    if len(distinct) <= 256:
        places = [distinct.index(value) for value in values]
        packed = _pack(places, (len(distinct) - 1).bit_length())
        forms.append(bytes([DICTIONARY]) + _varint(len(distinct)) + _steps(distinct) + packed)
    if may_be_sparse and 0 in distinct:
        present = [value for value in values if value]
        bitmap = _pack([int(value != 0) for value in values], 1)
        forms.append(bytes([SPARSE]) + _varint(len(present)) + bitmap + make_column(present, False))
    return min(forms, key=len)


def read_column(column: bytes, count: int) -> list[int]:
    """Return the values of a sound column of this length."""
    return _Reader(column).column(count)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def column(self, count: int) -> list[int]:
        form = self._take(1)[0]
        read: list[Callable[[int], list[int]]] = [
            lambda n: [_unzigzag(self._varint())] * n,
            self._frame,
            self._steps,
            self._dictionary,
            self._sparse,
        ]
        return read[form](count)

    def _take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def _varint(self) -> int:
        number = shift = 0
        while True:
            (byte,) = self._take(1)
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    def _packed(self, count: int, width: int) -> list[int]:
        bits = int.from_bytes(self._take((count * width + 7) // 8), "little")
        return [bits >> (i * width) & ((1 << width) - 1) for i in range(count)]

    def _frame(self, count: int) -> list[int]:
        base, (width,) = _unzigzag(self._varint()), self._take(1)
        patches = self._varint()
        distances, place = self._packed(count, width), 0
        places = [place := place + self._varint() for _ in range(patches)]
        for each in places:
            distances[each] |= self._varint() << width
        return [_signed(base + distance) for distance in distances]

    def _steps(self, count: int) -> list[int]:
        values = [_unzigzag(self._varint())]
        for step in self._frame(count - 1):
            values.append(_signed(values[-1] + step))
        return values

    def _dictionary(self, count: int) -> list[int]:
        size = self._varint()
        distinct = self._steps(size)
        return [distinct[place] for place in self._packed(count, (size - 1).bit_length())]

    def _sparse(self, count: int) -> list[int]:
        present = self._varint()
        bitmap = self._packed(count, 1)
        values = iter(self.column(present))
        return [next(values) if bit else 0 for bit in bitmap]


def _frame(values: Sequence[int]) -> bytes:
    base = min(values, default=0)
    distances = [value - base for value in values]
    width = min(_WIDTHS, key=lambda width: _size_at(distances, width))
    patched = [place for place, distance in enumerate(distances) if distance >> width]
    gaps = [place - before for before, place in pairwise([0, *patched])]
    return b"".join(
        [
            _varint(_zigzag(base)),
            bytes([width]),
            _varint(len(patched)),
            _pack([distance & ((1 << width) - 1) for distance in distances], width),
            *map(_varint, gaps),
            *(_varint(distances[place] >> width) for place in patched),
        ]
    )


def _size_at(distances: Sequence[int], width: int) -> int:
    """The criterion for a frame's width: its bytes, with one for the place of each patch."""
    further = [(distance.bit_length() - width + 6) // 7 for distance in distances if distance >> width]
    return (len(distances) * width + 7) // 8 + sum(further) + len(further)


def _steps(values: Sequence[int]) -> bytes:
    steps = [_signed(after - before) for before, after in pairwise(values)]
    return _varint(_zigzag(values[0])) + _frame(steps)


def _pack(numbers: Sequence[int], width: int) -> bytes:
    bits = sum(number << (i * width) for i, number in enumerate(numbers))
    return bits.to_bytes((len(numbers) * width + 7) // 8, "little")


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def _zigzag(number: int) -> int:
    return 2 * number if number >= 0 else -2 * number - 1


def _unzigzag(number: int) -> int:
    return number >> 1 if number % 2 == 0 else -(number >> 1) - 1


def _signed(number: int) -> int:
    number &= _WORD
    return number - (1 << 64) if number >> 63 else number
