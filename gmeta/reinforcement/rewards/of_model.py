"""A reward by a trained model of what users do with items that they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.models import GRM
from gmeta.ops import jagged
from gmeta.reinforcement.rewards.checks import Batch


class ModelReward:
    """A reward that is a `GRM`'s probability of a click, a purchase, or what else it was trained for.

    The items of a group are a user's exposures, and none sees another. The histories and contexts are the
    batch's columns of the names that the model was made with. Exposures take place one unit of time after
    the last event, so that a model that sees earlier events sees it; or at the time that a column has.

    Args:
      model: The trained model. It isn't trained further.
      head: The task or product.
      item: The name of the item feature, which the model has among its targets.
      attributes: Other features of the targets -> their values for every item, (V,), by the item's id.
      time: The batch's column of the exposures' times, (users,), if not just after the last event. Only
        for a model that reads times.
      name: What messages call it.

    Raises:
      ConfigError: The model has no such head, or needs features of an exposure that nothing gives.

    Example:
      ::

        reward = ModelReward(ranker, "ctr", attributes={"category": categories})
        training = PolicyTraining(policy, reward)
    """

    def __init__(
        self,
        model: GRM,
        head: str = "ctr",
        *,
        item: str = "item",
        attributes: Mapping[str, Any] | None = None,
        time: str | None = None,
        name: str | None = None,
    ) -> None:
        self.model, self.head, self.item, self.time = model, head, item, time
        self.name = name or f"{model.name}/{head}"
        heads = [*model.heads.tasks, *model.heads.products]
        if head not in heads:
            raise ConfigError(
                f"reward {self.name}: {model.name} has the heads {', '.join(heads)}, got {head!r}"
            )
        with tf.device("CPU:0"):
            self.attributes = {name: tf.constant(of) for name, of in (attributes or {}).items()}
        needed = [each for each in model.columns.targets if each != item]
        scenario = model.columns.scenario
        if scenario is not None and scenario not in model.columns.contexts:
            needed.append(scenario)
        for what, names in (
            ("needs", [each for each in needed if each not in self.attributes]),
            ("has no use for", [each for each in self.attributes if each not in needed]),
        ):
            if names:
                raise ConfigError(
                    f"reward {self.name}: {model.name} {what} {', '.join(names)} of an exposure: attributes= "
                    f"must have {', '.join(needed) or 'nothing'}"
                )
        if item not in model.columns.targets:
            raise ConfigError(
                f"reward {self.name}: item={item!r} is not among the targets of {model.name}: "
                f"{', '.join(model.columns.targets)}"
            )
        if time is not None and model.columns.time is None:
            raise ConfigError(f"reward {self.name}: {model.name} reads no times: leave time= out")

    def __call__(self, batch: Batch, items: tf.Tensor) -> tf.Tensor:
        """Compute the probabilities of items, (users, group) ids: float32 (users, group).

        Raises:
          ConfigError: The batch lacks a column.
        """
        columns = self.model.columns
        history = {name: self._column(batch, name) for name in (*columns.history, *self._times)}
        targets = {self.item: items, **{name: tf.gather(of, items) for name, of in self.attributes.items()}}
        for name in self._times:
            then = batch[self.time] if self.time else self._last(name, history[name]) + 1
            targets[name] = tf.broadcast_to(then[:, tf.newaxis], tf.shape(items))
        logits, _ = self.model.logits(
            {
                "contexts": {name: self._column(batch, name) for name in columns.contexts},
                "history": history,
                "targets": {name: _as_ragged(column) for name, column in targets.items()},
            },
            False,
        )
        return tf.reshape(tf.sigmoid(tf.cast(logits[self.head], tf.float32)), tf.shape(items))

    def _last(self, name: str, column: Any) -> tf.Tensor:
        sequences = jagged.as_jagged(column)
        if sequences is None:
            raise ConfigError(
                f"reward {self.name}: {name!r} must be ragged, a row a user, got {type(column).__name__}"
            )
        return jagged.last(sequences)

    @property
    def _times(self) -> list[str]:
        time = self.model.columns.time
        return [] if time is None else [time]

    def _column(self, batch: Batch, name: str) -> Any:
        if name not in batch:
            raise ConfigError(
                f"reward {self.name}: the batch lacks {name!r}, which {self.model.name} reads; it has "
                f"{', '.join(map(str, batch))}"
            )
        return batch[name]


def _as_ragged(column: tf.Tensor) -> tf.RaggedTensor:
    users, group = tf.unstack(tf.shape(column, tf.int64))
    return tf.RaggedTensor.from_row_splits(
        tf.reshape(column, [-1]), group * tf.range(users + 1), validate=False
    )
