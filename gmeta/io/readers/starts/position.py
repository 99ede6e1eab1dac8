"""The epoch and step that a dataset has reached, counted outside the dataset, in variables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.data.position import Position, count_by
from gmeta.core.shares import Shares
from gmeta.io.readers.starts.epoch import EpochPlan
from gmeta.io.readers.starts.group_count import GroupCount


def count_epochs(first: int) -> tf.data.Dataset:
    """Return a dataset of one element, (epoch, 0), whose epoch grows by one at each iteration.

    tf.data's own means don't suffice. ``shuffle(reshuffle_each_iteration=True)`` and
    ``random(rerandomize_each_iteration=True)`` draw each epoch's seed from a generator, so epoch e needs the
    e epochs before it, and ``counter().flat_map`` makes one endless epoch. So a variable counts. A separate
    stage reads it: downstream, the number is an ordinary element, which a saved iterator restores instead of
    counting again.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        counter = tf.Variable(first, dtype=tf.int64, trainable=False, name="epoch")
    return tf.data.Dataset.range(1).map(
        lambda _: (counter.assign_add(1, read_value=True) - 1, tf.constant(0, tf.int64))
    )


class ReadingPosition(Position):
    """The epoch and step that a dataset has reached, as variables that a checkpoint can hold.

    Keras saves and restores a model, its optimizer and its epoch, but not how far its data has been read. A
    dataset with a position (`gmeta.io.tasks`, `gmeta.io.groups`) begins there, and counts the elements taken
    from it in the position. Make the position an attribute of the model: ``BackupAndRestore``,
    ``ShardedCheckpoint`` or, on one rank, ``tf.train.Checkpoint`` then saves and restores it with the model,
    at the end of an epoch or after any step, and training resumes with the next element.

    A new iteration also resumes with the next element, or with the next epoch once all steps of an epoch are
    taken. Use a position for one dataset only. Buffers must come before the counting, so the counting comes
    last. `tasks` ends with it. With `groups`, add it after your own transformations:
    ``position.count(groups(..., start=position).prefetch(2))``.

    With a `Balance`, a step has as many groups as cost enough, so the position counts groups too. What it
    then holds is an `EpochPlan`: any number of ranks reads on from there, each group once. A rank counts what
    it has read itself; call `gather_ranks` on all ranks before one of them saves the position for all.
    ``ShardedCheckpoint`` and ``BackupAndRestore`` do so.

    Attributes:
      epoch: () int64 variable.
      step: () int64 variable, elements taken in this epoch.
      left: (spans, 2) int64 variable, with a balance: positions of the epoch's order that were left when this
        number of ranks began to read; none if that was the whole epoch.
      cursors: (ranks,) int64 variable, with a balance: groups that each rank (`gmeta.core.shares`: share) has
        read since; -1 if another rank knows.

    Example:
      >>> model.reading = ReadingPosition()
      >>> warm = tasks("data/warm", start=model.reading)
      >>> backup = tf.keras.callbacks.BackupAndRestore("backup", save_freq=100)
      >>> model.fit(warm.repeat(), epochs=20, steps_per_epoch=250, callbacks=[backup])
    """

    def __init__(self, epoch: int = 0) -> None:
        super().__init__(name="reading_position")
        with tf.init_scope(), tf.device("CPU:0"):
            self.epoch = tf.Variable(epoch, dtype=tf.int64, trainable=False, name="epoch")
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
            none = tf.zeros([0, 2], tf.int64)
            self.left = tf.Variable(none, trainable=False, name="left", shape=(None, 2))
            self.cursors = tf.Variable(none[:, 0], trainable=False, name="cursors", shape=(None,))
        self._groups: GroupCount | None = None

    def epochs(self, steps: int) -> tf.data.Dataset:
        """Return a dataset of one element, (epoch, step), read when an iteration begins.

        Args:
          steps: How many steps an epoch has; once they are taken, the next epoch begins.
        """
        self._groups = None

        def begin(_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            over = tf.cast(self.step >= steps, tf.int64)
            epoch = self.epoch.assign_add(over, read_value=True)
            step = self.step.assign(self.step * (1 - over), read_value=True)
            return epoch, step

        return tf.data.Dataset.range(1).map(begin)

    def count_groups(self, whole: EpochPlan, shares: Shares) -> GroupCount:
        """Count groups from now on, of epochs of this plan's data set, as a rank with these shares."""
        self._groups = GroupCount(self, whole, shares)
        return self._groups

    @property
    def counts_groups(self) -> bool:
        """Whether the position is that of a dataset with a balance."""
        return self._groups is not None

    def gather_ranks(self) -> None:
        """Tell all ranks the places of all ranks, in one collective; with steps alone they know them.

        All ranks must call this together, between two steps.

        Raises:
          ConfigError: Ranks read different epochs.
          CollectiveError: As `gmeta.core.collectives.allgather_objects`.
        """
        if self._groups is not None:
            self._groups.gather()

    def count(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return the dataset, counting the elements that are taken from it."""
        groups = self._groups

        def count(*element: Any) -> Any:
            taken = [] if groups is None else [groups.take()]
            with tf.control_dependencies(taken), tf.control_dependencies([self.step.assign_add(1)]):
                found = tf.nest.map_structure(tf.identity, element, expand_composites=True)
            return found if len(found) > 1 else found[0]

        options = tf.data.Options()
        # It would put a buffer after the counting.
        options.experimental_optimization.inject_prefetch = False
        return count_by(self, dataset.map(count).with_options(options))
