"""Keras' loops over batches of tasks: one batch at a time, and with weights of classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tf_keras.src.utils import tf_utils

from gmeta.core.errors import ConfigError
from gmeta.models.training.ranks.loops import RunsOnRanks


class LoopsOverTasks(RunsOnRanks):
    r"""Stands before `tf.keras.Model` in `gmeta.models.MetaModel`.

    Keras' own methods of one batch take all parts of it for samples, as many each; a batch of tasks has
    samples and tasks. ``class_weight`` goes into the masks of support and query, so that the inner and the
    outer loss are weighted means: :math:`\sum_i w_i l_i / \sum_i w_i`. A class of weight 0 is left out, of
    metrics too.
    """

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        reset_metrics: bool = True,
        return_dict: bool = False,
    ) -> Any:
        """As `tf.keras.Model.train_on_batch`, for a batch of tasks, in which labels are.

        Raises:
          ConfigError: Labels or weights of samples are given beside it.
          CollectiveError: Another rank has ended.
          NotFiniteError: The loss, or a rank's gradient, isn't finite.
        """
        _refuse_beside(y=y, sample_weight=sample_weight)
        batch = x if class_weight is None else weigh(self.tasks_of(x), class_weight)  # type: ignore[attr-defined]
        return self._on_batch("train", batch, reset_metrics, return_dict)

    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        reset_metrics: bool = True,
        return_dict: bool = False,
    ) -> Any:
        """As `tf.keras.Model.test_on_batch`, for a batch of tasks, in which labels are.

        Raises:
          ConfigError: Labels or weights of samples are given beside it.
          CollectiveError: Another rank has ended.
        """
        _refuse_beside(y=y, sample_weight=sample_weight)
        return self._on_batch("test", x, reset_metrics, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """As `tf.keras.Model.predict_on_batch`, for a batch of tasks: its query predictions."""
        return self._on_batch("predict", x)

    def _on_batch(self, doing: str, batch: Any, reset_metrics: bool = False, return_dict: bool = True) -> Any:
        model: Any = self
        if doing != "predict":
            model._assert_compile_was_called()
        model._check_call_args(f"{doing}_on_batch")
        with model.distribute_strategy.scope(), self._named_failures(f"{doing}_on_batch"):
            make: Callable[[], Callable[[Any], Any]] = getattr(model, f"make_{doing}_function")
            results = make()(iter(tf.data.Dataset.from_tensors(model.tasks_of(batch))))
        results = tf_utils.sync_to_numpy_or_python_type(results)
        if reset_metrics:
            model.reset_metrics()
        if return_dict:
            return results
        values = [results[name] for name in model.metrics_names]
        return values[0] if len(values) == 1 else values

    def _with_class_weight(self, own: dict[str, Any]) -> dict[str, Any]:
        weights = own["class_weight"]
        if weights is None:
            return own
        if not isinstance(own["x"], tf.data.Dataset):
            raise ConfigError(
                "class_weight goes with a tf.data.Dataset of task batches, as gmeta.io.tasks gives, got "
                f"{type(own['x']).__name__}"
            )
        data = own["x"].map(lambda batch: weigh(self.tasks_of(batch), weights))  # type: ignore[attr-defined]
        return {**own, "x": data, "class_weight": None}


def weigh(batch: Mapping[str, Any], class_weight: Mapping[int, float]) -> dict[str, Any]:
    """A batch of tasks whose samples count by their labels.

    Args:
      batch: The batch, with one label a sample.
      class_weight: Label -> weight, at least 0; other labels weigh 1.

    Raises:
      ConfigError: Samples have several labels, or a weight is negative or isn't finite.
    """
    label = tf.convert_to_tensor(batch["label"])
    if label.shape.rank != 1:
        raise ConfigError("class_weight goes with one label a sample; weigh several in a loss of your own")
    bad = {name: weight for name, weight in class_weight.items() if not 0 <= weight < float("inf")}
    if bad:
        raise ConfigError(f"class_weight must be numbers from 0 on, got {bad}")
    classes = tf.cast(tf.constant(list(class_weight)), label.dtype)
    weights = tf.constant(list(class_weight.values()), tf.float32)
    of_class = tf.equal(label[:, tf.newaxis], classes)
    weight = tf.where(
        tf.reduce_any(of_class, axis=1), tf.reduce_sum(tf.where(of_class, weights, 0.0), axis=1), 1.0
    )
    parts = {
        part: {**batch[part], "mask": batch[part]["mask"] * tf.gather(weight, batch[part]["index"])}
        for part in ("support", "query")
    }
    return {**batch, **parts}


def _refuse_beside(**given: Any) -> None:
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ConfigError(
            f"a batch of tasks has its labels and masks in it: leave {' and '.join(named)} out, and put "
            "weights of samples into the masks of support and query"
        )
