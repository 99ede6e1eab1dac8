"""Rows of several partitions in order of time, against a sort, however they arrive."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from gmeta.io.streams.merge import Lane, Merge
from gmeta.io.streams.records import Rows

SCHEMA = pa.schema([("id", pa.int64())])


class GivenRows:
    """A reader of rows that arrive in given pieces, one at each look."""

    start = 0
    seen = None

    def __init__(self, ids: list[int], times: list[int], cuts: list[int]) -> None:
        ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
        self._pieces = [(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True) if end > begin]
        self._ids, self._times, self._waits = ids, times, True

    @property
    def at_end(self) -> bool:
        return not self._pieces

    def read(self) -> Rows | None:
        self._waits = not self._waits
        if self._waits or not self._pieces:
            return None
        begin, end = self._pieces.pop(0)
        batch = pa.record_batch([pa.array(self._ids[begin:end], pa.int64())], schema=SCHEMA)
        return Rows(batch, np.array(self._times[begin:end], np.int64), lambda k: begin + k)

    def close(self) -> None:
        pass


logs = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.lists(st.integers(0, 20), max_size=12),
        st.lists(st.integers(0, 12), max_size=4),
    ),
    min_size=1,
    max_size=4,
)


def lanes_of(drawn: list[tuple[int, list[int], list[int]]], places: dict[str, list[int]]) -> list[Lane]:
    lanes, first = [], 0
    for number, (side, times, cuts) in enumerate(drawn):
        ids = list(range(first, first + len(times)))
        first += len(times)
        place, key, _ = places.get(f"{side}/{number}", (0, None, None))
        reader = GivenRows(ids[place:], times[place:], cuts)
        offset = place

        def times_of(rows: Rows) -> np.ndarray:
            return rows.times

        lane = Lane(side, number, reader, place, key, times_of)
        read = reader.read

        def shifted(read=read, offset=offset) -> Rows | None:  # a place counts from the partition's beginning
            rows = read()
            return rows and Rows(rows.batch, rows.times, lambda k: offset + rows.place(k))

        reader.read = shifted
        lanes.append(lane)
    return lanes


def everything(merge: Merge, most: int = 1000) -> list[tuple[int, int, int, int]]:
    found = []
    for _ in range(most):
        merged = merge.read()
        if merged is None:
            if merge.at_end and merge.read() is None:
                return found
            continue
        ids = np.empty(len(merged.keys), np.int64)
        for side, batch in enumerate(merged.batches):
            ids[merged.sides == side] = batch.column(0).to_numpy()
        found += zip(
            merged.keys.tolist(), merged.sides.tolist(), merged.parts.tolist(), ids.tolist(), strict=True
        )
    raise AssertionError("the merge doesn't end")


def oracle(drawn: list[tuple[int, list[int], list[int]]]) -> list[tuple[int, int, int, int]]:
    rows, first = [], 0
    for number, (side, times, _) in enumerate(drawn):
        keys = np.maximum.accumulate(times) if times else []
        rows += [(int(key), number, first + i, side) for i, key in enumerate(keys)]
        first += len(times)
    return [(key, side, number, row) for key, number, row, side in sorted(rows)]


@given(logs)
def test_order_is_a_sort_however_rows_arrive(drawn: list[tuple[int, list[int], list[int]]]) -> None:
    assert everything(Merge(lanes_of(drawn, {}), [SCHEMA] * 2, idle=0.0)) == oracle(drawn)


@given(logs, st.integers(0, 6))
def test_a_merge_continues_from_its_places(drawn: list[tuple[int, list[int], list[int]]], looks: int) -> None:
    first, before = Merge(lanes_of(drawn, {}), [SCHEMA] * 2, idle=None), []
    for _ in range(looks):
        merged = first.read()
        before += [] if merged is None else merged.keys.tolist()
    rest = everything(Merge(lanes_of(drawn, first.places()), [SCHEMA] * 2, idle=0.0))
    assert [*before, *(row[0] for row in rest)] == [row[0] for row in oracle(drawn)]
    assert rest == oracle(drawn)[len(before) :]


def test_a_partition_without_rows_holds_up_others_unless_idle() -> None:
    drawn = [(0, [1, 2, 3], []), (0, [], [])]
    waits = Merge(lanes_of(drawn, {}), [SCHEMA], idle=None)
    assert [waits.read() for _ in range(4)] == [None] * 4
    assert len(everything(Merge(lanes_of(drawn, {}), [SCHEMA], idle=0.0))) == 3
