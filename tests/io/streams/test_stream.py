"""Streams from folders, Kafka and Redis: the same batches however rows arrive, and each row trained once."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import gmeta
from gmeta import io
from gmeta.checkpoint import ShardedCheckpoint
from gmeta.core.errors import ConfigError, DataError
from gmeta.io import StreamPosition, stream
from gmeta.io.reader_stats import data_errors
from gmeta.io.streams.message_logs import KafkaLog
from gmeta.preprocess import HistorySpec
from gmeta.preprocess.history.append import append_history
from support.process_ranks import run_ranks
from support.stream_rows import COLUMNS, events, make_model, put, times


def test_rows_of_all_formats_are_the_same(tmp_path: Path) -> None:
    rows = [{**row, "name": f"n{row['ts']}", "tags": [1, 2, 3][: row["ts"] % 4]} for row in events(50)]
    put(tmp_path / "json", "1.jsonl", rows)
    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "parquet/1.parquet", row_group_size=7)
    (tmp_path / "records").mkdir()
    with tf.io.TFRecordWriter(str(tmp_path / "records/1.tfrecord")) as writer:
        for row in rows:
            features = tf.train.Features()
            for name, value in row.items():
                each = value if isinstance(value, list) else [value]
                if name == "name":
                    features.feature[name].bytes_list.value[:] = [text.encode() for text in each]
                elif name == "click":
                    features.feature[name].float_list.value[:] = each
                else:
                    features.feature[name].int64_list.value[:] = each
            writer.write(tf.train.Example(features=features).SerializeToString())
    columns = {**COLUMNS, "name": "string", "tags": "int64[]"}
    found = []
    for folder, given in (("json", None), ("parquet", None), ("records", columns)):
        described = stream(tmp_path / folder, columns=given, time="ts", follow=False)
        assert described.sources[0].columns == columns
        found.append(list(described.batches(20, label="click")))
    flat = [tf.nest.flatten(each, expand_composites=True) for each in found]
    for one, *others in zip(*flat, strict=True):
        for other in others:
            np.testing.assert_array_equal(one, other)
    features, clicks = found[0][2]
    assert len(clicks) == 10
    assert features["tags"].row_lengths().numpy().tolist() == [number % 4 for number in range(40, 50)]


def test_a_followed_folder_gives_what_a_replay_gives(tmp_path: Path) -> None:
    rows = events(120)
    put(tmp_path, "1.jsonl", rows[:10])
    position = StreamPosition()
    followed = stream(tmp_path, columns=COLUMNS, time="ts", poll="0.01s").batches(16, start=position)
    found: list[list[int]] = []
    reading = threading.Thread(target=lambda: found.extend(times(followed)))
    reading.start()
    for part in range(1, 5):
        put(tmp_path, f"{part + 1}.jsonl", rows[10 + 25 * (part - 1) : 10 + 25 * part])
        time.sleep(0.03)
    deadline = time.monotonic() + 20
    while len(found) < 6 and time.monotonic() < deadline and reading.is_alive():
        time.sleep(0.02)
        if position._reader._queued == 110 % 16 and position._reader._given:
            position.stop()
    reading.join(20)
    replayed = stream(tmp_path, columns=COLUMNS, time="ts", follow=False)
    assert found == times(replayed.batches(16, remainder=False))
    assert sum(map(len, times(replayed.batches(16)))) == 110


def test_folders_are_read_in_order_of_time(tmp_path: Path) -> None:
    rows = events(60)
    for part in range(3):
        put(tmp_path / f"p{part}", "1.jsonl", rows[part::3])
    data = stream([tmp_path / f"p{part}" for part in range(3)], time="ts", follow=False).batches(60)
    assert times(data) == [list(range(60))]
    with pytest.raises(ConfigError, match="several folders are read in order of time"):
        stream([tmp_path / f"p{part}" for part in range(3)])


def test_bad_rows_and_files_are_named(tmp_path: Path) -> None:
    put(tmp_path, "1.jsonl", events(5))
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('{"user": "x", "item": 1, "click": 0, "ts": 5}\n')
    described = stream(tmp_path, columns=COLUMNS, time="ts", follow=False)
    with pytest.raises(DataError, match=r"1\.jsonl: row 6: .*; got b'\{\"user\": \"x\""), data_errors():
        times(described.batches(4))
    skipping = stream(tmp_path, columns=COLUMNS, time="ts", follow=False, on_bad="skip")
    assert sum(map(len, times(skipping.batches(4)))) == 5
    assert skipping.counts[0].bad == 1
    (tmp_path / "2.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"2\.csv: a file that ends with \.csv"), data_errors():
        times(skipping.batches(4))


def test_times_of_another_unit_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "1.jsonl", [{**row, "ts": 1_700_000_000_000 + row["ts"]} for row in events(5)])
    for given in ({}, {"unit": "s"}):
        described = stream(tmp_path, columns=COLUMNS, time="ts", follow=False, **given)
        with pytest.raises(DataError, match="years from 1970 in unit='s': give the unit"), data_errors():
            times(described.batches(4))
    assert sum(map(len, times(stream(tmp_path, time="ts", unit="ms", follow=False).batches(4)))) == 5


def test_a_script_that_runs_again_trains_what_has_come_since(tmp_path: Path) -> None:
    trained = []
    for number, rows in enumerate((events(8), events(16)[8:], [])):
        if rows:
            put(tmp_path / "log", f"{number}.jsonl", rows)
        model = make_model()
        model.compile("sgd", tf.keras.losses.BinaryCrossentropy(from_logits=True))
        described = stream(tmp_path / "log", columns=COLUMNS, time="ts", follow=False)
        data = described.batches(4, label="click", start=model.reading).map(
            lambda x, y: ({name: x[name] for name in ("user", "item")}, y)
        )
        ShardedCheckpoint(tmp_path / "checkpoints", every=100).fit(model, data, epochs=1, verbose=0)
        trained.append((int(model.reading.step), described.counts[0].rows))
    assert trained == [(2, 8), (4, 8), (4, 0)]


def test_after_an_error_no_row_is_passed_over(tmp_path: Path) -> None:
    good, rows = [json.dumps(row) for row in events(30)], [*range(30)]
    put(tmp_path, "1.jsonl", events(10))
    (tmp_path / "2.jsonl").write_text("\n".join([*good[10:15], "damaged", *good[16:]]))
    position = StreamPosition()
    data = stream(tmp_path, columns=COLUMNS, time="ts", follow=False).batches(5, start=position)
    found: list[int] = []

    def train() -> None:
        for batch in data:
            found.extend(batch["ts"].numpy().tolist())
            position.trained()

    with pytest.raises(DataError, match=r"2\.jsonl: row 6"), data_errors():
        train()
    (tmp_path / "2.jsonl").write_text("\n".join(good[10:]))
    train()
    assert found == rows


def test_a_file_that_is_read_may_be_deleted(tmp_path: Path) -> None:
    put(tmp_path, "1.jsonl", events(10))
    position = StreamPosition()
    described = stream(tmp_path, columns=COLUMNS, time="ts", follow=False)
    for _ in described.batches(5, start=position):
        position.trained()
    state, later = position.state(), StreamPosition()
    (tmp_path / "1.jsonl").unlink()
    put(tmp_path, "2.jsonl", events(5, first=10))
    later.restore(state)
    assert times(described.batches(5, start=later)) == [[10, 11, 12, 13, 14]]


class KilledError(Exception):
    """Stands for the end of the process."""


def train(
    source: Callable[[StreamPosition], tf.data.Dataset],
    checkpoints: Path,
    *,
    depth: int = 0,
    kill_after: int | None = None,
    every: int = 3,
) -> list[np.ndarray]:
    """Train to the stream's end, or to a kill; return all weights, and predictions."""
    model = make_model()
    model.compile(
        tf.keras.optimizers.Adam(0.05),
        tf.keras.losses.BinaryCrossentropy(from_logits=True),
        pipeline=gmeta.Pipeline(depth=depth),
    )
    batches = 0

    class Count(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal batches
            batches += 1
            if batches == kill_after:
                raise KilledError

    saving = ShardedCheckpoint(checkpoints, every=every)
    done = saving.restore(model)
    saving.fit(model, source(model.reading), epochs=done + 1, callbacks=[Count()], verbose=0)
    probe = {name: tf.range(30, dtype=tf.int64) for name in ("user", "item")}
    return [*map(np.asarray, model.get_weights()), model(probe).numpy()]


@pytest.mark.shown_by(case="2")
@pytest.mark.parametrize("depth", [0, 2])
def test_killed_and_resumed_equals_uninterrupted(depth: int, tmp_path: Path) -> None:
    rows = events(200)
    for part in range(4):
        put(tmp_path / "log", f"{part}.jsonl", rows[50 * part : 50 * part + 50])

    def source(position: StreamPosition) -> tf.data.Dataset:
        described = stream(tmp_path / "log", columns=COLUMNS, time="ts", follow=False)
        return described.batches(8, label="click", start=position).map(
            lambda x, y: ({name: x[name] for name in ("user", "item")}, y)
        )

    whole = train(source, tmp_path / "whole", depth=depth)
    for after in (4, 1, 7):
        with pytest.raises(KilledError):
            train(source, tmp_path / "killed", depth=depth, kill_after=after)
    resumed = train(source, tmp_path / "killed", depth=depth)
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_ranks_share_a_stream_and_any_number_resumes(tmp_path: Path) -> None:
    rows = events(96)
    put(tmp_path / "log", "1.jsonl", rows)
    for part in range(2):
        put(tmp_path / f"p{part}", "1.jsonl", rows[part::2])

    def work(folder: str, apart: bool, killed: int | None) -> tuple[int, list[list[int]]]:
        sources = [f"{folder}/p0", f"{folder}/p1"] if apart else f"{folder}/log"
        model = make_model()
        model.compile("sgd", tf.keras.losses.BinaryCrossentropy(from_logits=True))
        seen: list[list[int]] = []

        def note(x: Any, y: Any) -> Any:
            tf.numpy_function(lambda ts: seen.append(ts.tolist()), [x["ts"]], [])
            return {name: x[name] for name in ("user", "item")}, y

        steps = 0

        class Stop(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                nonlocal steps
                steps += 1
                if steps == killed:
                    self.model.stop_training = True

        described = stream(sources, columns=COLUMNS, time="ts", follow=False, idle="never")
        data = described.batches(8, label="click", start=model.reading).map(note)
        saving = ShardedCheckpoint(f"{folder}/checkpoints{apart}", every=2)
        done = saving.restore(model)
        if killed is None:
            saving.fit(model, data, epochs=done + 1, verbose=0)
        else:
            model.fit(data, callbacks=[Stop(), saving], verbose=0)
        return steps, seen

    for apart in (False, True):
        first = run_ranks(work, 2, str(tmp_path), apart, 4)
        _, rest = run_ranks(work, 1, str(tmp_path), apart, None)[0]
        steps = first[0][0]
        trained = [ts for _, seen in first for batch in seen[:steps] for ts in batch]
        assert sorted([*trained, *(ts for batch in rest for ts in batch)]) == list(range(96))
        assert len(trained) == 16 * steps < 96
        if not apart:  # a step of two ranks has the rows of one batch that is twice as large
            both = [sorted(a + b) for a, b in zip(first[0][1][:steps], first[1][1][:steps], strict=True)]
            assert both == [list(range(16 * step, 16 * step + 16)) for step in range(steps)]


@pytest.fixture
def kafka() -> tuple[Any, str]:
    """A producer, which holds a broker within this process, and the broker's address."""
    library = pytest.importorskip("confluent_kafka")
    producer = library.Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1})
    broker = next(iter(producer.list_topics(timeout=20).brokers.values()))
    return producer, f"{broker.host}:{broker.port}"


def test_kafka_is_read_from_offsets_in_order_of_time(kafka: tuple[Any, str]) -> None:
    producer, address = kafka
    rows = events(90)
    for row in rows[:60]:
        producer.produce("events", json.dumps(row), partition=row["user"] % 3)
    producer.flush()
    described = stream(f"kafka://{address}/events", time="ts", follow=False)
    assert described.sources[0].columns == COLUMNS
    assert times(described.batches(60)) == [list(range(60))]
    position = StreamPosition()
    first = next(iter(described.batches(20, start=position)))
    position.trained()
    state = position.state()
    for row in rows[60:]:
        producer.produce("events", json.dumps(row), partition=row["user"] % 3)
    producer.flush()
    later = StreamPosition()
    later.restore(json.loads(json.dumps(state)))
    rest = times(described.batches(20, start=later))
    assert [first["ts"].numpy().tolist(), *rest] == [
        list(range(20 * i, min(20 * i + 20, 90))) for i in range(5)
    ]
    with pytest.raises(DataError, match=r"to be read next, and the broker has 0 to"), data_errors():
        position._reader._open({"0/0": [10_000, 0]})
    with pytest.raises(DataError, match=r"kafka://.*/nothing: .*create the topic, or name another one"):
        stream(f"kafka://{address}/nothing?")


def test_partitions_that_are_added_are_read_from_their_first_row_on(
    kafka: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, address = kafka

    def send(rows: list[dict[str, Any]], partition: int) -> None:
        for row in rows:
            producer.produce("events", json.dumps(row), partition=partition)
        producer.flush()

    def show(count: int) -> None:  # the mock cluster can't add partitions to a topic
        monkeypatch.setattr(KafkaLog, "partitions", lambda self: [*map(str, range(count))])

    send(events(16), 0)
    monkeypatch.setattr("gmeta.io.streams.position._LOOK_EVERY", 0.0)
    show(1)
    described = stream(
        f"kafka://{address}/events", columns=COLUMNS, time="ts", idle="0.1s", poll="0.01s", begin="earliest"
    )
    position = StreamPosition()
    data = iter(described.batches(8, start=position))
    assert [next(data)["ts"].numpy().tolist() for _ in range(2)] == [[*range(8)], [*range(8, 16)]]
    position.trained(2)
    send(events(12), 1)  # older than what was returned, and written before the partition is noticed
    send(events(4, first=16), 0)
    show(2)
    assert next(data)["ts"].numpy().tolist() == [*range(8)]
    position.trained()
    state = position.state()
    send(events(8, first=20), 2)
    show(3)  # and one that is added between two runs, to a reader that would begin at the end
    later = StreamPosition()
    later.restore(state)
    latest = stream(f"kafka://{address}/events", columns=COLUMNS, time="ts", follow=False, begin="latest")
    rest = [ts for batch in times(latest.batches(8, start=later)) for ts in batch]
    assert rest == [*range(8, 12), *range(16, 28)]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[tuple[Any, str]]:
    """A client of a server of Redis, and its address."""
    library = pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server isn't installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--save", "", "--dir", str(tmp_path)], stdout=subprocess.DEVNULL
    )
    client = library.Redis(port=port)
    for _ in range(200):
        try:
            client.ping()
            break
        except library.RedisError:
            time.sleep(0.05)
    yield client, f"127.0.0.1:{port}"
    server.kill()
    server.wait()


def test_redis_streams_are_read_from_ids(redis: tuple[Any, str]) -> None:
    client, address = redis
    rows = events(50)
    for row in rows[:30]:
        client.xadd("events", row)
    described = stream(f"redis://{address}/events", columns=COLUMNS, time="ts", follow=False)
    position = StreamPosition()
    first = times(described.batches(10, start=position))
    for _ in first:
        position.trained()
    for row in rows[30:]:
        client.xadd("events", {"value": json.dumps(row)})
    rest = times(described.batches(10, start=position))
    assert [*first, *rest] == [list(range(10 * i, 10 * i + 10)) for i in range(5)]
    position.trained(len(rest))
    state = position.state()
    client.xtrim("events", maxlen=1, approximate=False)
    client.xadd("events", rows[0])
    fresh = StreamPosition()
    fresh.restore(state)
    assert times(described.batches(10, start=fresh)) == [[0]]  # all removed entries had been read
    for row in rows[:9]:
        client.xadd("events", row)
    client.xtrim("events", maxlen=2, approximate=False)
    with (
        pytest.raises(DataError, match=r"51 entries were read, up to .*, and 58 were removed"),
        data_errors(),
    ):
        times(described.batches(10, start=fresh))


def test_histories_join_a_stream_of_exposures(tmp_path: Path) -> None:
    days = pa.table(
        {
            "user": np.repeat(np.arange(5), 12),
            "item": np.arange(60) % 7,
            "ts": np.tile(np.arange(12) * 10, 5),
        }
    )
    pq.write_table(days, tmp_path / "day.parquet")
    append_history(tmp_path / "store", tmp_path / "day.parquet", HistorySpec("user", "ts"))
    recent = io.RecentHistories(tmp_path / "store", ["item", "ts"])
    recent.append(3, {"item": 6, "ts": 150})
    shown = []
    for number in range(20):
        user, ts = number % 5, 100 + 5 * number
        seen = recent.snapshot(user, ts, longest=8)
        shown.append(
            {
                **{"user": user, "item": number % 7, "ts": ts, "click": number % 2},
                **{"generation": seen.generation, "history_crc": seen.crc},
                **{f"tail_{name}": seen.tail[name].tolist() for name in ("item", "ts")},
            }
        )
    put(tmp_path / "shown", "1.jsonl", shown)
    lists = {"tail_item": "int64[]", "tail_ts": "int64[]", "generation": "int64", "history_crc": "int64"}
    described = stream(tmp_path / "shown", columns={**COLUMNS, **lists}, time="ts", follow=False)
    store = io.HistoryStore(tmp_path / "store")
    common = {"history": ["item", "ts"], "targets": ["item"], "labels": ["click"], "longest": 8}
    logged = {"generation": "generation", "tail": {"item": "tail_item", "ts": "tail_ts"}, "check": "crc"}
    batches = list(io.late(described, store, user="user", **common, **logged, sequences_per_batch=8))
    assert [len(batch["task"]) for batch in batches] == [8, 8, 4]
    found = [row for batch in batches for row in batch["history"]["item"].to_list()]
    for row, exposure in zip(found, shown, strict=True):
        seen = recent.snapshot(exposure["user"], exposure["ts"], longest=8)
        assert row == seen.columns["item"].tolist()
    assert sum(len(exposure["tail_item"]) for exposure in shown) > 0
    shown[0]["history_crc"] += 1
    put(tmp_path / "shown", "1.jsonl", shown)
    with pytest.raises(DataError, match="the history has the checksum"), data_errors():
        list(io.late(described, store, user="user", **common, **logged))
    with pytest.raises(ConfigError, match="needs its columns of users and times"):
        io.late(described, store, **common)
