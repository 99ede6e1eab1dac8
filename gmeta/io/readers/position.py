"""Which epoch a dataset is in, and where in it: counted outside of the dataset, by variables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def count_epochs(first: int) -> tf.data.Dataset:
    """A dataset of one element, (epoch, 0), whose epoch is one more at each iteration.

    tf.data's own ways don't serve: ``shuffle(reshuffle_each_iteration=True)`` and
    ``random(rerandomize_each_iteration=True)`` draw each epoch's seed from a generator, so epoch e can't be
    had without the e before it, and ``counter().flat_map`` makes one endless epoch. So a variable counts. It
    is read in a stage of its own: downstream, the number is an ordinary element, which a saved iterator
    restores instead of counting again.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        counter = tf.Variable(first, dtype=tf.int64, trainable=False, name="epoch")
    return tf.data.Dataset.range(1).map(
        lambda _: (counter.assign_add(1, read_value=True) - 1, tf.constant(0, tf.int64))
    )


class ReadingPosition(tf.Module):
    """The epoch and step that a dataset stands at, as variables that a checkpoint can hold.

    Keras saves and restores a model, its optimizer and its epoch, but not what its data has been read to. A
    dataset that is given a position (`gmeta.io.tasks`, `gmeta.io.groups`) begins there, and counts in it the
    elements that are taken out of it. As an attribute of the model it is saved and restored with it, by
    ``BackupAndRestore`` or ``tf.train.Checkpoint``, at the end of an epoch or after any step: training goes
    on with the element that comes next.

    Iterating again goes on too, from the element that comes next; once all steps of an epoch are taken, with
    the next epoch. Give it to one dataset. What buffers has to stand before the counting, which therefore
    comes last: `tasks` ends with it, and `groups` leaves it to be put behind your own transformations,
    ``position.count(groups(..., start=position).prefetch(2))``.

    Attributes:
      epoch: () int64 variable.
      step: () int64 variable, elements taken in this epoch.

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

    def epochs(self, steps: int) -> tf.data.Dataset:
        """A dataset of one element, (epoch, step), read when an iteration begins.

        Args:
          steps: How many an epoch has; once they are taken, the next epoch begins.
        """

        def begin(_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            over = tf.cast(self.step >= steps, tf.int64)
            epoch = self.epoch.assign_add(over, read_value=True)
            step = self.step.assign(self.step * (1 - over), read_value=True)
            return epoch, step

        return tf.data.Dataset.range(1).map(begin)

    def count(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The dataset, counting the elements that are taken out of it."""

        def taken(*element: Any) -> Any:
            with tf.control_dependencies([self.step.assign_add(1)]):
                found = tf.nest.map_structure(tf.identity, element, expand_composites=True)
            return found if len(found) > 1 else found[0]

        options = tf.data.Options()
        # It would put a buffer behind the counting.
        options.experimental_optimization.inject_prefetch = False
        return dataset.map(taken).with_options(options)
