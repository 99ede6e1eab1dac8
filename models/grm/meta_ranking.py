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
from gmeta.preprocess.synthetic.exposures import ExposureConfig

ADAPTED = ("mixture", "heads")


def compare(
    log: ExposureConfig,
    warm: tf.data.Dataset,
    validation: tf.data.Dataset,
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
      validation: New users, by whom epochs are chosen.
      cold: Other new users.
      epochs: Over the old ones.
      steps: Inner steps, in training and in evaluation.
      inner_rate: Of them; where MAML's rates start, of which it learns one a layer.
      rate: Of the outer loop.
      tell: Is handed a row of results after each epoch: ``gauc_ctr`` after so many ``steps`` on the user's
        earlier exposures.
      **settings: Of `ranker`.
    """
    plain = InnerLoop(steps=0, adapt=ADAPTED, learning_rate=inner_rate)
    adapted = InnerLoop(steps=steps, adapt=ADAPTED, learning_rate=inner_rate, learn_learning_rate="layer")
    after = sorted({0, 1, steps})
    for kind, inner, samples in (("joint", plain, "all"), ("maml", adapted, "query")):
        base = ranker("hstu", log, rate=rate, seed=log.seed, report=None, **settings)
        model = MetaGRM(base, inner=inner, outer_samples=samples)  # type: ignore[arg-type]
        model.compile(tf.keras.optimizers.Adam(rate))
        for epoch in range(1, epochs + 1):
            begin = time.perf_counter()
            loss = model.fit(warm, verbose=0).history["loss"][0]
            seconds = round(time.perf_counter() - begin, 1)
            by, found = after_steps(model, validation, after), after_steps(model, cold, after)
            for taken in after:
                row = {"kind": kind, "seed": log.seed, "epoch": epoch, "seconds": seconds, "loss": loss}
                told = {f"validation_{name}": value for name, value in by[taken].items()}
                tell({**row, "steps": taken, **told, **found[taken]})


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
