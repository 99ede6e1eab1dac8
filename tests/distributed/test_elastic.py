"""Real elastic jobs: ranks are killed and others join, and the end is that of a job that was left alone."""

from __future__ import annotations

import pickle
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmeta.core.collectives.shares import SHARES
from gmeta.core.config import load_toml
from gmeta.models import Model
from gmeta.testing.small_experiment import small_data
from gmeta.testing.tables import sorted_records
from gmeta.training.experiment_config import ExperimentConfig
from gmeta.training.trainer import restore, train

pytestmark = pytest.mark.ranks


def gmeta_command(*args: str | Path | int, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gmeta", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
    )


# A user's script, which is the same on any number of ranks, and a callback that plays fate. An epoch has 23
# batches, of which a step takes 3, so that its last one has no batch for one of three ranks.
SCRIPT = """
    import itertools, os, pickle, signal, sys, time
    from pathlib import Path

    import numpy as np
    import gmeta
    import tensorflow as tf
    from gmeta.core import collectives
    from gmeta.layers import EmbeddingCollection, FeatureConfig
    from gmeta.models import Model
    from gmeta.ops import Adam, Normal
    from gmeta.testing.tables import sorted_records
    from gmeta.training.sharded_callback import ShardedCheckpoint, tables_of

    folder = Path(sys.argv[1])
    gmeta.init()
    here = collectives.world()
    if here.shares.total > 1:  # AutoGraph would rewrite hundreds of Keras' functions first
        for step in ("train_step", "test_step"):
            setattr(Model, step, tf.autograph.experimental.do_not_convert(getattr(Model, step)))

    def batches(epoch):
        rng = np.random.default_rng([3, epoch])
        for _ in range(23):
            user, item = rng.integers(0, 20, 4), np.minimum(rng.zipf(1.3, 4), 90)
            yield {"user": user, "item": item}, rng.integers(0, 2, (4, 1))

    def data(first):  # an epoch, and at the next iteration the next
        numbers = itertools.count(first)
        ids = tf.TensorSpec([None], tf.int64)
        signature = {"user": ids, "item": ids}, tf.TensorSpec([None, 1])
        every = tf.data.Dataset.from_generator(lambda: batches(next(numbers)), output_signature=signature)
        return every.apply(tf.data.experimental.assert_cardinality(23))

    start = Normal(0.0, 0.3)
    features = [FeatureConfig("user", 4, initializer=start), FeatureConfig("item", 2, initializer=start)]
    x = {f.name: tf.keras.Input([], name=f.name, dtype=tf.int64) for f in features}
    vectors = EmbeddingCollection(features, optimizer=Adam(0.05), name="tables")(x)
    hidden = tf.keras.layers.Concatenate()(list(vectors.values()))
    kernel = tf.keras.initializers.GlorotUniform(seed=1)
    model = Model(x, tf.keras.layers.Dense(1, "sigmoid", kernel_initializer=kernel)(hidden))
    auc = tf.keras.metrics.AUC(name="auc")
    model.compile(tf.keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=[auc])

    class Fate(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            done, slots = checkpoints.batches, folder / "slots"
            if done == 5 and here.size == 3 and here.rank == 1 and slots.exists():
                slots.write_text("localhost:2")
                os.kill(os.getpid(), signal.SIGKILL)
            if done == 11 and here.size == 2 and here.rank == 0:
                slots.write_text("localhost:3")
                while not (Path(os.environ["GMETA_ELASTIC"]) / "change").exists():
                    time.sleep(0.05)

        def on_epoch_end(self, epoch, logs=None):
            if here.rank == 0:
                with (folder / "curves").open("a") as file:
                    print(epoch, here.size, *(f"{name}={value!r}" for name, value in logs.items()), file=file)

    checkpoints = ShardedCheckpoint(folder / "checkpoints", every=2)
    first = checkpoints.restore(model)
    print("begins", first, checkpoints.batches_of_epoch, checkpoints.batches)
    measured = list(data(9))
    held_out = tf.data.Dataset.from_generator(lambda: measured, output_signature=data(9).element_spec)
    checkpoints.fit(model, data, epochs=2, callbacks=[Fate()], validation_data=held_out, verbose=0)
    state = {
        "tables": {name: sorted_records(table) for name, table in tables_of(model).items()},
        "dense": [weight.numpy() for weight in [*model.weights, *model.optimizer.variables]],
    }
    (folder / f"state.{here.rank}").write_bytes(pickle.dumps(state))
"""


def curves(folder: Path) -> list[dict[str, float]]:
    """Of each epoch that has ended, its metrics; the number of ranks in the end is one of them."""
    found = []
    for line in (folder / "curves").read_text().splitlines():
        epoch, size, *logs = line.split()
        named = dict(log.split("=") for log in logs)
        found.append({"epoch": int(epoch), "size": int(size), **{k: float(v) for k, v in named.items()}})
    return found


def state(folder: Path) -> dict[str, Any]:
    """Dense weights of rank 0, and the records of all ranks' tables, by key."""
    ranks = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("state.*"))]
    tables: dict[str, dict[str, Any]] = {}
    for name in ranks[0]["tables"]:
        parts = [rank["tables"][name] for rank in ranks]
        order = np.argsort(np.concatenate([part["keys"] for part in parts]))
        tables[name] = {
            field: np.concatenate([part[field] for part in parts])[order] if value.ndim else value
            for field, value in parts[0].items()
        }
    return {"dense": ranks[0]["dense"], "tables": tables}


def test_a_users_script_outlives_a_killed_rank_and_takes_another_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    alone, folder = tmp_path / "alone", tmp_path / "job"
    alone.mkdir()
    folder.mkdir()
    with monkeypatch.context() as patched:  # one rank that takes the shares of three needs no process
        patched.setenv(SHARES, "3")
        patched.setattr(sys, "argv", [str(script), str(alone)])
        for step in ("train_step", "test_step"):
            patched.setattr(Model, step, getattr(Model, step))
        runpy.run_path(str(script))
    (folder / "slots").write_text("localhost:3")
    slots = f"cat {folder}/slots"
    job = gmeta_command(
        "launch",
        "--np",
        3,
        "--elastic",
        "--host-discovery-script",
        slots,
        "--",
        sys.executable,
        script,
        folder,
    )
    assert job.returncode == 0, job.stderr
    told = [line for line in job.stderr.splitlines() if line.startswith("gmeta: ")]
    assert told[0].startswith("gmeta: rank 1 of 3 was killed by SIGKILL")
    assert told[0].endswith("2 ranks start from the last checkpoint")
    assert told[1].startswith("gmeta: room for 3 ranks in place of 2")
    begins = [line for line in job.stdout.splitlines() if line.startswith("[0] begins")]
    # Epochs that are done, batches of the next one, steps: both starts are from the middle of an epoch.
    assert begins == ["[0] begins 0 0 0", "[0] begins 0 12 4", "[0] begins 1 12 12"]
    expected, found = curves(alone), curves(folder)
    assert [(epoch["epoch"], epoch["size"]) for epoch in found] == [(0, 2), (1, 3)]
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() >= {"loss", "auc", "val_loss", "val_auc"}
        for name in mine.keys() - {"size"}:
            assert mine[name] == pytest.approx(other[name], rel=1e-5), name
    assert_same(state(folder), state(alone))


def assert_same(found: Any, expected: Any) -> None:
    """Equal but for the order in which numbers were added up, relative to the size of an array."""
    for name, records in expected["tables"].items():
        assert len(records["keys"]) > 10
        for field, values in records.items():
            assert_close(found["tables"][name][field], values, f"{name}'s {field}")
    for mine, values in zip(found["dense"], expected["dense"], strict=True):
        assert_close(mine, values, "dense")


def assert_close(found: Any, expected: Any, name: str) -> None:
    size = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * size, err_msg=name)


# `gmeta train` in which rank 1 is killed once, in the middle of the second epoch.
KILLED_ONCE = """
    import os, signal, sys
    from pathlib import Path
    import gmeta
    import tensorflow as tf
    from gmeta.core import collectives
    from gmeta.training.checkpointing import EpochCheckpoints

    def on_train_batch_end(self, batch, logs=None):
        usual(self, batch, logs)
        if self._epochs == 1 and self._last_batch == 2 and os.environ["HOROVOD_RANK"] == "1":
            if not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        print("step", self.batches, "of", collectives.world().size)

    usual = EpochCheckpoints.on_train_batch_end
    EpochCheckpoints.on_train_batch_end = on_train_batch_end
    from gmeta.cli import main
    main(sys.argv[1:])
"""

TOML = """
seeds = [0]
tasks_per_batch = 3
query = 4
embedding_dim = 4
hidden = [8]
support_sizes = [1, 4]
support_steps = 1
[methods.maml]
label = "MAML"
description = "Adapts."
inner = { steps = 1 }
learning_rate = 1e-2
epochs = 3
"""


def test_training_outlives_a_killed_rank_with_the_curves_of_an_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small_data(tmp_path)
    (tmp_path / "start.py").write_text(textwrap.dedent(KILLED_ONCE))
    (tmp_path / "config.toml").write_text(TOML)
    words = ["train", "--np", 2, "--run", "run", "--data", data, "--config", "config.toml"]
    job = gmeta_command(
        *("launch", "--np", 2, "--elastic", "--", sys.executable, "start.py"),
        *(*words, "--checkpoint-every", 2),
        folder=tmp_path,
    )
    assert job.returncode == 0, job.stderr
    told = [line for line in job.stderr.splitlines() if line.startswith("gmeta: ")]
    assert told[0].startswith("gmeta: rank 1 of 2 was killed by SIGKILL")
    assert told[0].endswith("1 ranks start from the last checkpoint")
    assert told[1].startswith("gmeta: room for 2 ranks in place of 1")
    assert re.search(r"MAML, seed 0: resumed after step \d of epoch 2$", job.stderr, re.MULTILINE)
    assert {size for line in job.stdout.splitlines() if (size := line[-4:]) in ("of 1", "of 2")} == {
        "of 1",
        "of 2",
    }

    monkeypatch.setenv(SHARES, "2")
    config = load_toml(ExperimentConfig, tmp_path / "config.toml")
    alone = train(config, "maml", 0, data=data, folder=tmp_path / "alone").run
    runs = {name: restore(config, "maml", 0, folder=tmp_path / name) for name in ("alone", "run/maml/seed-0")}
    models, found = zip(*runs.values(), strict=True)
    assert [len(checkpoints.run.epoch) for checkpoints in found] == [3, 3]
    for name, curve in alone.curves.items():
        np.testing.assert_allclose(found[1].run.curves[name], curve, rtol=1e-5, err_msg=name)
    states = [
        {
            "tables": {table.name: sorted_records(table) for table in model.collection.tables},
            "dense": [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)],
        }
        for model in models
    ]
    assert_same(*reversed(states))
