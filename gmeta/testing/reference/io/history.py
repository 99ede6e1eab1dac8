"""Histories that plain Python makes of the events that were appended, and small days of events for tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


class Event(NamedTuple):
    """An event of a user; `price` is a float32."""

    user: int
    ts: int
    item: int
    price: float


class Born(NamedTuple):
    """An event that a generation was the first to hold."""

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
    """Draw a day's events; a few of them happened the day before."""
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
    """An exposure: the generation that the ranker read, and the (time, item) that it had besides."""

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
