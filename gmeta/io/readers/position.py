"""The epoch and step that a dataset has reached, counted outside the dataset, in variables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.position import Position, int64_variable
from gmeta.core.shares import Shares
from gmeta.io.readers.epoch import UNKNOWN, EpochPlan, Epochs, Iteration, only_own, ranges

# The number of groups of an epoch that each share has read, if steps have different numbers of groups.
#
# With a `Balance`, the number of steps doesn't determine a reader's position, because steps have different
# numbers of groups. The number of groups does, and reading can continue from any group. A reader's elements
# carry that number, the cursor, but a pipeline may transform an element arbitrarily. The reader therefore
# stores the cursor in a table under the element's number, and the end of the pipeline looks it up. Elements
# keep their order, so the numbers agree.
#
# The cursors of all shares, and the ranges that they belong to, are an `EpochPlan`: any number of ranks can
# continue from it, and reads each group once. A rank counts its own groups; ranks exchange the counts before
# a checkpoint is written.


class Reached(NamedTuple):
    """A place in an epoch.

    Attributes:
      plan: The rest of the epoch when this number of shares started to read.
      cursors: Number of groups that each share has read since then, or `UNKNOWN`.
    """

    plan: EpochPlan
    cursors: tuple[int, ...]


def for_shares(reached: Reached, shares: Shares) -> Reached:
    """Return the same place for this number of shares.

    Args:
      reached: The place; empty cursors mean the beginning of ``plan``.
      shares: This rank's shares.

    Raises:
      ConfigError: The number of shares has changed, and not all cursors are known.
    """
    plan, cursors = reached
    if len(cursors) not in (0, shares.total):
        if UNKNOWN in cursors:
            raise ConfigError(
                f"ReadingPosition: {len(cursors)} ranks have read of epoch {plan.epoch}, and the places of "
                f"{cursors.count(UNKNOWN)} aren't known, so {shares.total} ranks can't resume: call "
                "gather_ranks() on all ranks before it is saved, or resume on as many ranks"
            )
        plan, cursors = plan.after(cursors), ()
    return Reached(plan, cursors or (0,) * shares.total)


def go_on(reached: Reached, whole: EpochPlan, shares: Shares) -> Reached:
    """Return where these shares start to read, and the place as their rank knows it.

    If all is read, that is the beginning of the next epoch. A rank that has read its own ranges, and doesn't
    know the others' cursors, assumes that they have ended too; a rank that knows of unread groups reads an
    empty rest.

    Args:
      reached: The place.
      whole: The plan of any whole epoch.
      shares: This rank's shares.

    Raises:
      ConfigError: A cursor that is needed isn't known.
    """
    plan, cursors = for_shares(reached, shares)
    own = slice(shares.first, shares.first + shares.count)
    if UNKNOWN in cursors[own]:
        raise ConfigError(
            f"ReadingPosition: the place of rank {shares.first + cursors[own].index(UNKNOWN)} of "
            f"{shares.total} in epoch {plan.epoch} isn't known, as another rank has saved the position: call "
            "gather_ranks() on all ranks before, or let each rank save its own"
        )
    sizes = [sum(end - begin for begin, end in lane) for lane in plan.lanes(shares.total)]
    if not any(UNKNOWN < cursor < size for cursor, size in zip(cursors, sizes, strict=True)):
        plan, cursors = replace(whole, epoch=plan.epoch + 1), (0,) * shares.total
    return Reached(plan, only_own(cursors[own], shares))


class GroupCount:
    """The cursors of a `ReadingPosition`'s elements, from the start of reading to consumption.

    Args:
      position: The position, whose variables are read and set.
      whole: The plan of any whole epoch of the data set.
      shares: The rank's shares.
    """

    def __init__(self, position: ReadingPosition, whole: EpochPlan, shares: Shares) -> None:
        self._position, self._whole, self.shares = position, whole, shares
        with tf.init_scope(), tf.device("CPU:0"):
            unknown = tf.fill([shares.count], tf.constant(UNKNOWN, tf.int64))
            self._ahead = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, unknown)

    def begin(self) -> tuple[tf.Tensor, ...]:
        """Set the variables to where the next iteration starts, and return the place.

        Returns:
          (epoch, step, lanes, begins, ends, cursors): two scalars, `ranges`, and this rank's cursors.
        """
        place = self._position
        inputs = [place.epoch, place.step, place.left, place.cursors]
        found = tf.numpy_function(self._begin, inputs, [tf.int64] * 8)
        shapes = [(), (), (None, 2), (None,), (None,), (None,), (None,), (self.shares.count,)]
        for tensor, shape in zip(found, shapes, strict=True):
            tensor.set_shape(shape)
        epoch, step, left, cursors, *spans, own = found
        set_all = [
            place.epoch.assign(epoch),
            place.step.assign(step),
            place.left.assign(left),
            place.cursors.assign(cursors),
        ]
        with tf.control_dependencies(set_all):
            return tuple(tf.identity(tensor) for tensor in (epoch, step, *spans, own))

    def _begin(self, epoch: Any, step: Any, left: Any, cursors: Any) -> list[Any]:
        try:
            plan, after = go_on(self._reached(epoch, left, cursors), self._whole, self.shares)
        except ConfigError as error:
            raise ValueError(f"gmeta: {error}\n") from error
        own = after[self.shares.first : self.shares.first + self.shares.count]
        step = step if plan.epoch == epoch else 0
        numbers = (plan.epoch, step, plan.left, after, *ranges(plan, self.shares, own).values(), own)
        return [np.asarray(value, np.int64) for value in numbers]

    def _reached(self, epoch: Any, left: Any, cursors: Any) -> Reached:
        spans = tuple((int(begin), int(end)) for begin, end in left) or self._whole.left
        return Reached(replace(self._whole, epoch=int(epoch), left=spans), tuple(map(int, cursors)))

    def gather(self) -> None:
        """Send the cursors of all ranks to each rank (`ReadingPosition.gather_ranks`)."""
        place, shares = self._position, self.shares
        if shares.count == shares.total:
            return
        numbers = [variable.numpy() for variable in (place.epoch, place.left, place.cursors)]
        plan, cursors = for_shares(self._reached(*numbers), shares)
        own = list(cursors[shares.first : shares.first + shares.count])
        told = collectives.allgather_objects((plan.epoch, shares.first, own))
        epochs = [epoch for epoch, _, _ in told]
        if len(set(epochs)) > 1:
            raise ConfigError(
                f"ReadingPosition: ranks 0 to {len(told) - 1} read the epochs {epochs}: with a balance their "
                "numbers of steps differ, so leave out repeat() and steps_per_epoch, which count steps"
            )
        place.left.assign(plan.left)
        place.cursors.assign([c for _, _, own in sorted(told, key=lambda told: told[1]) for c in own])

    def note(self, step: tf.Tensor, element: dict[str, Any], cursor: tf.Tensor) -> dict[str, Any]:
        """Store the cursor of element number ``step`` until the element is consumed.

        Args:
          step: The element's number in the epoch.
          element: An element of `gmeta.io.groups` whose own cursor begins at 0.
          cursor: The cursor at the start of the iteration.

        Returns:
          The element, with the cursor counted from the range's beginning.
        """
        cursor = element["cursor"] + cursor
        with tf.control_dependencies([self._ahead.insert(_key(element["epoch"], step)[None], cursor[None])]):
            return {**element, "cursor": tf.identity(cursor)}

    def take(self) -> tf.Tensor:
        """Set the position's cursors to those of a consumed element; return the new cursors."""
        key = _key(self._position.epoch, self._position.step)[None]
        own = self._ahead.lookup(key)[0]
        with tf.control_dependencies([own]), tf.control_dependencies([self._ahead.remove(key)]):
            before, after = self.shares.first, self.shares.total - self.shares.first - self.shares.count
            every = tf.pad(own, [[before, after]], constant_values=UNKNOWN)
        return self._position.cursors.assign(every)


def _key(epoch: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    return tf.convert_to_tensor(epoch) * (1 << 32) + step


class ReadingPosition(Position):
    """The epoch and step that a dataset has reached, as variables that a checkpoint can store.

    Keras saves and restores a model, its optimizer and its epoch, but not the progress of reading. A dataset
    with a position (`gmeta.io.tasks`, `gmeta.io.groups`) starts there, and counts consumed elements in it.
    Make the position an attribute of the model: ``BackupAndRestore``, ``ShardedCheckpoint`` or, on one rank,
    ``tf.train.Checkpoint`` then saves and restores it with the model, at the end of an epoch or after any
    step, and training resumes with the next element. Or keep `state` in JSON.

    A new iteration also resumes with the next element, or with the next epoch after all steps of an epoch.
    Use a position for only one dataset. Counting must come last, after all buffers. `tasks` ends with it.
    With `groups`, add it after your own transformations: ``position.count(groups(...,
    start=position).prefetch(2))``.

    With a `Balance`, steps have different numbers of groups, so the position also counts groups. It then
    stores an `EpochPlan`, from which any number of ranks can continue, reading each group once. A rank counts
    only its own groups; call `gather_ranks` on all ranks before one of them saves the position for all.
    ``ShardedCheckpoint`` and ``BackupAndRestore`` do so.

    Attributes:
      epoch: () int64 variable.
      step: () int64 variable, elements consumed in this epoch.
      left: (spans, 2) int64 variable, with a balance: unread positions of the epoch's order when this number
        of ranks started to read; empty for the whole epoch.
      cursors: (ranks,) int64 variable, with a balance: groups that each rank (`gmeta.core.shares`: share) has
        read since then; -1 if only another rank knows it.

    Example:
      >>> model.reading = ReadingPosition()
      >>> warm = tasks("data/warm", start=model.reading)
      >>> backup = tf.keras.callbacks.BackupAndRestore("backup", save_freq=100)
      >>> model.fit(warm.repeat(), epochs=20, steps_per_epoch=250, callbacks=[backup])
    """

    _in_state: ClassVar[tuple[str, ...]] = ("epoch", "step", "left", "cursors")
    _least: ClassVar[int] = UNKNOWN

    def __init__(self, epoch: int = 0) -> None:
        super().__init__(name="reading_position")
        self.epoch, self.step = int64_variable("epoch", epoch), int64_variable("step", 0)
        self.left = int64_variable("left", np.zeros([0, 2], np.int64), (None, 2))
        self.cursors = int64_variable("cursors", np.zeros([0], np.int64), (None,))
        self._groups: GroupCount | None = None

    def elements(self, epochs: Epochs) -> tf.data.Dataset:
        """Read from the position on; after the end of an epoch, the next one starts."""
        self._groups = None
        if epochs.groups_per_step is None:
            return self._elements_by_groups(epochs)
        every = epochs.iteration(epochs.whole)

        def begin(_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            over = tf.cast(self.step >= every.steps, tf.int64)
            epoch = self.epoch.assign_add(over, read_value=True)
            step = self.step.assign(self.step * (1 - over), read_value=True)
            return epoch, step

        @tf.autograph.experimental.do_not_convert
        def rest_of(epoch: tf.Tensor, step: tf.Tensor) -> tf.data.Dataset:
            return epochs.read(every._replace(epoch=epoch, first_step=step))

        return tf.data.Dataset.range(1).map(begin).flat_map(rest_of)

    def _elements_by_groups(self, epochs: Epochs) -> tf.data.Dataset:
        groups = self._groups = GroupCount(self, epochs.whole, epochs.shares)
        every = epochs.iteration(epochs.whole)

        @tf.autograph.experimental.do_not_convert
        def rest_of(epoch: tf.Tensor, step: tf.Tensor, *begun: tf.Tensor) -> tf.data.Dataset:
            *spans, cursor = begun
            rest = epochs.read(Iteration(epoch, every.first_step, every.steps, *spans))
            return rest.enumerate(step).map(lambda place, element: groups.note(place, element, cursor))

        return tf.data.Dataset.range(1).map(lambda _: groups.begin()).flat_map(rest_of)

    @property
    def counts_groups(self) -> bool:
        """Whether the position belongs to a dataset with a balance."""
        return self._groups is not None

    def gather_ranks(self) -> None:
        """Send the places of all ranks to each rank, in one collective; without a balance, they are equal.

        All ranks must call this together, between two steps.

        Raises:
          ConfigError: Ranks read different epochs.
          CollectiveError: As `gmeta.core.collectives.allgather_objects`.
        """
        if self._groups is not None:
            self._groups.gather()

    def count(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return the dataset, counting the elements that are consumed."""
        groups = self._groups

        def take(*element: Any) -> tuple[Any, Any]:
            with tf.control_dependencies([] if groups is None else [groups.take()]):
                step = self.step.assign_add(1)
            return [step], element if len(element) > 1 else element[0]

        return self._count(dataset, take)
