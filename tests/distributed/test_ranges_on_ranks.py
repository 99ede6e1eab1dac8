"""Ranks read ranges of an epoch that differ in length, take the same steps, and train as one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta import io
from gmeta.core import collectives
from gmeta.core.shares import SHARES
from gmeta.initializers import Normal
from gmeta.io.reader_stats import ReaderStats
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from gmeta.optimizers import Adam
from support.grouped_data import write_folder
from support.process_ranks import run_ranks

pytestmark = pytest.mark.ranks


def train(path: Path) -> dict[str, Any]:
    model = MetaModel(
        EmbeddingCollection(
            [FeatureConfig("genre", TableConfig("genre", 4, initializer=Normal(0.0, 0.5)), combiner="mean")],
            optimizer=Adam(0.05),
        ),
        MLP({"fc": 4, "out": 1}, seed=1),
        inner=InnerLoop(steps=1, learning_rate=0.01),
    )
    # Tracing is what would take the time.
    model.compile(tf.keras.optimizers.Adam(0.02), run_eagerly=True)
    stats = ReaderStats()
    data = io.tasks(
        path, tasks_per_batch=4, query=2, features=["genre"], options=io.ReadOptions(seed=3, stats=stats)
    )
    tasks = [batch["task"].numpy().tolist() for batch in data]
    stats.reset()
    data = io.tasks(
        path, tasks_per_batch=4, query=2, features=["genre"], options=io.ReadOptions(seed=3, stats=stats)
    )
    history = model.fit(data, epochs=3, verbose=0).history
    return {
        "tasks": tasks,
        "loss": history["loss"],
        "weights": [weight.numpy() for weight in model.network.trainable_variables],
        "steps": int(model.optimizer.iterations),
        "read": stats.read().groups,
    }


def test_a_rank_with_a_shorter_range_takes_its_steps_without_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_folder(tmp_path, [3, 5, 4, 6], [4, 3, 7, 5, 3])
    ranks = run_ranks(train, 2, path)
    assert [[len(batch) for batch in rank["tasks"]] for rank in ranks] == [[4, 0], [4, 1]]
    assert [rank["read"] for rank in ranks] == [12, 15]  # of three epochs, each its own range and no more
    monkeypatch.setenv(SHARES, "2")
    assert collectives.world().shares.count == 2
    one = train(path)
    assert one["tasks"] == [a + b for a, b in zip(*(rank["tasks"] for rank in ranks), strict=True)]
    for rank in ranks:
        assert rank["steps"] == one["steps"] == 6
        np.testing.assert_allclose(rank["loss"], one["loss"], rtol=1e-5)
        for found, expected in zip(rank["weights"], one["weights"], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
