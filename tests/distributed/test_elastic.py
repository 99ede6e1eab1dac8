"""Real elastic jobs: ranks are killed and others join, and the end is that of a job that was left alone.

Of a job's tables a few rows are in memory and the others on a drive; the one that is left alone has all of
them in memory.
"""

from __future__ import annotations

import os
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

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.shares import SHARES
from gmeta.models import Model
from support import warm
from support.hosts import rack, start_ranks, wait_for_ranks, why_no_rack
from support.pipeline_runs import differences
from support.process_ranks import ranks_environment

pytestmark = pytest.mark.ranks


def gmeta_command(*args: str | Path | int) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "-m", "gmeta", *args])


# A user's script, which is the same on any number of ranks, and a callback that plays fate. An epoch has 23
# batches, of which a step takes 3, so that its last one has no batch for one of three ranks.
SCRIPT = """
    import itertools, os, pickle, signal, sys, time
    from pathlib import Path

    import numpy as np
    import gmeta
    import tensorflow as tf
    from gmeta.core import collectives
    from gmeta.core.collectives.elastic import find_driver
    from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
    from gmeta.models import Model
    from gmeta.initializers import Normal
    from gmeta.optimizers import Adam
    from support.tables import small_tiers, sorted_records
    from gmeta.checkpoint.callback import ShardedCheckpoint, tables_by_name

    folder, depth = Path(sys.argv[1]), int(sys.argv[2])
    first, fewer, again = (hosts.replace(" ", "\\n") for hosts in sys.argv[3:])
    gmeta.init()
    here = collectives.world()

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
    tables = [TableConfig("user", 4, initializer=start), TableConfig("item", 2, initializer=start)]
    features = [FeatureConfig(table.name, table) for table in tables]
    x = {f.name: tf.keras.Input([], name=f.name, dtype=tf.int64) for f in features}
    drive = folder / "rows"
    tiers = small_tiers(drive) if drive.exists() else None
    vectors = EmbeddingCollection(features, optimizer=Adam(0.05), tiers=tiers, name="tables")(x)
    hidden = tf.keras.layers.Concatenate()(list(vectors.values()))
    kernel = tf.keras.initializers.GlorotUniform(seed=1)
    model = Model(x, tf.keras.layers.Dense(1, "sigmoid", kernel_initializer=kernel)(hidden))
    auc = tf.keras.metrics.AUC(name="auc")
    ahead = gmeta.Pipeline(depth)
    model.compile(tf.keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=[auc], pipeline=ahead)
    joins = 7 if here.shares.total == 4 else 11

    class Fate(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            done, slots = checkpoints.batches + 1, folder / "slots"
            whole = here.size == here.shares.total
            if done == 5 and whole and here.rank == 1 and slots.read_text() == first:
                slots.write_text(fewer)
                os.kill(os.getpid(), signal.SIGKILL)
            if done == joins and not whole and here.rank == 0 and slots.exists():
                slots.write_text(again)
                while not find_driver().is_change_wanted():
                    time.sleep(0.05)

        def on_epoch_end(self, epoch, logs=None):
            if here.rank == 0:
                with (folder / "curves").open("a") as file:
                    print(epoch, here.size, *(f"{name}={value!r}" for name, value in logs.items()), file=file)

    checkpoints = ShardedCheckpoint(folder / "checkpoints", every=2)
    epochs = checkpoints.restore(model)
    print("begins", epochs, checkpoints.batches_of_epoch, checkpoints.batches)
    measured = list(data(9))
    held_out = tf.data.Dataset.from_generator(lambda: measured, output_signature=data(9).element_spec)
    checkpoints.fit(model, data, epochs=2, callbacks=[Fate()], validation_data=held_out, verbose=0)
    moved = sum(int(table.statistics().spilled) for table in tables_by_name(model).values())
    # In a GPU's memory a table has whole blocks of rows, which are more than these.
    assert (tiers is None) == (moved == 0) or tiers.hbm_rows, moved
    state = {
        "tables": {name: sorted_records(table) for name, table in tables_by_name(model).items()},
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


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def run_alone(script: Path, shares: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a job comes to that is left alone; one rank with the shares of all needs no process."""
    folder = script.with_name("alone")
    folder.mkdir()
    with monkeypatch.context() as patched:
        patched.setenv(SHARES, str(shares))
        patched.setattr(sys, "argv", [str(script), str(folder), "0", "", "", ""])
        for step in ("train_step", "test_step"):
            patched.setattr(Model, step, getattr(Model, step))
        runpy.run_path(str(script))
    return folder


def job_folder(script: Path, hosts: str, name: str = "job") -> Path:
    folder = script.with_name(name)
    (folder / "rows").mkdir(parents=True)
    (folder / "slots").write_text(hosts.replace(" ", "\n"))
    return folder


def assert_same_results(found: Path, expected: Path, sizes: list[int]) -> None:
    """Curves, tables and weights; `sizes`: how many ranks ended each epoch."""
    assert not any((found / "rows").iterdir())  # the killed rank has left no file
    mine, others = curves(found), curves(expected)
    assert [(epoch["epoch"], epoch["size"]) for epoch in mine] == list(enumerate(sizes))
    for epoch, other in zip(mine, others, strict=True):
        assert epoch.keys() >= {"loss", "auc", "val_loss", "val_auc"}
        for name in epoch.keys() - {"size"}:
            assert epoch[name] == pytest.approx(other[name], rel=1e-5), name
    assert_same(state(found), state(expected))


def run_elastic(script: Path, ranks: int, depth: int = 0) -> tuple[Path, list[str]]:
    """A job of which a rank is killed and then replaced; its folder, and where each of its starts begins.

    That is: epochs that are done, batches of the next one, steps.
    """
    hosts = [f"localhost:{ranks}", f"localhost:{ranks - 1}", f"localhost:{ranks + 1}"]
    folder = job_folder(script, hosts[0], f"depth {depth}")
    job = gmeta_command(
        *("launch", "--np", ranks, "--elastic", "--host-discovery-script", f"cat '{folder}/slots'", "--"),
        *(sys.executable, script, folder, depth, *hosts),
    )
    assert job.returncode == 0, job.stderr
    told = [line for line in job.stderr.splitlines() if line.startswith("gmeta: ")]
    assert told[0].startswith(f"gmeta: rank 1 of {ranks} was killed by SIGKILL")
    assert told[0].endswith(f"; the job goes on with {ranks - 1} of {ranks} from the last checkpoint")
    assert told[1].startswith(f"gmeta: there is room for {ranks} ranks in place of {ranks - 1};")
    return folder, re.findall(r"^\[0\] begins (\d+ \d+ \d+)$", job.stdout, re.MULTILINE)


@pytest.mark.shown_by(
    "core/collectives/test_elastic_ranks.py::test_a_job_goes_on_with_the_ranks_that_are_left_and_then_with_all_again"
)
def test_a_users_script_outlives_a_killed_rank_and_takes_another_in(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, begins = run_elastic(script, 3)
    assert begins == ["0 0 0", "0 12 4", "1 12 12"]  # twice from the middle of an epoch
    assert_same_results(folder, run_alone(script, 3, monkeypatch), [2, 3])


@pytest.mark.slow
def test_the_same_script_with_a_pipeline_ends_with_the_same_bits(script: Path) -> None:
    # The rank is killed while its batches wait for their steps: none is lost, and none is trained twice.
    plain, begins = run_elastic(script, 4)
    assert begins == ["0 0 0", "0 16 4", "1 8 8"]
    for depth in (1, 2):
        folder, starts = run_elastic(script, 4, depth)
        assert starts == begins
        assert curves(folder) == curves(plain)
        assert differences(state(folder), state(plain)) == []


@pytest.mark.horovod
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["horovod.runner.launch", "gmeta.core.launcher.horovodrun"])
def test_horovods_elastic_driver_runs_the_same_script(
    script: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    # A machine under three names: Horovod gives up the whole host of a rank that failed.
    hosts, three = "localhost:1 Localhost:1", "localhost:1 Localhost:1 LOCALHOST:1"
    folder = job_folder(script, hosts)
    discover = script.with_name("discover.sh")
    discover.write_text(f"#!/bin/sh\ncat {folder}/slots\n")
    discover.chmod(0o755)
    job = subprocess.run(
        [
            *(sys.executable, "-m", launcher, "-np", "2", "--min-np", "1", "--max-np", "2"),
            *("--host-discovery-script", discover, "--network-interface", "lo"),
            *(sys.executable, script, folder, "0", hosts, hosts + " ", three),
        ],
        env={**os.environ, SHARES: "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    begins = re.findall(r"begins (\d+ \d+ \d+)$", job.stdout, re.MULTILINE)
    assert begins == ["0 0 0", "0 0 0", "0 8 4", "1 0 12", "1 0 12"]
    assert_same_results(folder, run_alone(script, 2, monkeypatch), [1, 2])


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_rack()), reason=why_no_rack())
@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.horovod, id="horovod"), True])
def test_a_host_is_lost_and_another_joins(script: Path, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    # Rank 1 may be on any of the hosts; Horovod gives up the one that it was on.
    hosts = "host0:1 host1:1 host2:1"
    fewer, again = f"{hosts} ", f"{hosts} host3:1"
    if own:  # a place is free again if ranks have saved, so the script leaves it out
        fewer, again = "host0:1 host2:1", "host0:1 host2:1 host3:1"
    folder = job_folder(script, hosts)
    discover = script.with_name("discover.sh")
    discover.write_text(f"#!/bin/sh\ncat {folder}/slots\n")
    discover.chmod(0o755)
    with rack(4, gbit=1) as machines:
        numbers = ("--elastic", "--min-np", "2") if own else ("--min-np", "2", "--max-np", "3")
        elastic = (*numbers, "--host-discovery-script", str(discover))
        command = [sys.executable, str(script), str(folder), "0", hosts, fewer, again]
        ways = ranks_environment({SHARES: "3", "GMETA_LANE": "tcp"})
        first = machines.hosts[:3]
        job = start_ranks(machines, command, hosts=first, options=elastic, environment=ways, own=own)
        wait_for_ranks(machines, job, timeout=300)
    assert_same_results(folder, run_alone(script, 3, monkeypatch), [2, 3])


@pytest.mark.horovod
def test_horovods_elastic_driver_has_to_be_told_what_a_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.delenv(SHARES, raising=False)
    with pytest.raises(ConfigError, match="set GMETA_SHARES to its --max-np"):
        collectives.init()


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
