"""Two ranks that are killed anywhere on a stream, and resumed, train as two that weren't: bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.checkpoint import ShardedCheckpoint
from gmeta.checkpoint.callback import tables_by_name
from gmeta.core import collectives
from gmeta.core.errors import RanksError
from gmeta.initializers import Normal
from gmeta.io import StreamPosition, stream
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.optimizers import Adam
from support.process_ranks import run_ranks
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


@pytest.mark.shown_by(case="2-True")
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
