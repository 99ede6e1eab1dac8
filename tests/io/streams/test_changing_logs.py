"""Logs that change unexpectedly: files that come late, and partitions without traffic."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf

from gmeta.core.errors import DataError
from gmeta.core.shares import Shares
from gmeta.io import StreamPosition, stream
from gmeta.io.reader_stats import data_errors
from gmeta.io.streams.position import StreamReader
from support.process_ranks import run_ranks
from support.stream_rows import COLUMNS, events, make_model, put, times


def test_a_file_that_comes_too_late_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, "2.jsonl", events(8))
    data = iter(stream(tmp_path, columns=COLUMNS, time="ts", poll="0.01s").batches(8, start=StreamPosition()))
    next(data)
    put(tmp_path, "1.jsonl", events(8))
    with pytest.raises(DataError, match=r"1\.jsonl: the file appeared after 2\.jsonl"), data_errors():
        next(data)


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_a_file_that_comes_too_late_between_two_runs_is_noticed(tmp_path: Path, on_bad: str) -> None:
    log = tmp_path / "log"
    for name in ("1", "2", "4"):
        put(log, f"{name}.jsonl", events(4, first=10 * int(name)))
    described = stream(log, columns=COLUMNS, time="ts", follow=False, on_bad=on_bad)
    position = StreamPosition()
    for _ in described.batches(4, start=position):
        position.trained()
    state = position.state()
    (log / "1.jsonl").unlink()  # a file that is read may be deleted
    put(log, "3.jsonl", events(4, first=30))
    put(log, "5.jsonl", events(4, first=50))
    for again in range(2):
        later = StreamPosition()
        later.restore(state)
        described = stream(log, columns=COLUMNS, time="ts", follow=False, on_bad=on_bad)
        data = described.batches(4, start=later)
        if on_bad == "raise":
            with pytest.raises(DataError, match=r"3\.jsonl: the file appeared after 4"), data_errors():
                times(data)
            continue
        with (
            pytest.warns(UserWarning, match=r"3\.jsonl: the file appeared after 4")
            if not again
            else nullcontext()
        ):
            found = times(data)
        assert found == ([] if again else [[50, 51, 52, 53]])
        assert described.counts[0].bad == (not again)
        later.trained(len(found))
        state = later.state()
    if on_bad == "raise":
        (log / "3.jsonl").rename(log / "6.jsonl")
        later.restore(state)
        assert times(data) == [[50, 51, 52, 53], [30, 31, 32, 33]]


def test_a_rank_without_traffic_gives_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = SimpleNamespace(shares=Shares(1, 1, 2))
    monkeypatch.setattr("gmeta.io.streams.position.collectives.world", lambda: second)
    columns = {**COLUMNS, "words": "string[]"}
    for part in range(2):
        put(tmp_path / f"p{part}", "1.jsonl", [{**row, "words": ["a"]} for row in events(11)])
    folders = [tmp_path / f"p{part}" for part in range(2)]
    described = stream(folders, columns=columns, time="ts", idle="0.05s", poll="0.01s")
    position = StreamPosition()
    data = iter(described.batches(8, start=position))
    sizes, found = [], list[int]()
    for step in range(6):
        if step == 4:
            put(tmp_path / "p1", "2.jsonl", [{**row, "words": []} for row in events(9, first=11)])
        batch = next(data)
        sizes.append(len(batch["ts"]))
        found += batch["ts"].numpy().tolist()
        position.trained()
    assert sizes == [8, 3, 0, 0, 8, 1]
    assert found == [*range(20)]
    held = stream(folders, columns=columns, time="ts", idle="never", poll="0.01s")
    reader = iter(StreamReader(held, 8, StreamPosition(), True))
    assert len(next(reader)["ts"]) == 8  # and the next one would be waited for


def test_ranks_train_on_though_one_has_no_traffic(tmp_path: Path) -> None:
    for part, rows in enumerate((100, 3)):
        put(tmp_path / f"p{part}", "1.jsonl", events(rows))

    def work(folder: str) -> tuple[int, int]:
        model = make_model()
        model.compile("sgd", tf.keras.losses.BinaryCrossentropy(from_logits=True))
        folders = [f"{folder}/p{part}" for part in range(2)]
        described = stream(folders, columns=COLUMNS, time="ts", idle="0.2s", poll="0.01s")
        data = described.batches(8, label="click", start=model.reading)
        data = data.map(lambda x, y: ({name: x[name] for name in ("user", "item")}, y))
        assert model.reading.wait()
        model.fit(data, epochs=1, verbose=0)  # until no rank has rows
        return int(model.reading.step), described.counts[0].rows

    assert run_ranks(work, 2, str(tmp_path)) == [(13, 100), (13, 3)]
