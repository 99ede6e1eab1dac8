"""Keras' loops over batches of tasks: one batch at a time, and with class weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import tensorflow as tf
from tf_keras.src.engine.training_utils import RespectCompiledTrainableState
from tf_keras.src.utils import tf_utils

from gmeta.core.errors import ConfigError
from gmeta.models.meta.learner.task_learner import TaskLearner


def run_batch(
    model: Any, doing: str, batch: Any, reset_metrics: bool = False, return_dict: bool = True
) -> Any:
    """Run Keras' train, test or predict function on one batch of tasks.

    Keras' own one-batch methods expect the same number of samples in all parts of a batch; a batch of tasks
    has samples and tasks.

    Args:
      model: A `gmeta.models.meta.task_model.TaskModel`.
      doing: ``"train"``, ``"test"`` or ``"predict"``.
      batch: The batch.
      reset_metrics: As in Keras.
      return_dict: As in Keras.
    """
    if doing != "predict":
        model._assert_compile_was_called()
    model._check_call_args(f"{doing}_on_batch")
    trains = doing == "train"
    if trains:
        model._warn_of_trainable()
    with (
        model.distribute_strategy.scope(),
        model._name_failures(f"{doing}_on_batch"),
        RespectCompiledTrainableState(model) if trains else nullcontext(),
    ):
        make: Callable[[], Callable[[Any], Any]] = getattr(model, f"make_{doing}_function")
        results = make()(iter(tf.data.Dataset.from_tensors(model.learner.tasks_of(batch))))
    results = tf_utils.sync_to_numpy_or_python_type(results)
    if reset_metrics:
        model.reset_metrics()
    if return_dict:
        return results
    values = [results[name] for name in model.metrics_names]
    return values[0] if len(values) == 1 else values


def weigh_data(learner: TaskLearner, data: Any, class_weight: Mapping[int, float]) -> tf.data.Dataset:
    r"""Weigh the samples of each batch of a data set by their labels.

    The weights multiply the masks of support and query, so that the inner and the outer loss are weighted
    means: :math:`\sum_i w_i l_i / \sum_i w_i`. Samples of a class with weight 0 are left out, also from
    metrics.

    Raises:
      ConfigError: The data aren't a data set; or as `weigh_tasks`.
    """
    if not isinstance(data, tf.data.Dataset):
        raise ConfigError(
            "class_weight goes with a tf.data.Dataset of task batches, as gmeta.io.tasks gives, got "
            f"{type(data).__name__}"
        )
    return data.map(lambda batch: weigh_tasks(learner.tasks_of(batch), class_weight))


def weigh_tasks(batch: Mapping[str, Any], class_weight: Mapping[int, float]) -> dict[str, Any]:
    """Weigh the samples of a batch of tasks by their labels.

    Args:
      batch: The batch, with one label per sample.
      class_weight: Label -> weight, at least 0; other labels have weight 1.

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


def refuse_beside(**given: Any) -> None:
    """Refuse arguments that can't accompany a batch of tasks.

    Raises:
      ConfigError: An argument isn't None.
    """
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ConfigError(
            f"a batch of tasks has its labels and masks in it: leave {' and '.join(named)} out, and put "
            "weights of samples into the masks of support and query"
        )
