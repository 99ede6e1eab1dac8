"""Training runs: resumed ones equal uninterrupted ones, and broken ones say what is wrong."""

import contextlib
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.experiment.runs.trainer import restore, train
from gmeta.testing import small_config, small_data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("small"))


class StopAfter(tf.keras.callbacks.Callback):
    """Ctrl-C in the middle of the epoch after ``epochs`` epochs."""

    def __init__(self, epochs):
        super().__init__()
        self.epochs = epochs

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) > self.epochs * self.params["steps"]:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of three epochs of MAML with seed 0, and what came of it."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(small_config(epochs=3), "maml", 0, data=data, folder=folder)


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of it, with its times."""
    return shutil.copytree(trained[0], tmp_path / "copy")


def state(model):
    """Everything that training changes, tables in the order of their keys."""
    records = model.collection.tables[0].export()
    order = np.argsort(records.keys)
    tables = [np.asarray(part)[order] for part in records[:-1]]
    return [*tables, records.step, *model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


@pytest.mark.parametrize("method", ["maml", pytest.param("joint", marks=pytest.mark.slow)])
def test_a_run_that_was_interrupted_and_resumed_equals_one_that_was_not(data, trained, tmp_path, method):
    config, (folder, whole) = small_config(epochs=3), trained
    if method != "maml":
        folder = tmp_path / "whole"
        whole = train(config, method, 0, data=data, folder=folder)
    with pytest.raises(KeyboardInterrupt):
        train(config, method, 0, data=data, folder=tmp_path / "parts", callbacks=[StopAfter(1)])
    resumed = train(config, method, 0, data=data, folder=tmp_path / "parts")
    assert (whole.epochs_before, resumed.epochs_before) == (0, 1)
    assert resumed.run.epoch == [1, 2, 3]
    np.testing.assert_allclose(resumed.run.curves["loss"], whole.run.curves["loss"], rtol=1e-5)
    models = [restore(config, method, 0, folder=each)[0] for each in (folder, tmp_path / "parts")]
    for ours, theirs in zip(*map(state, models), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


class Swallow(tf.keras.callbacks.Callback):
    """Is interrupted at the end of the first epoch, and swallows that as C++ may."""

    def on_epoch_end(self, epoch, logs=None):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_was_swallowed_ends_training_before_the_next_step(data, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(small_config(epochs=3), "maml", 1, data=data, folder=tmp_path, callbacks=[Swallow()])
    finally:
        signal.signal(signal.SIGINT, before)
    _, checkpoints = restore(small_config(epochs=3), "maml", 1, folder=tmp_path)
    assert checkpoints.run.epoch == [1]


def test_a_run_that_is_done_is_left_alone(data, folder):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = train(small_config(), "maml", 0, data=data, folder=folder)
    assert again.epochs_before == 3
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.slow
def test_seeds_differ_and_repeat(data, trained, tmp_path):
    outcomes = [
        train(small_config(epochs=1), "maml", seed, data=data, folder=tmp_path / str(seed)) for seed in (0, 1)
    ]
    losses = [outcome.run.curves["loss"][0] for outcome in (trained[1], *outcomes)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert abs(losses[0] - losses[2]) > 1e-3


def test_a_damaged_checkpoint_is_named(data, folder):
    for index in folder.glob("step-*/dense/*.index"):
        index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(
        DataError, match=r"step-0.*can't be restored.*dense\.index: damaged.*to train from the start"
    ):
        train(small_config(), "maml", 0, data=data, folder=folder)


def test_a_checkpoint_of_another_model_is_refused(folder):
    config = small_config()
    with pytest.raises(ConfigError, match=r"can't be restored: .*saved with dim 4"):
        restore(replace(config, embedding_dim=6), "maml", 0, folder=folder)
    with pytest.raises(DataError, match=r"can't be restored: .*dense weights don't fit this model"):
        restore(replace(config, hidden=(9,)), "maml", 0, folder=folder)


def test_a_folder_of_another_format_is_not_trained_over(tmp_path):
    model = tf.train.Checkpoint(weight=tf.Variable(1.0))
    tf.train.CheckpointManager(model, str(tmp_path), max_to_keep=2).save()
    with pytest.raises(
        DataError, match=r"tf\.train\.Checkpoint's, from an earlier gmeta.*to train from the start"
    ):
        restore(small_config(), "maml", 0, folder=tmp_path)


@pytest.mark.shown_by("io/readers/test_tasks.py::test_fit_reports_bad_data_in_a_line")
def test_a_bad_record_is_one_line_or_is_skipped_and_named(tmp_path):
    data = small_data(tmp_path)
    shard = next(data.glob("warm-*.tfrecord"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x55
    shard.write_bytes(content)
    config = small_config(epochs=2)
    with pytest.raises(DataError, match=rf"{shard.name} at byte \d+: ") as caught:
        train(config, "maml", 0, data=data, folder=tmp_path / "raise")
    assert "\n" not in str(caught.value)
    outcome = train(config, "maml", 0, data=data, folder=tmp_path / "skip", on_bad="skip")
    assert len(outcome.left_out) == 1
    assert f"{shard.name} at byte " in outcome.left_out[0]


@pytest.mark.shown_by(
    "checkpoint/test_sharded.py::test_a_full_disk_is_named_by_its_file_and_leaves_nothing_half_done"
)
def test_a_full_disk_is_said_in_a_line_and_the_epoch_before_stays(data, tmp_path, monkeypatch):
    config = small_config(epochs=3)
    saves = []

    def write(checkpoint, *args):
        saves.append(checkpoint)
        if len(saves) == 2:
            raise tf.errors.ResourceExhaustedError(None, None, "No space left on device\nwith a long tail")
        return original(checkpoint, *args)

    original = tf.train.Checkpoint.write
    monkeypatch.setattr(tf.train.Checkpoint, "write", write)
    message = r"epoch 2 can't be saved: .* can't be written: No space left on device; make room"
    with pytest.raises(GmetaError, match=message):
        train(config, "maml", 0, data=data, folder=tmp_path)
    assert train(config, "maml", 0, data=data, folder=tmp_path).epochs_before == 1
