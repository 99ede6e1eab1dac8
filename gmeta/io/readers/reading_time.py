"""How long training waits for its data: whether a run is bound by data or by compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Waiting:
    """A reading of `ReadingTime`.

    Attributes:
      waited: Seconds in which the next element was asked for and not there yet.
      worked: Seconds between having got an element and asking for the next one.
      elements: How many were asked for, the first of each epoch not counted.
    """

    waited: float = 0.0
    worked: float = 0.0
    elements: int = 0

    def __add__(self, other: Waiting) -> Waiting:
        return Waiting(self.waited + other.waited, self.worked + other.worked, self.elements + other.elements)

    @property
    def share(self) -> float:
        """Of all time the part that was spent waiting, 0 to 1."""
        return self.waited / max(self.waited + self.worked, 1e-9)

    def __str__(self) -> str:
        """One line for a report."""
        bound = "data" if self.share > 0.5 else "compute"
        advice = "; read with more threads, or from a faster disk" if bound == "data" else ""
        return (
            f"bound by {bound}: {self.share:.0%} of {self.waited + self.worked:.1f} s were spent waiting for "
            f"data, {self.waited / max(self.elements, 1) * 1e3:.2f} ms a batch{advice}"
        )


class ReadingTime:
    """Measures, at the end of a dataset, how long whoever takes its elements waits for them.

    While an element is asked for, training waits; between having got it and asking for the next one, it
    works. The clock is read on either side of the dataset, in the thread that asks. It must be the last
    transformation: a ``prefetch`` behind it would be what asks. On a GPU work is only begun in that time, and
    a step that waits for the GPU is counted with the work. The first element of an epoch isn't counted: files
    are opened for it, and functions traced.

    Example:
      >>> time = ReadingTime()
      >>> model.fit(time.of(tasks("data/warm")), epochs=5)
      >>> print(time.read())
      bound by compute: 2% of 41.3 s were spent waiting for data, 0.31 ms a batch
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._sums = tf.Variable(tf.zeros([3], tf.float64), trainable=False, name="reading_time")
            self._last = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="last_element")

    def of(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The same elements, timed."""
        clock = tf.data.Dataset.counter().map(lambda number: (number, tf.timestamp()))
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # it would be what asks
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        # Inputs of a zip are asked one after another.
        return tf.data.Dataset.zip((clock, dataset, clock)).map(self._note).with_options(options)

    def _note(self, asked: Any, element: Any, given: Any) -> Any:
        (number, begin), (_, end) = asked, given
        counted = tf.cast(number > 0, tf.float64)
        times = tf.stack([end - begin, begin - self._last, tf.constant(1.0, tf.float64)])
        with tf.control_dependencies([self._sums.assign_add(times * counted)]):
            last = self._last.assign(end)
        with tf.control_dependencies([last]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    def read(self) -> Waiting:
        """The sums since the beginning or the last `reset`."""
        waited, worked, elements = self._sums.numpy().tolist()
        return Waiting(waited, worked, int(elements))

    def reset(self) -> None:
        """Set everything to zero."""
        self._sums.assign(tf.zeros([3], tf.float64))


def from_memory(dataset: tf.data.Dataset, elements: int = 16) -> tf.data.Dataset:
    """The first elements of a dataset again and again, as many as it has: training without reading.

    What training then does in a second is the most that any reading could let it do.

    Args:
      dataset: Of known length, or endless.
      elements: How many are kept in memory, and are read once.

    Returns:
      A dataset of the same length and structure.
    """
    size = int(dataset.cardinality())
    repeated = dataset.take(elements).cache().repeat()
    if size == tf.data.UNKNOWN_CARDINALITY:
        size = sum(1 for _ in dataset)
    return repeated if size == tf.data.INFINITE_CARDINALITY else repeated.take(size)
