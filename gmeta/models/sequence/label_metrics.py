"""Keras metrics of a model with several labels, measured for each label separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.metrics import AUC, TaskMetric, UserGAUC

_BINARY = {
    "accuracy": tf.keras.metrics.BinaryAccuracy,
    "acc": tf.keras.metrics.BinaryAccuracy,
    "crossentropy": tf.keras.metrics.BinaryCrossentropy,
    "ce": tf.keras.metrics.BinaryCrossentropy,
}


class LabelMetrics:
    """The ``metrics`` passed to `compile`, for each of a model's labels.

    They see each exposure's label and its predicted probability, both (exposures, 1).

    Args:
      model: The model's name.
      labels: The names of its labels.
      given: One or several metrics, which measure every label; or label -> one or several metrics. A metric
        is a Keras metric, its name, or a function of labels and probabilities.
      taken: Names that other results already use.

    Raises:
      ConfigError: A label is unknown, or a metric can't be measured here.
    """

    def __init__(self, model: str, labels: Sequence[str], given: Any, taken: Sequence[str]) -> None:
        by_label = given if isinstance(given, Mapping) else dict.fromkeys(labels, given)
        strange = [label for label in by_label if label not in labels]
        if strange:
            raise ConfigError(
                f"{model}: metrics name {', '.join(map(repr, strange))}, but the labels are "
                f"{', '.join(labels)}"
            )
        self.by_label = {
            label: [_of_label(model, metric, label) for metric in _list(of_label)]
            for label, of_label in by_label.items()
        }
        names = [*taken, *(metric.name for metric in self.metrics)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"{model}: {', '.join(twice)} would be measured twice: give such a metric another name="
            )

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The metrics of all labels."""
        return [metric for of_label in self.by_label.values() for metric in of_label]

    def update(self, labels: Mapping[str, tf.Tensor], logits: Mapping[str, tf.Tensor]) -> None:
        """Update the metrics with exposures.

        Args:
          labels: Name -> (exposures,).
          logits: Name -> (exposures,), logits of the label's probability.
        """
        for label, metrics in self.by_label.items():
            for metric in metrics:
                metric.update_state(labels[label][:, tf.newaxis], tf.sigmoid(logits[label])[:, tf.newaxis])


def _list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _of_label(model: str, given: Any, label: str) -> tf.keras.metrics.Metric:
    """Make a separate metric for the label, with the label in its name."""
    if isinstance(given, AUC | UserGAUC | TaskMetric):
        raise ConfigError(
            f"{model}: {type(given).__name__} is no metric for compile: auc_{label} and gauc_{label} are "
            "always measured in evaluate"
        )
    if isinstance(given, str) and given in _BINARY:
        found = _BINARY[given](name=given)
    else:
        found = tf.keras.metrics.get(given)
    if not isinstance(found, tf.keras.metrics.Metric):
        name = given if isinstance(given, str) else getattr(found, "__name__", type(found).__name__)
        found = tf.keras.metrics.MeanMetricWrapper(found, name=name)
    return type(found).from_config({**found.get_config(), "name": f"{found.name}_{label}"})
