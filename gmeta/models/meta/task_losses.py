"""Losses and metrics of samples that are grouped into tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection
from gmeta.meta import InnerLoop
from gmeta.metrics.ranking import TaskMetric
from gmeta.models.meta.task_view import row_names


class SampleLoss:
    """A Keras loss that isn't reduced over samples.

    Args:
      loss: A Keras loss, its name, or a function.

    Raises:
      ConfigError: The loss is none of these.
    """

    def __init__(self, loss: Any) -> None:
        found = tf.keras.losses.get(loss)
        self._call: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
        if isinstance(found, tf.keras.losses.Loss):
            self._call = found.call
        elif callable(found):
            self._call = found
        else:
            raise ConfigError(f"loss must be a Keras loss, its name or a function, got {loss!r}")
        kind = found if hasattr(found, "__module__") and not isinstance(found, tf.keras.losses.Loss) else None
        self._name = getattr(kind or type(found), "__name__", "loss")
        # Keras' own losses take one output for each label, unless labels are class numbers.
        of_keras = getattr(kind or type(found), "__module__", "").startswith(tf.keras.losses.Loss.__module__)
        self._pairs = of_keras and "sparse" not in self._name.lower()

    def __call__(self, labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Compute losses, (tasks, samples); several outputs are averaged.

        Args:
          labels: (tasks, samples), or (tasks, samples, outputs).
          outputs: (tasks, samples, outputs).

        Raises:
          ConfigError: TensorFlow would repeat labels to match the outputs, or outputs to match the labels; or
            the loss is one number for all samples, which would make tasks depend on each other.
        """
        labels = like_outputs(labels)
        given, made = labels.shape[-1], outputs.shape[-1]
        if self._pairs and None not in (given, made) and given != made:
            raise ConfigError(
                f"labels have {given} value{'s' * (given > 1)} a sample and the network has {made} "
                f"output{'s' * (made > 1)}: {self._name} takes one for each. Read as many labels, "
                "gmeta.io.tasks(label=[...]), or change the network's last layer"
            )
        losses = self._call(labels, outputs)
        if losses.shape.rank not in (None, 2):
            raise ConfigError(
                f"the loss {self._name} must give a value for each sample, (tasks, samples), and gives the "
                f"shape {losses.shape}: a mean in it must be over outputs alone, tf.reduce_mean(..., axis=-1)"
            )
        return losses


def like_outputs(labels: tf.Tensor) -> tf.Tensor:
    """Return labels as (tasks, samples, outputs)."""
    return labels if labels.shape.rank == 3 else labels[..., tf.newaxis]


def without_single_output(outputs: tf.Tensor) -> tf.Tensor:
    """Return (tasks, samples) if there is one output, otherwise the outputs unchanged."""
    return tf.squeeze(outputs, axis=-1) if outputs.shape[-1] == 1 else outputs


class TaskMetrics:
    """The metrics that see whole tasks."""

    def __init__(self, metrics: list[TaskMetric]) -> None:
        self.metrics = metrics

    @classmethod
    def among(cls, metrics: Any) -> tuple[TaskMetrics, Any]:
        """Split the metrics passed to `compile` into task metrics and the others, which go to Keras."""
        if isinstance(metrics, TaskMetric):
            return cls([metrics]), None
        if not isinstance(metrics, list | tuple):
            return cls([]), metrics
        own = [metric for metric in metrics if isinstance(metric, TaskMetric)]
        return cls(own), [metric for metric in metrics if not isinstance(metric, TaskMetric)]

    def update(self, labels: tf.Tensor, outputs: tf.Tensor, mask: tf.Tensor) -> None:
        """Update the metrics with a batch of tasks."""
        for metric in self.metrics:
            metric.update_state(labels, without_single_output(outputs), mask)


# Inner learning rates that the outer loop learns.


class InnerRates(tf.keras.layers.Layer):
    """Inner rates of layers, or of each adapted number (Meta-SGD, Li et al., 2017, section 3).

    The rates start at the inner loop's rate and may take any value, negative ones too. All rows of a table
    share one rate, or one rate for each column; a row that was never seen has the same rates.

    Args:
      inner: The inner loop.
      weights: The weights of the network that adapt, by name.
      collection: The collection with the tables, used if rows adapt.
    """

    def __init__(
        self, inner: InnerLoop, weights: Mapping[str, tf.Variable], collection: EmbeddingCollection
    ) -> None:
        super().__init__(name="inner_rates")
        kind = inner.learn_learning_rate
        self._learned = kind is not None
        start = tf.keras.initializers.Constant(inner.learning_rate)
        self._rates: dict[str, tf.Variable] = {}
        self._rate_of: dict[str, str] = {}
        if kind is None:
            return
        shapes = {name: list(variable.shape) for name, variable in weights.items()}
        if inner.adapts_embeddings:
            of_tables = zip(row_names(collection), collection.merged, strict=True)
            shapes |= {name: [merged.dim] for name, merged in of_tables}
        for name, shape in shapes.items():
            key = name if kind == "parameter" or name not in weights else name.rpartition("/")[0]
            self._rate_of[name] = key
            if key not in self._rates:
                self._rates[key] = self.add_weight(
                    name=_exportable(f"rate/{key}"),
                    shape=shape if kind == "parameter" else [],
                    initializer=start,
                )

    def values(self) -> dict[str, tf.Tensor] | None:
        """Return the name of each adapted weight or table -> its rate; None if no rate is learned."""
        if not self._learned:
            return None
        return {name: tf.convert_to_tensor(self._rates[key]) for name, key in self._rate_of.items()}


def _exportable(name: str) -> str:
    """Return a name that a SavedModel can hold, such as ``user.item`` for the table ``user+item``."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", ".", name)


# Checks of the parts, settings and batches that a `TaskLearner` gets.

_PARTS = ("features", "label", "task", "support", "query")


def check_collection(collection: Any) -> None:
    """Refuse a collection that isn't an `EmbeddingCollection`.

    Raises:
      ConfigError: It is something else, such as a list of features.
    """
    if not isinstance(collection, EmbeddingCollection):
        raise ConfigError(
            f"collection must be a gmeta.layers.EmbeddingCollection, got {type(collection).__name__}; "
            "make one from features: EmbeddingCollection([FeatureConfig(...), ...])"
        )


def check_inner(inner: Any) -> None:
    """Refuse an inner loop that isn't an `InnerLoop`.

    Raises:
      ConfigError: It is something else, such as the name of an algorithm.
    """
    if not isinstance(inner, meta.InnerLoop):
        raise ConfigError(
            f"inner must be a gmeta.meta.InnerLoop, such as InnerLoop('maml', steps=1), got {inner!r}"
        )


def check_compiled(learner: Any) -> None:
    """Refuse a learner that has no loss yet.

    Raises:
      ConfigError: The learner wasn't compiled.
    """
    if learner.loss is None:
        raise ConfigError(f"{learner.name}: compile the model first; the inner steps need its loss")


def columns_beside(learner: Any) -> list[str]:
    """List the columns that a learner's network takes by name and its collection doesn't embed."""
    embedded = {feature.name for feature in learner.collection.features}
    return [name for name in learner.input_names or () if name not in embedded]


def task_batch(batch: Any, columns: Iterable[str] = ()) -> Any:
    """Return the batch unchanged if it is a batch of tasks.

    Args:
      batch: The batch.
      columns: The columns that the network takes without embedding.

    Raises:
      ConfigError: It is a batch of samples, or of groups that aren't split into support and query; or it
        lacks a column.
    """
    missing = [part for part in _PARTS if part not in batch] if isinstance(batch, Mapping) else list(_PARTS)
    if not missing:
        lacking = [name for name in columns if name not in batch["features"]]
        if lacking:
            raise ConfigError(
                f"the network takes {', '.join(lacking)} by name, which is no feature of the collection and "
                f"no column of the batch; it has {', '.join(batch['features'])}. Read it with "
                "gmeta.io.tasks(features=[...]), or embed it"
            )
        return batch
    found = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise ConfigError(
        f"a MetaModel learns from and measures batches of tasks, as gmeta.io.tasks gives them: dicts of "
        f"{', '.join(_PARTS)}; got {found}. Samples of one task go to model.adapt and model.predict"
    )
