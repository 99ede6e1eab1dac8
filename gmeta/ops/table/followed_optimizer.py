"""Makes a table follow the optimizer of the models that train it.

A row has one set of optimizer slots, and every update of a table follows one rule: a kind of optimizer and
its hyperparameters. The learning rate isn't part of the rule, because each update passes its own. Several
models can therefore train a table at different rates, but only by one rule. A model that would change another
model's rule is refused.
"""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.ops.table.records import Records
from gmeta.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, Momentum, RowWiseAdagrad, SparseOptimizer

_native = load_op_library("ops")

KINDS = {each.kind: each for each in (SGD, Adagrad, Adam, AdamW, Ftrl, Momentum, RowWiseAdagrad)}
"""Name of an optimizer in checkpoints -> its class."""
Rate: TypeAlias = "float | tf.Tensor | None"
"""A learning rate that a call is given; None: the optimizer's own."""


class FollowsModels:
    """The part of a `HashTable` that follows the optimizers of models.

    Attributes:
      follows: Whether the table follows them. If not, it keeps the optimizer with which it was created.
    """

    follows: bool
    name: Any
    dim: Any
    _optimizer: SparseOptimizer
    resource_handle: Any
    step: Any

    def _start_following(self, follows: bool) -> None:
        self.follows = follows
        self._is_chosen = False
        self._trainers: weakref.WeakKeyDictionary[Any, SparseOptimizer] = weakref.WeakKeyDictionary()

    @property
    def trainable(self) -> bool:
        """Whether updates change the rows: always. A layer with tables can be frozen, but not a single table.

        Raises:
          ConfigError: It is set to False.
        """
        return True

    @trainable.setter
    def trainable(self, value: bool) -> None:
        if not value:
            raise ConfigError(
                f"table {self.name!r} can't be frozen alone: give its features a separate "
                "EmbeddingCollection, and set trainable=False there before compile"
            )

    def _rate_of_step(self, given: Rate) -> tf.Tensor:
        """Return the learning rate of an update, () float32.

        Raises:
          ConfigError: Neither the call nor the optimizer has one.
        """
        rate = self._optimizer.learning_rate if given is None else given
        if rate is None:
            advice = (
                "gmeta.models.JointOptimizer(optimizer).step makes the step of a Keras optimizer in a loop "
                "of your own, for dense variables and tables together; or give this call a learning_rate, "
                f"with which the rows step by {type(self._optimizer).__name__}"
                if self.follows
                else "give this call one"
            )
            raise ConfigError(f"table {self.name!r}: its optimizer has learning_rate=None: {advice}")
        if not callable(rate) and not tf.is_tensor(rate):
            # The update reads the rate in host memory. A constant on a GPU would be copied after queued work.
            with tf.control_dependencies(None), tf.device("CPU:0"):
                return tf.cast(rate, tf.float32)
        return tf.cast(rate(self.step()) if callable(rate) else rate, tf.float32)

    def is_trained_by(self, trainer: Any) -> bool:
        """Return whether `follow` was called for a trainer."""
        return trainer in self._trainers

    def follow(self, trainer: Any, optimizer: SparseOptimizer) -> bool:
        """Update rows by the optimizer of a trainer.

        Args:
          trainer: The model that trains the table, or a `gmeta.models.JointOptimizer`.
          optimizer: The fused form of its optimizer.

        Returns:
          As `change_optimizer`.

        Raises:
          ConfigError: As `check_rule`.
        """
        self.check_rule(trainer, optimizer)
        self._trainers[trainer] = optimizer
        self._is_chosen = True
        return self.change_optimizer(optimizer)

    def check_rule(self, trainer: Any, optimizer: SparseOptimizer) -> None:
        """Refuse a new trainer whose optimizer has another rule than an existing trainer's.

        A model that already trains the table may be compiled with another rule; `check_trainer` then refuses
        the other models' training.

        Args:
          trainer: As for `follow`.
          optimizer: As for `follow`.

        Raises:
          ConfigError: The rules differ. The message names both trainers.
        """
        if not self._others(trainer, optimizer):
            return
        gc.collect()  # an unused Keras model stays alive until then
        others = self._others(trainer, optimizer)
        if others:
            raise ConfigError(
                f"{trainer.name!r} and {others[0].name!r} share table {self.name!r}, whose rows have the "
                f"slots of one optimizer: {others[0].name!r} trains them by {_show(self._optimizer)}, and "
                f"{trainer.name!r} would by {_show(optimizer)}. Give both the same optimizer, whose learning "
                "rates may differ, or give the table its own by TableConfig(optimizer=...) or "
                "EmbeddingCollection(optimizer=...)"
            )

    def check_trainer(self, trainer: Any) -> None:
        """Refuse to train if the rule has changed since `follow` was called for the trainer.

        Raises:
          ConfigError: Another trainer changed the rule. The message names it.
        """
        own = self._trainers[trainer]
        if _rule(own) == _rule(self._optimizer):
            return
        users = [each for each, by in self._trainers.items() if _rule(by) == _rule(self._optimizer)]
        by = f"{users[0].name!r}" if users else "a model that no longer exists"
        raise ConfigError(
            f"{trainer.name!r} trains table {self.name!r} by {_show(own)}, but since then {by} was compiled "
            f"with {_show(self._optimizer)} and trains the table too: compile {trainer.name!r} again, with "
            "the same optimizer, or give the table its own by TableConfig(optimizer=...) or "
            "EmbeddingCollection(optimizer=...)"
        )

    def _others(self, trainer: Any, optimizer: SparseOptimizer) -> list[Any]:
        """Return the trainers that would be trained by another rule without a check."""
        if _rule(optimizer) == _rule(self._optimizer):
            return []
        known = self.is_trained_by(trainer)
        return [
            each
            for each, by in self._trainers.items()
            if each is not trainer
            and _rule(by) == _rule(self._optimizer)
            # A Keras model is checked whenever it trains, but a user's loop only once.
            and not (known and isinstance(each, tf.keras.Model))
        ]

    def change_optimizer(self: Any, optimizer: SparseOptimizer) -> bool:
        """Change the optimizer that updates the rows, even in graphs that are already traced.

        Rows, frequencies, steps and admission state are kept. Slots are kept if both optimizers have the same
        slots; otherwise, they are reset to those of new rows. A table with rows is copied once, and its
        snapshots can no longer be restored.

        Args:
          optimizer: The new optimizer. Call this between two steps.

        Returns:
          Whether previously updated rows lost their slots.
        """
        before, self._optimizer = self._optimizer, optimizer
        if _rule(before) == _rule(optimizer):
            return False
        keeps = _slots(before, self.dim) == _slots(optimizer, self.dim)
        with tf.init_scope():
            made = self._without_rows()
            records, admission = self.export(), self.export_admission()
            if admission.filter.shape != made.export_admission().filter.shape:  # sized by a bound in bytes
                admission = admission._replace(filter=tf.zeros([0], tf.uint8))
            made.import_(records if keeps else with_fresh_slots(records, optimizer, self.dim), replace=True)
            made.import_admission(admission)
            with tf.device(self._resource_device):
                _native.gmeta_hash_table_swap(self.resource_handle, made.resource_handle)
            return not keeps and bool(before.slots) and len(records.keys) > 0 and int(records.step) > 0

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Copy the table with its rows, for `copy.deepcopy` of a layer; the copy has no trainers yet."""
        made = self._without_rows()
        made._is_chosen, made.divided = self._is_chosen, self.divided
        if self.merged_keys is not None:
            made.merged_keys = self.merged_keys
        made.import_(self.export(), replace=True)
        made.import_admission(self.export_admission())
        made.clock = self.clock
        if self.step_times is not None:
            made.set_step_times(self.step_times)
        memo[id(self)] = made
        return made

    def _without_rows(self: Any) -> Any:
        return type(self)(
            self.dim,
            self.optimizer,
            self.initializer,
            self.seed,
            self.name,
            admission=self.admission,
            eviction=self.eviction,
            precision=self.precision,
            tiers=self.tiers,
            device=self.device,
            follows=self.follows,
        )

    def take_records_of(self, kind: str) -> Callable[[Records], Records]:
        """Prepare a table that follows models to load a checkpoint of another kind of optimizer.

        If no model has set an optimizer for the table yet, the table adopts the checkpoint's kind and
        continues with its slots. Otherwise, rows are loaded without their slots, with a warning.

        Args:
          kind: The name of the optimizer in the checkpoint.

        Returns:
          A function to apply to the records before they are imported.

        Raises:
          ConfigError: gmeta has no such optimizer.
        """
        if kind not in KINDS:
            raise ConfigError(
                f"table {self.name!r}: the checkpoint's optimizer {kind!r} is unknown to this gmeta"
            )
        saved = KINDS[kind](learning_rate=None)
        if not self._is_chosen:
            self.change_optimizer(saved)
        mine = self._optimizer
        if _slots(saved, self.dim) == _slots(mine, self.dim):
            return lambda records: records
        warnings.warn(
            f"table {self.name!r} follows a Keras optimizer with {type(mine).__name__}, but was "
            f"saved with {type(saved).__name__}: its rows are loaded, its optimizer's slots reinitialized",
            stacklevel=2,
        )
        return lambda records: with_fresh_slots(records, mine, self.dim)


def with_fresh_slots(records: Records, optimizer: SparseOptimizer, dim: int) -> Records:
    """Return the records with the slots of new rows."""
    rows, floats = tf.shape(records.keys)[0], optimizer.slot_floats(dim)
    first = min(dim, floats)
    started = tf.fill([rows, first], tf.constant(optimizer.initial_slot, tf.float32))
    return records._replace(slots=tf.concat([started, tf.zeros([rows, floats - first])], axis=1))


def _rule(optimizer: SparseOptimizer) -> SparseOptimizer:
    return dataclasses.replace(optimizer, learning_rate=None)


def _show(optimizer: SparseOptimizer) -> str:
    shown = [
        f"{each.name}={getattr(optimizer, each.name)!r}"
        for each in dataclasses.fields(optimizer)
        if each.name not in ("learning_rate", "prior")
    ]
    return f"{type(optimizer).__name__}({', '.join(shown)})"


def _slots(optimizer: SparseOptimizer, dim: int) -> tuple[tuple[str, ...], int]:
    return tuple(optimizer.slots), optimizer.slot_floats(dim)
