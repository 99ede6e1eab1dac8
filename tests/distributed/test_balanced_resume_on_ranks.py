"""Steps of equal cost under ShardedCheckpoint: stopped on two ranks, ended on three, each group once."""

import contextlib
import itertools

import pytest
import tensorflow as tf

from gmeta.checkpoint import ShardedCheckpoint
from gmeta.core.errors import ConfigError
from gmeta.io import Balance, ReadingPosition, ReadOptions, sequences
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.models import Model
from gmeta.optimizers import SGD
from gmeta.training.pipeline import Pipeline
from support.grouped_data import write_folder
from support.process_ranks import run_ranks

SIZES = [3, 1, 9, 2, 2, 7, 1, 1, 4, 12, 5, 2, 3, 3, 8, 1, 2, 6, 4, 1]
BY_COST, BY_NUMBER = {"balance": Balance(9.0)}, {"sequences_per_batch": 3}


class Scores(Model):
    def __init__(self):
        super().__init__()
        self.table = EmbeddingCollection([FeatureConfig("user", dim=2)], optimizer=SGD(0.01))
        self.mlp, self.reading = MLP({"out": 1}), ReadingPosition()

    def call(self, x, training=None):
        return self.mlp(self.table(x)["user"], training=training)


def train(path, folder, stop=None, epochs=2, pipeline=None, reads=BY_COST):
    """Train on a rank; return the users of each step that is in the weights at the end, by epoch."""
    taken, steps = [], []

    class Notes(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            steps.append([])
            taken.clear()  # `fit` has looked whether anything is left

        def on_train_batch_end(self, batch, logs=None):
            users, taken[:] = list(itertools.chain(*taken)), []
            if stop is not None and len(steps[-1]) == stop:
                raise KeyboardInterrupt  # the step is trained, and no checkpoint holds it
            steps[-1].append(users)

    def note(users):
        taken.append(users.tolist())
        return users

    def sample(batch):
        users = tf.ensure_shape(tf.numpy_function(note, [batch["task"]], tf.int64), [None])
        return {"user": users}, tf.cast(users, tf.float32)[:, None]

    model = Scores()
    # Without a pipeline eagerly, as so few steps take less time than to trace one.
    given = {"run_eagerly": True} if pipeline is None else {"pipeline": pipeline}
    model.compile(tf.keras.optimizers.SGD(0.01), "mse", **given)
    data = sequences(path, history=["item"], start=model.reading, options=ReadOptions(seed=5), **reads)
    checkpoints = ShardedCheckpoint(folder, every=1)
    with contextlib.suppress(KeyboardInterrupt):
        checkpoints.fit(model, data.map(sample), epochs=epochs, callbacks=[Notes()], verbose=0)
    return steps


def users(steps):
    return sorted(itertools.chain(*steps))


# Quick: by number, and by cost test_other_ranks_go_on_where_each_rank_was.
@pytest.mark.parametrize("reads", [pytest.param(BY_COST, marks=pytest.mark.slow), BY_NUMBER], ids=str)
def test_training_goes_on_with_the_next_step(tmp_path, reads):
    path = write_folder(tmp_path, SIZES)
    alone = train(path, tmp_path / "alone", reads=reads)
    assert [users(epoch) for epoch in alone] == [list(range(len(SIZES)))] * 2
    begun = train(path, tmp_path / "ckpt", stop=3, reads=reads)
    rest = train(path, tmp_path / "ckpt", reads=reads)
    assert [[*begun[0], *rest[0]], rest[1]] == alone


@pytest.mark.parametrize("reads", [BY_COST, BY_NUMBER], ids=str)
def test_batches_that_are_read_ahead_are_refused(tmp_path, reads):
    path = write_folder(tmp_path, SIZES)
    with pytest.raises(
        ConfigError,
        match=r"ReadingPosition would count 1 batches that are read and not trained: .*depth=0",
    ):
        train(path, tmp_path / "ckpt", pipeline=Pipeline(depth=1), reads=reads)


def test_a_position_outside_of_the_model_is_refused(tmp_path):
    path, checkpoints, model = write_folder(tmp_path, SIZES), ShardedCheckpoint(tmp_path / "ckpt"), Scores()
    outside = sequences(path, history=["item"], balance=Balance(9.0), start=ReadingPosition())
    checkpoints._restored = model
    with pytest.raises(ConfigError, match="a ReadingPosition that the checkpoint doesn't hold"):
        checkpoints.rest_of_epoch(outside)


@pytest.mark.ranks
@pytest.mark.shown_by("test_training_goes_on_with_the_next_step")
def test_other_ranks_go_on_where_each_rank_was(tmp_path):
    path = write_folder(tmp_path, SIZES)
    begun = run_ranks(train, 2, path, tmp_path / "ckpt", 2)
    rest = run_ranks(train, 3, path, tmp_path / "ckpt")
    first = [step for rank in begun for step in rank[0]] + [step for rank in rest for step in rank[0]]
    assert users(first) == list(range(len(SIZES)))
    assert users(step for rank in rest for step in rank[1]) == list(range(len(SIZES)))
