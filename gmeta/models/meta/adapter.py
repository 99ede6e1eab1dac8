"""Adaptation of a trained learner to tasks, and prediction with the adapted weights.

Two graphs do this: from samples to deltas (`task_deltas`), and from deltas to predictions (`outputs_with`).
`MetaModel.adapt` and `MetaModel.predict` run them, and an exported model contains them, so a server and the
trainer compute the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, NotFiniteError, whole_number
from gmeta.core.graph import shapes_on_host
from gmeta.meta.adaptation import per_task
from gmeta.models.meta.fast_weights import FastWeights, RowDeltas, fingerprint
from gmeta.models.meta.sample_columns import SampleColumns, check_finite, label_array, length
from gmeta.models.meta.task_learner import TaskLearner
from gmeta.models.meta.task_losses import check_compiled, columns_beside, task_batch, without_single_output
from gmeta.models.meta.task_view import TaskBatch, row_names

# Checks that fast weights belong to a model's network and to its present shared weights.


def check_network(weights: Any, learner: TaskLearner) -> None:
    """Refuse weights that aren't fast weights of a model's network, or that aren't finite.

    Raises:
      ConfigError: They aren't of the network; the message says which weights differ.
      NotFiniteError: A delta is NaN or infinite.
    """
    if not isinstance(weights, FastWeights):
        raise ConfigError(f"weights must be what model.adapt gave, got {type(weights).__name__}")
    here = {name: tuple(variable.shape) for name, variable in learner.network.task_weights().items()}
    tables = zip(row_names(learner.collection), learner.collection.merged, strict=True)
    dims = {name: merged.dim for name, merged in tables}
    wrong = [f"it lacks {name}" for name in learner.adapted_weights() if name not in weights.deltas]
    for name, delta in weights.deltas.items():
        if delta.shape != here.get(name):
            wrong.append(f"{name} of shape {delta.shape}, here {here.get(name, 'no such weight')}")
    for name, rows in weights.rows.items():
        if rows.deltas.shape[1] != dims.get(name):
            wrong.append(f"{name} of width {rows.deltas.shape[1]}, here {dims.get(name, 'no such table')}")
    if wrong:
        raise ConfigError(
            f"fast weights of another network ({weights.model!r}, {weights.algorithm}): {'; '.join(wrong)}. "
            "Adapt the task again with this model"
        )
    if bad := weights.not_finite():
        raise NotFiniteError(f"fast weights: {bad} holds NaN or infinity: adapt the task again")


def check_fingerprint(weights: FastWeights, here: str) -> None:
    """Refuse deltas from shared weights with another fingerprint.

    Raises:
      ConfigError: The fingerprints differ.
    """
    if weights.fingerprint != here:
        raise ConfigError(
            f"the fast weights are deltas from other shared weights ({weights.fingerprint}, and the model's "
            f"are {here}): it was trained, or loaded, since, or its tables start otherwise. Adapt the task "
            "again; or, to add these deltas to the present weights, pass weights=fast.rebase(model)"
        )


# Graphs that are traced once for each structure of inputs, whatever the number of samples.


class TracedGraphs:
    """A cache of graphs, one for each purpose and structure of inputs.

    A loop over users passes a new number of samples in each call. A plain ``tf.function`` would be traced
    again each time, which takes a thousand times as long as a run.

    Args:
      *made_for: The objects that all graphs are traced with; see `still_for`.
    """

    def __init__(self, *made_for: object) -> None:
        self._made_for = made_for
        self._graphs: dict[Any, Any] = {}

    def still_for(self, *made_for: object) -> bool:
        """Return whether these are the same objects that the graphs were traced with."""
        return len(made_for) == len(self._made_for) and all(map(operator.is_, self._made_for, made_for))

    def run(self, purpose: tuple[Any, ...], function: Callable[[Any], Any], given: Any) -> Any:
        """Run ``function(given)`` as a graph and return NumPy values.

        Args:
          purpose: The identity of the function; equal purposes must have equal functions.
          function: A function from a nest of tensors to a nest of tensors.
          given: A nest of arrays and tensors, which may be ragged. Between calls, any dimension of ids may
            change, and any dimension of the index and mask of support or query; other numbers may change
            only in their first dimension, that of the samples.
        """
        spec = _specs(given)
        key = (*purpose, _hashable(spec))
        if key not in self._graphs:

            def trace(given: Any) -> Any:
                with shapes_on_host():
                    return function(given)

            made = tf.function(trace, input_signature=[spec], autograph=False)
            self._graphs[key] = made.get_concrete_function()
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), self._graphs[key](given))


def _specs(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return tf.nest.map_structure(_spec, given)
    side = given.keys() == {"index", "mask"}
    return {name: _spec(part, side) if side else _specs(part) for name, part in given.items()}


def _spec(value: Any, any_shape: bool = False) -> tf.TypeSpec:
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec(
            [None] * value.shape.rank, value.dtype, row_splits_dtype=value.row_splits.dtype
        )
    dtype = tf.as_dtype(value.dtype)
    flexible = value.ndim if any_shape or dtype.is_integer else min(value.ndim, 1)
    return tf.TensorSpec([None] * flexible + list(value.shape[flexible:]), dtype)


def _hashable(spec: Any) -> Any:
    if isinstance(spec, Mapping):
        return tuple((name, _hashable(part)) for name, part in sorted(spec.items()))
    return tuple(map(_hashable, spec)) if isinstance(spec, list | tuple) else spec


Samples = Mapping[str, Any]
"""Feature -> ids, and column -> numbers. Ids are (samples,), or for several ids per sample a RaggedTensor,
lists, or (samples, ids). Numbers are columns that the network takes by name, (samples,). A pandas DataFrame
works too."""


class Adapter:
    """An adapter of a learner's weights to tasks, which also predicts with them; nothing is stored.

    On several ranks a lookup is an exchange, so all ranks must call each of these methods together. Each
    rank passes its own tasks or samples, any number of them or none.

    Args:
      learner: The learner. `MetaModel.adapt` and `MetaModel.predict` call these methods with its learner.

    Example:
      ::

        adapter = Adapter(model.learner)
        fast = adapter.adapt({"item": [31, 7, 99]}, [5, 3, 4])
        adapter.predict({"item": candidates}, fast)
    """

    def __init__(self, learner: TaskLearner) -> None:
        self.learner = learner
        self._graphs = TracedGraphs()

    def adapt(self, support_x: Samples, support_y: Any, steps: int | None = None) -> FastWeights:
        """Adapt to one task; see `gmeta.models.MetaModel.adapt`."""
        return self.adapt_many([(support_x, support_y)], steps)[0]

    def adapt_many(
        self, tasks: Iterable[tuple[Samples, Any]] | TaskBatch, steps: int | None = None
    ) -> list[FastWeights]:
        """Adapt to many tasks in one graph; see `gmeta.models.MetaModel.adapt_many`."""
        learner = self.learner
        steps = learner.inner.steps_in("serving") if steps is None else whole_number("adapt: steps", steps)
        check_compiled(learner)
        batch = (
            task_batch(tasks, columns_beside(learner))
            if isinstance(tasks, Mapping)
            else _pack(tasks, _columns(learner))
        )
        batch = {name: batch[name] for name in ("features", "label", "task", "support")}
        with collectives.name_failures("adapt"):
            (weights, rows, sound), of = self.graphs().run(
                ("adapt", steps),
                lambda batch: (task_deltas(learner, batch, steps), fingerprint(learner)),
                batch,
            )
        if not sound.all():
            raise NotFiniteError(_told_of_divergence(learner.name, batch, np.flatnonzero(~sound), steps))
        about = learner.name, learner.inner.algorithm, steps, of.decode()
        return [
            FastWeights(
                *about,
                {name: each[task].copy() for name, each in weights.items()},
                {name: _rows_of(task, each) for name, each in rows.items()},
            )
            for task in range(len(batch["task"]))
        ]

    def predict(self, x: Samples, weights: FastWeights | None = None) -> Any:
        """Predict samples of one task.

        Args:
          x: The samples' features.
          weights: The result of `adapt` for the task. None: the shared weights, which adaptation starts from.

        Returns:
          (samples,), or (samples, outputs) if there are several outputs.

        Raises:
          ConfigError: The weights belong to another network, or the model was trained since they were made.
        """
        learner, columns = self.learner, _columns(self.learner)
        given: list[Any] = [columns.join([columns.samples(x, "x")]), {}, {}]
        if weights is not None:
            check_network(weights, learner)
            given[1:] = dict(weights.deltas), {name: tuple(rows) for name, rows in weights.rows.items()}
        with collectives.name_failures("predict"):
            outputs, of = self.graphs().run(
                ("predict",), lambda given: (outputs_with(learner, *given), fingerprint(learner)), given
            )
        if weights is not None:
            check_fingerprint(weights, of.decode())
        return outputs

    def predict_after(self, batch: TaskBatch, steps: Sequence[int]) -> dict[int, Any]:
        """Run `TaskLearner.predict_after` as a graph that is traced once for batches of all sizes."""
        steps = tuple(steps)
        return self.graphs().run(
            ("predict_after", *steps), lambda given: self.learner.predict_after(given, steps), batch
        )

    def graphs(self) -> TracedGraphs:
        """Return the graphs for the learner's present inner loop and loss."""
        made_for = self.learner.inner, self.learner.loss
        if not self._graphs.still_for(*made_for):
            self._graphs = TracedGraphs(*made_for)
        return self._graphs


def _columns(learner: TaskLearner) -> SampleColumns:
    """Return the columns that the learner's samples consist of."""
    collection = learner.collection
    return SampleColumns(collection.features, collection.merged, columns_beside(learner))


def _pack(tasks: Iterable[tuple[Samples, Any]], columns: SampleColumns) -> dict[str, Any]:
    """Pack support sets into a batch of tasks."""
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
        "features": columns.join(sets),
        "label": np.concatenate(labels) if labels else np.zeros(0, np.float32),
        "task": np.arange(len(sizes)),
        "support": {"index": index, "mask": real.astype(np.float32)},
    }


def _told_of_divergence(name: str, batch: TaskBatch, bad: npt.NDArray[np.int64], steps: int) -> str:
    """Describe tasks whose inner steps have diverged."""
    index, mask = (np.asarray(batch["support"][part])[bad[0]] for part in ("index", "mask"))
    labels = np.asarray(batch["label"])[index[mask > 0]]
    task = np.asarray(batch["task"])[bad[0]]
    task = task.decode() if isinstance(task, bytes) else task
    others = f" and {len(bad) - 1} more tasks" if len(bad) > 1 else ""
    of_task = f" of task {task}{others}" if len(batch["task"]) > 1 else ""
    return (
        f"{name}: the {steps} inner steps diverge on {len(labels)} samples{of_task} with labels from "
        f"{labels.min():g} to {labels.max():g}: {DIVERGED}"
    )


def _rows_of(task: int, rows: MovedRows) -> RowDeltas:
    own = rows.owners == task
    return RowDeltas(rows.keys[own], rows.deltas[own])


DIVERGED = (
    "their predictions would be infinite or NaN. Pass labels and numbers in the unit of the training data; "
    "if they are, lower the inner learning rate, or limit gradients by InnerLoop(clip_norm=...)"
)
"""What errors say of samples for which the inner steps diverge."""


class MovedRows(NamedTuple):
    """Rows of one table that tasks have moved.

    Attributes:
      keys: (rows,) int64, ascending.
      deltas: (rows, dim) float32.
      owners: (rows,) int64, the task that has moved each row.
    """

    keys: tf.Tensor
    deltas: tf.Tensor
    owners: tf.Tensor


class TaskDeltas(NamedTuple):
    """The deltas that tasks have learned.

    Attributes:
      weights: Name -> (tasks, ...) float32, the adapted weight minus the shared one.
      rows: Table -> the rows that tasks have moved.
      sound: (tasks,) bool, whether after the steps the squares of a task's deltas and of its outputs for its
        support are finite, and its loss there. If not, the steps have diverged.
    """

    weights: dict[str, tf.Tensor]
    rows: dict[str, MovedRows]
    sound: tf.Tensor


def task_deltas(learner: TaskLearner, batch: TaskBatch, steps: int) -> TaskDeltas:
    """Adapt the tasks of a batch; nothing is stored.

    Args:
      learner: The learner, with a loss.
      batch: A batch; its tasks adapt on their support sets.
      steps: Inner steps; after 0 all deltas are zero.
    """
    none = tf.zeros_like(batch["support"]["index"][:, :0])
    batch = {**batch, "query": {"index": none, "mask": tf.cast(none, tf.float32)}}
    lookup = learner.collection.lookup(batch["features"], insert=False)
    view = learner.view(batch, lookup)
    adapted = learner.adapt(view, steps=steps).parameters
    shared = learner.network.task_weights()
    weights = {}
    for name, value in adapted.items():
        if name in view.owners():
            continue
        if name in shared:
            start = tf.convert_to_tensor(shared[name])
            delta = value - start
            if value.shape.rank == start.shape.rank:  # no task has taken a step of its own
                delta = per_task({name: delta}, view.tasks)[name]
        else:
            delta = value
        weights[name] = tf.cast(delta, tf.float32)
    rows = {}
    if view.copies is not None:
        parts = zip(row_names(learner.collection), lookup.keys, view.copies.sources, strict=True)
        for name, keys, sources in parts:
            delta = adapted[name] - view.row_parameters()[name]
            moved = tf.reduce_any(tf.not_equal(delta, 0), axis=1)  # copies of padding, for example, stay
            every = MovedRows(tf.gather(keys, sources), delta, view.owners()[name])
            kept = [tf.boolean_mask(part, moved) for part in every]
            order = tf.argsort(kept[0])
            rows[name] = MovedRows(*(tf.gather(part, order) for part in kept))
    outputs = learner.task_outputs(view, "support", adapted)
    padding = view.mask("support")[..., tf.newaxis] <= 0
    squares = [_squares(tf.where(padding, tf.zeros_like(outputs), outputs)), *map(_squares, weights.values())]
    for moved in rows.values():
        of_rows = tf.reduce_sum(tf.square(moved.deltas), axis=1)
        squares.append(tf.math.unsorted_segment_sum(of_rows, moved.owners, view.tasks))
    loss = tf.cast(learner.mean_losses(view, "support", outputs), tf.float32)
    return TaskDeltas(weights, rows, tf.math.is_finite(tf.add_n([*squares, loss])))


def _squares(values: tf.Tensor) -> tf.Tensor:
    """Sum the squares of each task's numbers, (tasks,) float32."""
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32)), axis=list(range(1, values.shape.rank)))


def outputs_with(
    learner: TaskLearner,
    features: Mapping[str, Any],
    deltas: Mapping[str, tf.Tensor],
    rows: Mapping[str, tuple[tf.Tensor, tf.Tensor]],
) -> tf.Tensor:
    """Compute a task's outputs for samples, (samples,) or (samples, outputs).

    Args:
      learner: The learner.
      features: The samples, flat.
      deltas: Name -> the delta of a weight, of its shape; empty for a task without samples.
      rows: Table -> (keys, deltas) of its moved rows.
    """
    return without_single_output(query_outputs(learner, query_only(features), deltas, rows))[0]


def query_outputs(
    learner: TaskLearner,
    batch: TaskBatch,
    deltas: Mapping[str, tf.Tensor],
    rows: Mapping[str, tuple[tf.Tensor, tf.Tensor]],
) -> tf.Tensor:
    """Compute a task's outputs for its query, (1, samples, outputs).

    Args:
      learner: The learner.
      batch: A batch of the one task.
      deltas: As for `outputs_with`.
      rows: As for `outputs_with`.
    """
    lookup = learner.collection.lookup(batch["features"], insert=False)
    tables = zip(row_names(learner.collection), lookup.rows, lookup.keys, strict=True)
    moved = tuple(_move(own, keys, *rows[name]) if name in rows else own for name, own, keys in tables)
    view = learner.view(batch, lookup._replace(rows=moved))
    weights = learner.start_weights(view)
    shared = learner.network.task_weights()
    for name, delta in deltas.items():
        weights[name] = _shift(shared[name], delta) if name in shared else delta
    return learner.task_outputs(view, "query", weights)


def _shift(shared: tf.Variable, delta: tf.Tensor) -> tf.Tensor:
    return shared + tf.cast(tf.ensure_shape(delta, shared.shape), shared.dtype)


def _move(rows: tf.Tensor, keys: tf.Tensor, moved_keys: tf.Tensor, deltas: tf.Tensor) -> tf.Tensor:
    """Add deltas to those rows of a lookup whose keys have one."""
    order = tf.argsort(moved_keys)
    # No key is negative, so with -1 in front every key has a known key at or before it.
    known = tf.concat([tf.constant([-1], tf.int64), tf.gather(moved_keys, order)], axis=0)
    places = tf.searchsorted(known, keys, side="right") - 1
    found = tf.equal(tf.gather(known, places), keys)
    deltas = tf.pad(tf.gather(tf.cast(deltas, rows.dtype), order), [[1, 0], [0, 0]])
    return rows + tf.where(found[:, tf.newaxis], tf.gather(deltas, places), 0)


def tasks_in(part: str, features: Mapping[str, Any], labels: tf.Tensor, counts: tf.Tensor) -> dict[str, Any]:
    """Return samples as a batch of tasks, with all samples in one part.

    Args:
      part: "support" or "query".
      features: The samples, flat, in the order of tasks.
      labels: Their labels, (samples,) or (samples, outputs).
      counts: (tasks,) int64, the number of each task's samples.
    """
    real = tf.sequence_mask(counts)
    steps = tf.range(tf.shape(real, tf.int64)[1])
    index = tf.where(real, tf.cumsum(counts, exclusive=True)[:, tf.newaxis] + steps, 0)
    own = {"index": index, "mask": tf.cast(real, tf.float32)}
    none = {name: each[:, :0] for name, each in own.items()}
    sides = {"support": none, "query": none, part: own}
    tasks = tf.range(tf.shape(counts, tf.int64)[0])
    return {"features": dict(features), "label": labels, "task": tasks, **sides}


def query_only(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return samples as a batch of one task, with the samples as its query."""
    first = next(iter(features.values()))
    count = first.nrows(tf.int64) if isinstance(first, tf.RaggedTensor) else tf.shape(first, tf.int64)[0]
    return tasks_in("query", features, tf.zeros([count]), count[tf.newaxis])
