"""Makes tables without their own optimizer follow the Keras optimizer of their model.

If `gmeta.optimizers` has a fused form of the Keras optimizer, the tables take over its kind, hyperparameters,
rate and weight decay. They also take over its clipping. Fused optimizers are lazy: a row without a gradient
stays as it is and doesn't decay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.layers.exchange.recorded_lookups import TableGradient
from gmeta.ops import HashTable
from gmeta.ops.distinct import unique
from gmeta.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, Momentum, SparseOptimizer
from gmeta.training.mean_gradients import Gradient, with_number

_DECAY = "weight_decay"


def check_rule(trainer: Any, tables: Iterable[HashTable], optimizer: Any) -> None:
    """Refuse an optimizer by which `follow` would change how another model trains the tables.

    Raises:
      ConfigError: As `HashTable.check_rule`.
    """
    for table in tables:
        if table.follows:
            table.check_rule(trainer, sparse_form(optimizer)[0])


def follow(trainer: Any, tables: Iterable[HashTable], optimizer: Any) -> None:
    """Give the tables without their own optimizer the fused form of a Keras optimizer.

    Rows that are already trained keep their slots if the previous form had the same ones. Otherwise the slots
    are reinitialized, as a Keras optimizer's are. A warning names everything that the tables can't follow.

    Args:
      trainer: The model that trains the tables with the optimizer, or a `JointOptimizer`.
      tables: The tables.
      optimizer: The Keras optimizer.

    Raises:
      ConfigError: As `check_rule`.
    """
    tables = [table for table in tables if table.follows]
    if not tables:
        return
    check_rule(trainer, tables, optimizer)
    form, without = sparse_form(optimizer)
    lost = [table.name for table in tables if table.follow(trainer, form)]
    if lost:
        without = [*without, f"the slots of {', '.join(lost)}, which are reinitialized"]
    if without:
        warnings.warn(
            f"{trainer.name}: the tables step with {type(form).__name__} at the rate of {_name(optimizer)}, "
            f"without {'; without '.join(without)}. EmbeddingCollection(optimizer=...) gives them one of "
            "their own",
            stacklevel=3,
        )


@tf.autograph.experimental.do_not_convert
def follow_late(trainer: Any, tables: Iterable[HashTable], optimizer: Any) -> None:
    """Call `follow` for tables that don't know the trainer yet; check that the others still go by its rule.

    Args:
      trainer: As for `follow`.
      tables: The tables that it is about to train.
      optimizer: As for `follow`.

    Raises:
      ConfigError: As `check_rule`; or another model that shares a table was compiled with another rule since.
    """
    tables = [table for table in tables if table.follows]
    for table in tables:
        if table.is_trained_by(trainer):
            table.check_trainer(trainer)
    follow(trainer, [table for table in tables if not table.is_trained_by(trainer)], optimizer)


def sparse_form(optimizer: Any) -> tuple[SparseOptimizer, list[str]]:
    """Return the fused form of a Keras optimizer, and descriptions of the features that it leaves out.

    If there is no fused form, the result is Adam at the optimizer's rate.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    config, name = _settings(inner), _name(optimizer)
    make = _FORMS.get(name) if type(inner).__module__.startswith("tf_keras.") else None
    without = []
    if make is None:
        form: SparseOptimizer = Adam(None)
        without.append(f"what is {name}'s own, which has no fused form")
    else:
        form = make(config)
    if config.get("amsgrad"):
        without.append("amsgrad")
    if config.get(_DECAY) and not isinstance(form, AdamW):
        without.append(f"its {_DECAY}")
    if config.get("use_ema"):
        without.append("its moving averages (use_ema), which are of dense weights alone")
    return form, without


def _settings(optimizer: Any) -> Mapping[str, Any]:
    """Return a Keras optimizer's settings; its rate may be a schedule without a config, as Keras allows."""
    try:
        return optimizer.get_config()
    except NotImplementedError:
        return {**vars(optimizer), **getattr(optimizer, "_hyper", {})}


def _name(optimizer: Any) -> str:
    return type(getattr(optimizer, "inner_optimizer", optimizer)).__name__


def _sgd(config: Mapping[str, Any]) -> SparseOptimizer:
    momentum = float(config["momentum"])
    return Momentum(None, momentum, bool(config["nesterov"])) if momentum else SGD(None)


def _adam(config: Mapping[str, Any]) -> SparseOptimizer:
    moments: dict[str, Any] = {name: float(config[name]) for name in ("beta_1", "beta_2", "epsilon")}
    decay = config.get(_DECAY)
    return AdamW(None, **moments, weight_decay=float(decay)) if decay else Adam(None, **moments)


def _adagrad(config: Mapping[str, Any]) -> SparseOptimizer:
    return Adagrad(None, float(config["initial_accumulator_value"]), float(config["epsilon"]))


def _ftrl(config: Mapping[str, Any]) -> SparseOptimizer:
    names = (
        *("learning_rate_power", "initial_accumulator_value", "l1_regularization_strength"),
        *("l2_regularization_strength", "l2_shrinkage_regularization_strength", "beta"),
    )
    return Ftrl(None, *(float(config[name]) for name in names))


_FORMS: dict[str, Callable[[Mapping[str, Any]], SparseOptimizer]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "Adagrad": _adagrad,
    "Ftrl": _ftrl,
}


@dataclass(frozen=True)
class Clipping:
    """The gradient clipping of a Keras optimizer.

    All rows of a table that a step updates, for all features and on all ranks, count as one variable.
    Gradients to the same row are added up first.

    Args:
      value: Maximum magnitude of a number.
      norm: Maximum norm of a variable's gradient.
      global_norm: Maximum norm of all gradients together.
    """

    value: float | None
    norm: float | None
    global_norm: float | None

    @classmethod
    def of(cls, optimizer: Any) -> Clipping:
        """Return the clipping of a Keras optimizer."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        return cls(*(getattr(inner, name, None) for name in ("clipvalue", "clipnorm", "global_clipnorm")))

    def clip(
        self,
        dense: Sequence[Gradient],
        tables: Sequence[TableGradient],
        norm: Callable[[Sequence[Gradient]], tf.Tensor] | None = None,
    ) -> tuple[list[Gradient], list[TableGradient]]:
        """Clip the gradients of tables that follow the optimizer; all ranks must call this together.

        Args:
          dense: The gradients of dense variables.
          tables: The gradients of rows.
          norm: Where ranks have different dense gradients, a function that returns the global norm of all of
            them.

        Returns:
          The dense gradients and the tables' gradients. Dense gradients are clipped here only by the global
          norm, which covers both; the Keras optimizer does their other clipping itself.
        """
        mine = [each.table.follows for each in tables]
        if not any(mine) or not any((self.value, self.norm, self.global_norm)):
            return list(dense), list(tables)
        parts = [_sum_up(each) if own else each for each, own in zip(tables, mine, strict=True)]
        if self.value:
            limited = [tf.clip_by_value(each.values, -self.value, self.value) for each in parts]
            parts = _replace(parts, limited, mine)
        if not self.norm and not self.global_norm:
            return list(dense), parts
        squares = tf.stack(
            [tf.reduce_sum(tf.square(each.values)) for each, own in zip(parts, mine, strict=True) if own]
        )
        here = collectives.world()
        if here.size > 1:
            # Each group has a copy of each row, and all add up.
            (squares,) = collectives.allreduce_sum([squares / here.groups], name="step/row_norms")
        if self.norm:
            scales = iter(tf.unstack(self.norm / tf.maximum(tf.sqrt(squares), self.norm), num=sum(mine)))
            scaled = [
                e.values * next(scales) if own else e.values for e, own in zip(parts, mine, strict=True)
            ]
            return list(dense), _replace(parts, scaled, mine)
        limit = self.global_norm
        rows = tf.reduce_sum(squares)
        both = (
            tf.sqrt(tf.square(tf.cast((norm or tf.linalg.global_norm)(dense), tf.float32)) + rows)
            if norm is not None or any(gradient is not None for gradient in dense)
            else tf.sqrt(rows)
        )
        scale = limit / tf.maximum(both, limit)
        return (
            [with_number(tf.multiply, gradient, scale) for gradient in dense],
            _replace(parts, [each.values * scale for each in parts], mine),
        )


def _sum_up(part: TableGradient) -> TableGradient:
    keys, inverse = unique(part.keys, device=part.table.device)
    values = tf.math.unsorted_segment_sum(part.values, inverse, tf.shape(keys)[0])
    return TableGradient(part.table, keys, values, distinct=keys)


def _replace(
    parts: Sequence[TableGradient], values: Sequence[tf.Tensor], mine: Sequence[bool]
) -> list[TableGradient]:
    return [
        part._replace(values=value) if own else part
        for part, value, own in zip(parts, values, mine, strict=True)
    ]
