"""Ranks on a stream: two that are killed and resumed train as two that weren't; they publish in quiet too."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.checkpoint import ShardedCheckpoint
from gmeta.checkpoint.callback import tables_by_name
from gmeta.checkpoint.store import step_of
from gmeta.core import collectives
from gmeta.core.errors import RanksError
from gmeta.experiment.online.follow import Following, begin, load_config
from gmeta.experiment.online.online_model import OnlineConfig
from gmeta.export.published_folder import PublishedFolder
from gmeta.initializers import Normal
from gmeta.io import StreamPosition, stream
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.ops import hash_text
from gmeta.optimizers import Adam
from support import warm
from support.process_ranks import run_ranks
from support.serving import ask_all
from support.tables import sorted_records

pytestmark = pytest.mark.ranks

ROWS, FILES, BATCH = 240, 4, 8  # of a partition, and of a rank's batch
COLUMNS = {"user": "int64", "item": "int64", "click": "float32", "ts": "int64"}


def write_log(folder: Path) -> None:
    """Two partitions of events that are functions of their numbers; ids repeat within a batch."""
    random = np.random.default_rng(7)
    for part in range(2):
        (folder / f"p{part}").mkdir()
        columns = {"user": random.integers(0, 30, ROWS), "item": random.zipf(1.3, ROWS) % 50}
        columns |= {"click": random.integers(0, 2, ROWS), "ts": 2 * np.arange(ROWS) + part}
        lines = [json.dumps({name: int(column[i]) for name, column in columns.items()}) for i in range(ROWS)]
        for number, some in enumerate(np.array_split(lines, FILES)):
            (folder / f"p{part}" / f"{number}.jsonl").write_text("\n".join(some) + "\n")


def train(
    log: Path, checkpoints: Path, depth: int, apart: bool, kill: tuple[int, int, bool] | None
) -> dict[str, Any]:
    """Train to the end of the stream, or until a rank is killed: its number, the step, and whether in it."""
    tf.random.set_seed(3)
    here, start = collectives.world(), Normal(0.0, 0.3)
    features = [FeatureConfig(name, TableConfig(name, 4, initializer=start)) for name in ("user", "item")]
    inputs = {name: tf.keras.Input([], name=name, dtype=tf.int64) for name in ("user", "item")}
    vectors = EmbeddingCollection(features, optimizer=Adam(0.05), name="tables")(inputs)
    kernels = [tf.keras.initializers.GlorotUniform(seed) for seed in (5, 6)]
    hidden = tf.concat([*vectors.values()], axis=-1)
    hidden = tf.keras.layers.Dense(6, "relu", kernel_initializer=kernels[0])(hidden)
    model = gmeta.models.Model(inputs, tf.keras.layers.Dense(1, kernel_initializer=kernels[1])(hidden))
    model.reading = StreamPosition()
    model.compile(
        tf.keras.optimizers.Adam(0.05),
        tf.keras.losses.BinaryCrossentropy(from_logits=True),
        pipeline=gmeta.Pipeline(depth=depth),
    )
    steps = 0

    class Kill(tf.keras.callbacks.Callback):
        def _here(self, inside: bool) -> bool:
            return kill == (here.rank, steps, inside)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self._here(True):  # beside the step, in which the other rank may be anywhere
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal steps
            steps += 1
            if self._here(False):  # while the other rank goes on, or saves
                os.kill(os.getpid(), signal.SIGKILL)

    sources = [log / "p0", log / "p1"] if apart else log / "p0"
    described = stream(sources, columns=COLUMNS, time="ts", follow=False, idle="never")
    data = described.batches(BATCH, label="click", start=model.reading)
    data = data.map(lambda x, y: ({name: x[name] for name in ("user", "item")}, y))
    saving = ShardedCheckpoint(checkpoints, every=3)
    done = saving.restore(model)
    before = saving.batches
    saving.fit(model, data, epochs=done + 1, callbacks=[Kill()], verbose=0)
    return {
        "before": before,
        "steps": int(model.reading.step),
        "dense": [weight.numpy() for weight in [*model.weights, *model.optimizer.variables]],
        "tables": {name: sorted_records(table) for name, table in tables_by_name(model).items()},
    }


@pytest.mark.shown_by("io/streams/test_stream.py::test_ranks_share_a_stream_and_any_number_resumes")
@pytest.mark.parametrize(("depth", "apart"), [(0, True), (0, False), (2, True), (2, False)])
def test_two_killed_ranks_resume_with_the_bits_of_two_that_were_not(
    depth: int, apart: bool, tmp_path: Path
) -> None:
    write_log(tmp_path)
    whole = run_ranks(train, 2, tmp_path, tmp_path / "whole", depth, apart, None)
    steps = ROWS // BATCH if apart else ROWS // BATCH // 2
    assert [rank["steps"] for rank in whole] == [steps, steps]
    random = np.random.default_rng([depth, apart, int(time.time())])  # another moment each time
    kill = int(random.integers(2)), int(random.integers(4, steps - 2)), bool(random.integers(2))
    with pytest.raises(RanksError, match=f"rank {kill[0]} of 2 was killed by SIGKILL"):
        run_ranks(train, 2, tmp_path, tmp_path / "killed", depth, apart, kill, grace=5.0)
    resumed = run_ranks(train, 2, tmp_path, tmp_path / "killed", depth, apart, None)
    for one, other in zip(whole, resumed, strict=True):
        assert 0 < other["before"] <= kill[1], kill
        assert other["steps"] == steps
        for mine, theirs in zip(one["dense"], other["dense"], strict=True):
            np.testing.assert_array_equal(mine, theirs, str(kill))
        for name, records in one["tables"].items():
            for column, again in zip(records, other["tables"][name], strict=True):
                np.testing.assert_array_equal(column, again, f"{name} {kill}")


SETTINGS = {"label": "click", "time": "ts", "batch_size": 32, "dim": 4, "hidden": (8,), "window": 64}


def put(folder: Path, number: int, rows: int = 64) -> None:
    """Write a file of clicks, whole."""
    random = np.random.default_rng(number)
    users, items = random.integers(0, 20, rows), random.integers(0, 10, rows)
    lines = [
        json.dumps(
            {
                "user": int(users[i]),
                "item": f"i{items[i]}",
                "click": int(items[i]) % 2,
                "ts": 1_700_000_000 + number * rows + i,
            }
        )
        for i in range(rows)
    ]
    folder.mkdir(exist_ok=True)
    (folder / f".{number:04}").write_text("\n".join(lines) + "\n")
    (folder / f".{number:04}").rename(folder / f"{number:04}.jsonl")


def quiet(folder: Path) -> tuple[list[int], list[tuple[bool, bool, bool]], int]:
    """Follow a log whose next file comes only after all rows before it are published and saved."""
    times = {"publish_every": "0.3s", "dense_every": "0.6s", "checkpoint_every": "0.5s"}
    given = OnlineConfig(source=str(folder / "log"), **SETTINGS, **times)
    config, log = begin(folder / "run", given, follow=True)
    following = Following(folder / "run", config, log, publish=folder / "online", show=lambda _: None)
    published: list[int] = []
    following.publisher.listeners.append(lambda _: published.append(int(following.model.reading.step)))
    seen = []

    def wait_for(found: Callable[[], bool]) -> bool:
        end = time.monotonic() + 120
        while not (done := found()) and time.monotonic() < end:
            time.sleep(0.05)
        return done

    def saved() -> int:
        latest = following.saving.store.latest()
        return 0 if latest is None else step_of(latest)

    def write() -> None:
        try:
            for number in range(2):
                done = [
                    wait_for(lambda number=number: published[-1:] == [number + 1]),
                    wait_for(lambda number=number: saved() == number + 1),
                ]
                then = len(published)
                time.sleep(1.0)
                seen.append((*done, len(published) - then <= 1))  # one with dense weights may follow
                if number == 0:
                    put(folder / "log", number + 1)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # which ends the other rank too

    writer = threading.Thread(target=write)
    if collectives.world().rank == 0:
        writer.start()
    following.train()
    return published, seen, int(following.model.reading.step)


@pytest.mark.shown_by(
    "experiment/online/test_follow.py::test_what_is_due_is_published_and_saved_though_no_row_comes"
)
def test_ranks_publish_and_save_what_is_due_though_no_row_comes(tmp_path: Path) -> None:
    put(tmp_path / "log", 0)
    first, second = run_ranks(quiet, 2, tmp_path)
    assert first[1] == [(True, True, True)] * 2
    assert first[2] == second[2] == 2
    assert first[0] == second[0]


@pytest.mark.shown_by("experiment/online/test_follow.py::test_days_in_parts_equal_days_at_once")
def test_the_command_follows_and_publishes_on_two_ranks(tmp_path: Path) -> None:
    run, online = tmp_path / "run", tmp_path / "online"
    settings = [f"{name}={json.dumps(value)}" for name, value in SETTINGS.items()]
    words = ["-m", "gmeta", "train", "--follow", tmp_path / "log", "--run", run, "--publish", online]
    words += ["--np", "2", "--until-end", *(word for each in settings for word in ("--set", each))]
    for number in range(2):
        put(tmp_path / "log", 2 * number)
        put(tmp_path / "log", 2 * number + 1)
        done = warm.run([sys.executable, *words])
        assert done.returncode == 0, done.stderr
        assert "the same command continues" in done.stderr
    found = PublishedFolder(online).contents()
    base = found.models[-1]
    deltas = [online / span.name for span in found.following(base)]
    asked = {"user": np.arange(20), "item": np.array([f"i{i}".encode() for i in range(20)], object)}
    model = online / f"model/{base}"
    applied = [
        (model, "apply_delta", {"delta_bytes": np.array(path.read_bytes(), object)}) for path in deltas
    ]
    *_, answer = ask_all([*applied, (model, "predict", asked)])
    config, log = begin(run, load_config(run), follow=False)
    following = Following(run, config, log)
    assert following.saving.batches == 4
    own = following.model.signature().function(
        {"user": tf.constant(asked["user"]), "item": hash_text(tf.constant(asked["item"]))}
    )
    np.testing.assert_allclose(answer["click"], own["click"], rtol=1e-6)
