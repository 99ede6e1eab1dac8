"""A batch of tasks as the loops see it: a network's inputs, labels and masks, task by task.

A batch's rows are fetched once, no matter how many tasks read them
(`gmeta.layers.embedding.collection.CollectionLookup`). If rows adapt, a task must not see another task's
changes to a row. So each (task, row) pair that occurs in the batch gets a copy (`TaskRows`). The support
reads the copies and the inner loop changes them. The query reads the changed copy if the support has read
that row too, and the row as fetched otherwise (G-Meta, section 2.1.2). Tasks read different numbers of rows,
so all copies from one physical table lie in one flat tensor. The copies' gradients are summed over the tasks
and go back to the fetched rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.keras import refuse_keras_3
from gmeta.layers.embedding.collection import CollectionLookup, EmbeddingCollection
from gmeta.layers.embedding.feature_config import Ids, flat_ids, like_ids
from gmeta.layers.networks import TaskNetwork
from gmeta.ops.distinct import unique

TaskBatch = Mapping[str, Any]
"""An element of `gmeta.io.tasks`: flat columns of all samples, and for every task the indices of its support
and its query samples."""

Part = Literal["support", "query", "all"]
"""Which samples of a task; ``"all"`` is its support, followed by its query."""

SUPPORT_AND_QUERY: tuple[Part, Part] = ("support", "query")


class TaskView:
    """Support and query of every task in a batch, from one lookup.

    Args:
      batch: The batch.
      collection: The embeddings.
      lookup: The rows of all samples of the batch.
      names: The vectors and columns that the network takes by name; None: all vectors side by side.
      adapts_rows: Whether tasks get their own copies of the rows that they read, so that rows can adapt.

    Attributes:
      batch: The batch.
      lookup: The lookup.
      copies: The tasks' own rows, or None if rows don't adapt; see `TaskRows`.
    """

    def __init__(
        self,
        batch: TaskBatch,
        collection: EmbeddingCollection,
        lookup: CollectionLookup,
        *,
        names: Sequence[str] | None = None,
        adapts_rows: bool = False,
    ) -> None:
        self.batch, self.lookup = batch, lookup
        self._collection, self._names = collection, names
        self.copies: TaskRows | None = None
        if adapts_rows:
            parts: dict[str, Any] = {part: batch[part]["index"] for part in SUPPORT_AND_QUERY}
            self.copies = task_rows(collection, lookup, parts)
        self._samples: Any = None

    @property
    def tasks(self) -> tf.Tensor:
        """The number of tasks, () int32."""
        return tf.shape(self.batch["task"])[0]

    def row_parameters(self) -> dict[str, tf.Tensor]:
        """Return table name -> the rows that tasks adapt, (pairs, dim); empty if rows don't adapt."""
        return {} if self.copies is None else dict(zip(self._row_names, self.copies.rows, strict=True))

    def owners(self) -> dict[str, tf.Tensor]:
        """Return table name -> the tasks that its rows belong to, (pairs,)."""
        return {} if self.copies is None else dict(zip(self._row_names, self.copies.owners, strict=True))

    @property
    def _row_names(self) -> list[str]:
        return row_names(self._collection)

    def inputs(self, part: Part, weights: Mapping[str, tf.Tensor] | None = None) -> Any:
        """Compute the network's inputs, (tasks, samples, ...), or a dict of such tensors by name.

        Args:
          part: Which samples.
          weights: The tasks' adapted parameters; only the rows among them are used.
        """
        if self.copies is None:
            index = self.index(part)
            return tf.nest.map_structure(lambda values: tf.gather(values, index), self.samples())
        if part == "all":
            both = [self.inputs("support", weights), self.inputs("query", weights)]
            return tf.nest.map_structure(lambda *values: tf.concat(values, axis=1), *both)
        rows = tuple((weights or {}).get(name, own) for name, own in self.row_parameters().items())
        index = self.index(part)
        embedded = {feature.name for feature in self._collection.features}
        columns = {
            name: tf.gather(self.batch["features"][name], tf.reshape(index, [-1]))
            for name in self._names or ()
            if name not in embedded
        }
        flat = self._inputs_of(self.copies.lookup(part, rows), columns)
        return tf.nest.map_structure(lambda values: _by_task(values, index), flat)

    def samples(self) -> Any:
        """Compute the network's inputs for all samples of the batch, (samples, ...); () if rows adapt.

        Besides the adapted parameters, the tasks' losses read only these.
        """
        if self._samples is None:
            here = self._inputs_of(self.lookup, self.batch["features"]) if self.copies is None else ()
            self._samples = here
        return self._samples

    def with_samples(self, samples: Any) -> TaskView:
        """Return a view of the same batch with other tensors in place of those of `samples`."""
        other = copy.copy(self)
        other._samples = samples
        return other

    def of_tasks(self, tasks: tf.Tensor, longest: tf.Tensor) -> TaskView:
        """Return a view of some tasks of the batch; rows must not adapt.

        Args:
          tasks: (n,) positions of the tasks in the batch.
          longest: () the length to cut their support to; the rest is padding.
        """
        kept: dict[str, Any] = {
            part: {name: tf.gather(values, tasks) for name, values in self.batch[part].items()}
            for part in SUPPORT_AND_QUERY
        }
        kept["support"] = {name: values[:, :longest] for name, values in kept["support"].items()}
        kept["task"] = tf.gather(self.batch["task"], tasks)
        other = copy.copy(self)
        other.batch = {**self.batch, **kept}
        return other

    def labels(self, part: Part) -> tf.Tensor:
        """Return labels, (tasks, samples), or (tasks, samples, labels) if a sample has several."""
        return tf.gather(self.batch["label"], self.index(part))

    def index(self, part: Part) -> tf.Tensor:
        """Return the positions of the samples in the batch, (tasks, samples); for padding, any position."""
        return self._both(part, "index")

    def mask(self, part: Part) -> tf.Tensor:
        """Return the mask, (tasks, samples): 0 for padding, otherwise 1 or the sample's weight."""
        return self._both(part, "mask")

    def _both(self, part: Part, what: str) -> tf.Tensor:
        if part != "all":
            return self.batch[part][what]
        return tf.concat([self.batch["support"][what], self.batch["query"][what]], axis=1)

    def _inputs_of(self, lookup: CollectionLookup, columns: Mapping[str, Any]) -> Any:
        """Compute the inputs of samples, (samples, ...)."""
        if self._names is None:
            return self._collection.concat(lookup)
        vectors = self._collection.embed(lookup)
        return {name: vectors[name] if name in vectors else columns[name] for name in self._names}


def row_names(collection: EmbeddingCollection) -> list[str]:
    """Return the names of the collection's tables among the adapted parameters."""
    return [f"embeddings/{'+'.join(merged.tables)}" for merged in collection.merged]


def _by_task(values: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Reshape (tasks · samples, ...) to (tasks, samples, ...)."""
    shape = tf.concat([tf.shape(index), tf.shape(values)[1:]], 0)
    return tf.ensure_shape(tf.reshape(values, shape), [*index.shape, *values.shape[1:]])


# The interface that a `MetaModel` needs of its network, and functions that give it to any Keras network.


@runtime_checkable
class AdaptiveNetwork(Protocol):
    """A network that can be called with weights from outside, one set for each task."""

    def task_weights(self) -> Mapping[str, tf.Variable]:
        """Return ``"layer/weight"`` -> variable: all that a task may adapt, in forward-pass order."""

    def fast_weights(self) -> Mapping[str, tf.Variable]:
        """Return the part of `task_weights` that a task adapts by default."""

    def __call__(self, x: Any, weights: Mapping[str, tf.Tensor] | None = None, training: bool = False) -> Any:
        """Compute outputs: (tasks, samples, ...) -> (tasks, samples, outputs).

        A weight has the shape of its variable, or (tasks, ...) where each task has its own.
        """


def adaptive(network: Any) -> Any:
    """Return the network itself if it is an `AdaptiveNetwork`, otherwise a `TaskNetwork` around it.

    Raises:
      ConfigError: The network is not a Keras layer or model.
      KerasError: It is one of Keras 3.
    """
    refuse_keras_3("network", network)
    if not isinstance(network, tf.keras.layers.Layer):
        got = f"the class {network.__name__}" if isinstance(network, type) else type(network).__name__
        raise ConfigError(
            f"network must be a Keras layer or model, got {got}; derive from tf.keras.layers.Layer for code "
            "of your own"
        )
    return network if isinstance(network, AdaptiveNetwork) else TaskNetwork(network)


def given_network(network: Any) -> Any:
    """Return the network that was passed to `adaptive`."""
    return network.network if isinstance(network, TaskNetwork) else network


def inputs_by_name(network: Any, collection: EmbeddingCollection) -> list[str] | None:
    """Return the names of a network's inputs if it takes features by name, else None: vectors side by side.

    The inputs of a functional model have names. Any other network that takes a dict lists the names in its
    attribute ``takes_by_name``.

    Raises:
      ConfigError: The model has several inputs that aren't named by a dict, or an input has another width
        than the vectors of its feature.
    """
    named = getattr(network, "takes_by_name", None)
    if named is not None:
        return list(named)
    given = getattr(network, "input", None) if getattr(network, "_is_graph_network", False) else None
    features = {feature.name: feature.width for feature in collection.features}
    if isinstance(given, Mapping):
        wrong = [
            f"{name} {tensor.shape[-1]} wide, of which the collection makes {features[name]}"
            for name, tensor in given.items()
            if name in features and tensor.shape[-1] not in (None, features[name])
        ]
        if wrong:
            raise ConfigError(f"{network.name} takes {'; '.join(wrong)}: give its Input that shape")
        return list(given)
    if isinstance(given, Sequence):
        raise ConfigError(
            f"{network.name} takes its inputs in a list: make it as Model({{'feature': input, ...}}, "
            "outputs), so that each finds its vectors"
        )
    return [given.name] if given is not None and given.name in features else None


def build(network: Any, collection: EmbeddingCollection, names: Sequence[str] | None) -> None:
    """Call the network once to create its weights.

    Raises:
      ConfigError: The network doesn't take these inputs, or its outputs aren't (samples, outputs).
    """
    if names is not None:
        if isinstance(network, TaskNetwork) and not network.network.built:
            widths = {feature.name: [feature.width] for feature in collection.features}
            network({name: tf.zeros([1, 1, *widths.get(name, [])]) for name in names})
        return
    width = sum(feature.width for feature in collection.features)
    outputs = network(tf.zeros([1, 1, width]))
    if outputs.shape.rank != 3:
        raise ConfigError(
            f"{network.name}: outputs must be (samples, outputs), got {outputs.shape[1:]} for "
            f"inputs (samples, {width})"
        )


class TaskRows(NamedTuple):
    """The tasks' copies of rows.

    Attributes:
      rows: For each table the (pairs, dim) copies.
      owners: For each table (pairs,) int64, the task that each copy belongs to.
      sources: For each table (pairs,) int64, the index of the copied row among the lookup's rows.
      positions: Part -> feature -> indices into its table's copies, for samples (tasks · samples, ...).
    """

    rows: tuple[tf.Tensor, ...]
    owners: tuple[tf.Tensor, ...]
    sources: tuple[tf.Tensor, ...]
    positions: dict[str, dict[str, Ids]]

    def lookup(self, part: str, rows: tuple[tf.Tensor, ...] | None = None) -> CollectionLookup:
        """Return one part's samples as a lookup that `EmbeddingCollection.embed` accepts.

        Args:
          part: One of the parts given to `task_rows`.
          rows: Rows to use in place of the copies, such as adapted ones.
        """
        return CollectionLookup(self.rows if rows is None else rows, (), self.positions[part])


def task_rows(
    collection: EmbeddingCollection, lookup: CollectionLookup, parts: Mapping[str, tf.Tensor]
) -> TaskRows:
    """Copy a lookup's rows for the tasks that read them.

    Args:
      collection: The collection that made the lookup.
      lookup: The rows of a batch's samples.
      parts: Part -> (tasks, samples) index into the batch's samples. A padded position may point to any
        sample; it reads that sample's rows as copies of the task that it pads.

    Example:
      >>> from gmeta.layers import FeatureConfig
      >>> from gmeta.models.meta.task_view import task_rows
      >>> collection = EmbeddingCollection([FeatureConfig("item", dim=4)])
      >>> lookup = collection.lookup({"item": tf.constant([7, 8, 7], tf.int64)})
      >>> copies = task_rows(collection, lookup, {"support": tf.constant([[0, 1], [2, 2]], tf.int64)})
      >>> copies.owners[0].numpy().tolist()  # task 0 reads 7 and 8, task 1 reads 7
      [0, 0, 1]
    """
    rows, owners, sources = [], [], []
    positions: dict[str, dict[str, Ids]] = {part: {} for part in parts}
    for fetched, merged in zip(lookup.rows, collection.merged, strict=True):
        count = tf.shape(fetched, out_type=tf.int64)[0]
        pairs: list[tuple[str, str, Ids]] = []
        for part, index in parts.items():
            for feature in merged.features:
                pairs.append((part, feature.name, _pairs(lookup.positions[feature.name], index, count)))
        found = unique(tf.concat([flat_ids(each) for *_, each in pairs], axis=0))
        sizes = [tf.shape(flat_ids(each))[0] for *_, each in pairs]
        for (part, name, each), own in zip(pairs, tf.split(found.inverse, sizes), strict=True):
            positions[part][name] = like_ids(each, own)
        owners.append(found.keys // tf.maximum(count, 1))
        sources.append(found.keys % tf.maximum(count, 1))
        rows.append(tf.gather(fetched, sources[-1]))
    return TaskRows(tuple(rows), tuple(owners), tuple(sources), positions)


def _pairs(positions: Ids, index: tf.Tensor, count: tf.Tensor) -> Ids:
    """Encode the (task, row) pair of each id of the samples at ``index`` as task · count + row."""
    tasks, samples = tf.unstack(tf.shape(index))
    task = tf.repeat(tf.range(tf.cast(tasks, tf.int64)), samples)
    own = tf.gather(positions, tf.reshape(index, [-1]))
    if isinstance(own, tf.RaggedTensor):
        first = tf.gather(task * count, own.value_rowids())
        return own.with_flat_values(tf.cast(own.flat_values, tf.int64) + first)
    first = tf.reshape(task * count, tf.concat([[-1], tf.ones([tf.rank(own) - 1], tf.int32)], 0))
    return tf.cast(own, tf.int64) + first
