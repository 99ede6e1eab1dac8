"""Copies of embedding rows, one per task, that the inner loop adapts.

A batch's rows are fetched once, no matter how many tasks read them
(`gmeta.layers.embedding.collection.CollectionLookup`). If rows adapt, a task must not see another task's
changes to a row. So each (task, row) pair that occurs in the batch gets a copy. The support reads the copies
and the inner loop changes them. The query reads the changed copy if the support has read that row too, and
the row as fetched otherwise (G-Meta, section 2.1.2). Tasks read different numbers of rows, so all copies from
one physical table lie in one flat tensor. The copies' gradients are summed over the tasks and go back to the
fetched rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tensorflow as tf

from gmeta.layers.embedding.collection import CollectionLookup, EmbeddingCollection
from gmeta.layers.embedding.feature_config import Ids, flat_ids, like_ids
from gmeta.ops.distinct import unique


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
      >>> from gmeta.layers.adaptive.row_copies import task_rows
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
