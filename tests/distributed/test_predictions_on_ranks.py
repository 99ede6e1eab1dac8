"""Predictions by ranks that are killed and followed by others: the bytes of one rank alone."""

import os
import signal

import pyarrow as pa
import pyarrow.dataset
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import RanksError
from gmeta.io import sequences, write_predictions
from support.grouped_data import write_folder
from support.process_ranks import run_ranks

pytestmark = pytest.mark.ranks

SIZES = [3, 1, 4, 2, 5, 1, 2, 6, 2, 3, 1, 2, 4]


def score(batch):
    length = tf.cast(batch["history"]["item"].row_lengths(), tf.float32)
    return {"length": length, "items": batch["history"]["item"]}


def files(out):
    return {path.name: path.read_bytes() for path in out.glob("[!.]*")}


def table(out):
    return pa.dataset.dataset(sorted(map(str, out.glob("*.arrow"))), format="arrow").to_table()


def work(path, out, killer, left, in_step, stop=signal.SIGKILL):
    """Predict on a rank; rank `killer` gets a signal after some batches."""

    class Sums(tf.keras.Model):
        def call(self, batch, training=None):
            length = tf.cast(batch["history"]["item"].row_lengths(), tf.float32)
            # All ranks must call the model together, as one that looks rows up in divided tables.
            others = collectives.allreduce_sum([tf.ones([])], name="together")[0]
            return length + 0 * others

    calls = [0]

    def counted(batch):
        calls[0] += 1
        if collectives.world().rank == killer and calls[0] > left:
            os.kill(os.getpid(), stop)
        return score(batch)

    def read(**start):
        return sequences(path, history=["item", "genre"], sequences_per_batch=2, **start)

    given = {"reader": read, "columns": {"user": "task"}, "groups_per_part": 3}
    return write_predictions(Sums() if in_step else counted, path, out, **given).rows


def test_ranks_that_are_killed_are_followed_by_others(tmp_path):
    prepared, out = write_folder(tmp_path, SIZES[:6], SIZES[6:]), tmp_path / "out"
    work(prepared, tmp_path / "alone", None, 0, False)
    with pytest.raises(KeyboardInterrupt):  # one rank, by Ctrl-C
        work(prepared, out, 0, 3, False, stop=signal.SIGINT)
    assert sorted(files(out)) == ["_plan.json", "part-00000.arrow"]
    with pytest.raises(RanksError):
        run_ranks(work, 3, prepared, out, 1, 0, False, grace=20.0)
    assert "_manifest.json" not in files(out)
    assert run_ranks(work, 2, prepared, out, None, 0, False) == [len(SIZES)] * 2
    assert files(out) == files(tmp_path / "alone")


@pytest.mark.shown_by("test_ranks_that_are_killed_are_followed_by_others")
def test_a_model_that_all_ranks_call_together_predicts_every_row(tmp_path):
    prepared = write_folder(tmp_path, SIZES[:6], SIZES[6:])
    assert run_ranks(work, 2, prepared, tmp_path / "step", None, 0, True) == [len(SIZES)] * 2
    found = table(tmp_path / "step").to_pydict()
    assert found["user"] == list(range(len(SIZES)))
    assert found["prediction"] == [float(size) for size in SIZES]
