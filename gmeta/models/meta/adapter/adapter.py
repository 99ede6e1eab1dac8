"""A meta-learned model in use: it adapts to a task that it is shown, and predicts with what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from gmeta.core import collectives
from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.models.meta.adapter.deltas import MovedRows, outputs_with, task_deltas
from gmeta.models.meta.adapter.fast_weights import FastWeights, RowDeltas
from gmeta.models.meta.adapter.match import check_fingerprint, check_network
from gmeta.models.meta.adapter.origin import fingerprint
from gmeta.models.meta.adapter.sample_columns import (
    SampleColumns,
    check_finite,
    label_array,
    length,
    names_columns,
)
from gmeta.models.meta.adapter.traced_graphs import TracedGraphs
from gmeta.models.meta.learner.checks import check_compiled, columns_beside, task_batch
from gmeta.models.meta.learner.task_loops import TaskLoops
from gmeta.models.meta.learner.task_view import TaskBatch

Samples = Mapping[str, Any]
"""Feature -> ids: (samples,), or for several a sample a RaggedTensor, lists, or (samples, ids); and columns
of numbers that the network takes by name, (samples,). A pandas DataFrame is one."""


class AdaptsToTasks:
    """Stands before `tf.keras.Model` in `gmeta.models.MetaModel`.

    On several ranks, where a lookup is an exchange, all ranks call each of these methods together, with as
    many tasks or samples of their own as they have, or with none.
    """

    _graphs: TracedGraphs | None = None

    def adapt(self, support_x: Samples, support_y: Any, steps: int | None = None) -> FastWeights:
        r"""What a task learns from its support samples: :math:`\theta_t - \theta` after so many inner steps.

        The model is left as it is, and ids that it has never seen get no rows: they are read as they would
        start. A graph is traced at the first call, whatever the number of samples in later ones.

        Args:
          support_x: The samples' features. No samples are fine, and adapt nothing.
          support_y: (samples,), or (samples, labels).
          steps: None: ``inner.steps_in("serving")``.

        Raises:
          ConfigError: The model isn't compiled; columns are missing or don't go together.

        Example:
          ::

            fast = model.adapt({"item": [31, 7, 99]}, [5, 3, 4])
            model.predict({"item": candidates}, weights=fast)
        """
        return self.adapt_many([(support_x, support_y)], steps)[0]

    def adapt_many(
        self, tasks: Iterable[tuple[Samples, Any]] | TaskBatch, steps: int | None = None
    ) -> list[FastWeights]:
        """`adapt` for many tasks, in one vectorised graph: to rounding, what each gives alone.

        Args:
          tasks: Pairs of samples and labels; or an element of `gmeta.io.tasks`, whose support sets are meant.
            Memory grows with their number: give thousands in several calls.
          steps: As in `adapt`.

        Returns:
          One for each task, in their order.

        Raises:
          ConfigError: As `adapt`.
        """
        model = cast(TaskLoops, self)
        steps = model.inner.steps_in("serving") if steps is None else whole_number("adapt: steps", steps)
        check_compiled(model)
        batch = (
            task_batch(tasks, columns_beside(model))
            if isinstance(tasks, Mapping)
            else _pack(tasks, _columns(model))
        )
        batch = {name: batch[name] for name in ("features", "label", "task", "support")}
        with collectives.named_failures("adapt"):
            (weights, rows), of = self.graphs().run(
                ("adapt", steps), lambda batch: (task_deltas(model, batch, steps), fingerprint(model)), batch
            )
        about = model.name, model.inner.algorithm, steps, of.decode()
        return [
            FastWeights(
                *about,
                {name: each[task].copy() for name, each in weights.items()},
                {name: _rows_of(task, each) for name, each in rows.items()},
            )
            for task in range(len(batch["task"]))
        ]

    def predict(self, x: Any, *args: Any, weights: FastWeights | None = None, **kwargs: Any) -> Any:
        """Predictions for samples, adapted or not; or for task batches, as `tf.keras.Model.predict`.

        Args:
          x: Samples of one task: a mapping of features. Or a data set of task batches, each of which is
            adapted on its support samples and predicts its query samples.
          *args: As in Keras, for task batches.
          weights: What `adapt` gave for the task. None: the shared weights, which adaptation starts from.
          **kwargs: As in Keras, for task batches.

        Returns:
          (samples,), or (samples, outputs) if there are several. For task batches their query predictions.

        Raises:
          ConfigError: The weights are of another network, or of a model that was trained on since.
        """
        if not names_columns(x) or {"features", "support"} <= set(x):
            if weights is not None:
                raise ConfigError(
                    "predict: weights= goes with the samples of one task, {feature: ids}; task batches "
                    "adapt by themselves"
                )
            return super().predict(x, *args, **kwargs)  # type: ignore[misc]
        model, columns = cast(TaskLoops, self), _columns(cast(TaskLoops, self))
        given: list[Any] = [columns.joined([columns.samples(x, "x")]), {}, {}]
        if weights is not None:
            check_network(weights, model)
            given[1:] = dict(weights.deltas), {name: tuple(rows) for name, rows in weights.rows.items()}
        with collectives.named_failures("predict"):
            outputs, of = self.graphs().run(
                ("predict",), lambda given: (outputs_with(model, *given), fingerprint(model)), given
            )
        if weights is not None:
            check_fingerprint(weights, of.decode())
        return outputs

    def graphs(self) -> TracedGraphs:
        """The graphs of the present inner loop and loss."""
        model = cast(TaskLoops, self)
        made_for = model.inner, getattr(model, "_sample_loss", None)
        if self._graphs is None or not self._graphs.still_for(*made_for):
            self._graphs = TracedGraphs(*made_for)
        return self._graphs


def _columns(model: TaskLoops) -> SampleColumns:
    """What the model's samples consist of."""
    return SampleColumns(model.collection.merged, columns_beside(model))


def _pack(tasks: Iterable[tuple[Samples, Any]], columns: SampleColumns) -> dict[str, Any]:
    """Support sets as a batch of tasks."""
    sets, labels = [], []
    tasks = list(tasks)
    for number, pair in enumerate(tasks):
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise ConfigError(
                "adapt_many takes pairs of samples and labels, [(support_x, support_y), ...], or one "
                f"element of gmeta.io.tasks; task {number} is {type(pair).__name__}"
            )
        support_x, support_y = pair
        where = "" if len(tasks) == 1 else f" of task {number}"
        samples = columns.samples(support_x, f"support_x{where}")
        label = label_array(support_y, f"support_y{where}")
        count = length(next(iter(samples.values())))
        if len(label) != count:
            raise ConfigError(f"support_y{where} has {len(label)} labels for {count} samples")
        check_finite({f"support_y{where}": label, **columns.numbers(samples, f"support_x{where}")})
        sets.append(samples)
        labels.append(label)
    if len({label.shape[1:] for label in labels}) > 1:
        raise ConfigError("tasks have different numbers of labels a sample")
    sizes = np.array([len(label) for label in labels], np.int64)
    steps = np.arange(sizes.max(initial=0))
    real = steps < sizes[:, np.newaxis]
    index = np.where(real, (np.cumsum(sizes) - sizes)[:, np.newaxis] + steps, 0)
    return {
        "features": columns.joined(sets),
        "label": np.concatenate(labels) if labels else np.zeros(0, np.float32),
        "task": np.arange(len(sizes)),
        "support": {"index": index, "mask": real.astype(np.float32)},
    }


def _rows_of(task: int, rows: MovedRows) -> RowDeltas:
    own = rows.owners == task
    return RowDeltas(rows.keys[own], rows.deltas[own])
