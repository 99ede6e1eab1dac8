"""MAML over GRM beside the same model without adaptation, on users who each have a taste of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from rankers import ranker

from gmeta.meta import InnerLoop
from gmeta.metrics import GAUC
from gmeta.models import MetaGRM
from gmeta.preprocess import ExposureConfig

ADAPTED = ("mixture", "heads")


def compare(
    log: ExposureConfig,
    warm: tf.data.Dataset,
    cold: tf.data.Dataset,
    *,
    epochs: int,
    steps: int,
    inner_rate: float,
    rate: float,
    tell: Callable[[dict[str, Any]], None],
    **settings: Any,
) -> None:
    """Train both on the old users; tell the GAUC of the new users' later exposures.

    Args:
      log: What the data are of.
      warm: Old users.
      cold: New users.
      epochs: Over the old ones.
      steps: Inner steps, in training and in evaluation.
      inner_rate: Of them.
      rate: Of the outer loop.
      tell: Is handed a row of results after each epoch: ``gauc_ctr`` after so many ``steps`` on the user's
        earlier exposures.
      **settings: Of `ranker`.
    """
    for kind, inner, samples in (
        ("joint", InnerLoop(steps=0, adapt=ADAPTED, learning_rate=inner_rate), "all"),
        ("maml", InnerLoop(steps=steps, adapt=ADAPTED, learning_rate=inner_rate), "query"),
    ):
        base = ranker("hstu", log, rate=rate, seed=log.seed, report=None, **settings)
        model = MetaGRM(base, inner=inner, outer_samples=samples)
        model.compile(tf.keras.optimizers.Adam(rate))
        for epoch in range(1, epochs + 1):
            begin = time.perf_counter()
            loss = model.fit(warm, verbose=0).history["loss"][0]
            seconds = round(time.perf_counter() - begin, 1)
            for taken, gauc in after_steps(model, cold, sorted({0, 1, steps})).items():
                row = {"kind": kind, "seed": log.seed, "epoch": epoch, "seconds": seconds, "loss": loss}
                tell({**row, "steps": taken, **gauc})


def after_steps(model: MetaGRM, data: tf.data.Dataset, steps: list[int]) -> dict[int, dict[str, float]]:
    """Inner steps -> GAUC of each label, of the query exposures."""
    labels = {task: number for number, task in enumerate(model.learner.labels)}
    metrics = {taken: {task: GAUC() for task in labels} for taken in steps}

    @tf.autograph.experimental.do_not_convert
    def logits(batch: Any) -> Any:
        batch = model.learner.tasks_of(batch)
        found = model.predict_after(batch, steps)
        query = batch["query"]
        of_labels = tf.gather(batch["label"], query["index"])
        return {taken: model.by_label(out) for taken, out in found.items()}, of_labels, query["mask"]

    graph = tf.function(logits, input_signature=[data.element_spec])  # of batches of any sizes
    for batch in data:
        found, of_labels, mask = graph(batch)
        for taken, by_task in metrics.items():
            for task, metric in by_task.items():
                metric.update_state(of_labels[..., labels[task]], found[taken][task], mask)
    return {
        taken: {f"gauc_{task}": float(metric.result()) for task, metric in by_task.items()}
        for taken, by_task in metrics.items()
    }
