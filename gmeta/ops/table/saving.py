"""How TensorFlow's checkpoints and Keras' files save and restore a table.

One process writes such a file. So on several ranks a table is saved there only if this rank has all its rows:
the tables of an `gmeta.layers.EmbeddingCollection` are divided among the ranks, and are refused. A file that
has all rows can be restored on any number of ranks; each keeps the rows that it owns.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.checkpoint.tensor_callable import Callable as LateTensor

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.logical_shards import LOGICAL_SHARDS, owned_shards
from gmeta.ops.keys.distinct import owned_by
from gmeta.ops.table.records import AdmissionState, Records

_elsewhere: ContextVar[bool] = ContextVar("tables_are_saved_elsewhere", default=False)

_DTYPES = {
    **{f"-{name}": tf.int64 for name in Records._fields},
    **{f"-admission_{name}": tf.int64 for name in AdmissionState._fields},
    "-rows": tf.float32,
    "-slots": tf.float32,
    "-admission_filter": tf.uint8,
}
"""Name of a saved tensor -> its dtype. The names are part of the file format."""

_LAYOUT, _WHOLE = "-layout", "whole"


@contextmanager
def tables_saved_elsewhere() -> Iterator[None]:
    """Exclude the tables from what ``tf.train.Checkpoint`` and Keras save or restore inside the block.

    It is for code that saves the tables itself, such as `gmeta.checkpoint.ShardedCheckpoint`. TensorFlow's
    checkpoint then has the dense weights, the optimizer's state and the object graph.

    Example:
      ::

        with tables_saved_elsewhere():
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write("dense")
    """
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def are_saved_elsewhere() -> bool:
    """Return whether the code runs inside `tables_saved_elsewhere`."""
    return _elsewhere.get()


def refuse_asynchronous(owner: str) -> NoReturn:
    """Refuse asynchronous checkpoints, which TensorFlow would write with the rows of a later step.

    Raises:
      ConfigError: Always.
    """
    raise ConfigError(
        f"{owner}: an asynchronous checkpoint would save its rows at a later step than the dense weights: "
        "save without CheckpointOptions(enable_async=True)"
    )


def refuse_part(owner: str, layout: Mapping[str, Any]) -> None:
    """Refuse a table's layout from a file that may have the rows of one rank only.

    Raises:
      ConfigError: The layout doesn't state that the file has all rows.
    """
    if not layout.get(_WHOLE, False):
        raise ConfigError(
            f"{owner}: an earlier version of gmeta saved the file, which doesn't state whether it has the "
            "rows of all ranks: if a job of one rank saved it, load it in a process of one rank and save it "
            "again"
        )


class SavedByTensorFlow:
    """The part of a `gmeta.ops.HashTable` that TensorFlow calls when it saves and restores.

    Attributes:
      divided: Whether the ranks of a group divide the table's rows among them.
    """

    divided: bool = False

    def saved_tensors(self) -> dict[str, tf.Tensor]:
        """Export what a file has of the table: name -> tensor; nothing within `tables_saved_elsewhere`.

        Raises:
          ConfigError: This rank has only a part of the rows.
        """
        table: Any = self
        if are_saved_elsewhere():
            return {}
        here = collectives.world()
        if self.divided and here.group_size > 1:
            raise ConfigError(
                f"{table._owner}: rank {here.rank} of {here.size} has only the rows that it owns, and so "
                "would the file: save with tf.keras.callbacks.BackupAndRestore or "
                "gmeta.checkpoint.ShardedCheckpoint, to which every rank adds its rows, and which any number "
                "of ranks can load"
            )
        tensors = {f"-{name}": tensor for name, tensor in table.export()._asdict().items()}
        tensors |= {f"-admission_{name}": t for name, t in table.export_admission()._asdict().items()}
        return {**tensors, _LAYOUT: self._saved_layout()}

    def _layout(self) -> dict[str, Any]:
        table: Any = self
        return {"dim": table.dim, "optimizer": table.optimizer.kind}

    def _saved_layout(self) -> tf.Tensor:
        return tf.constant(json.dumps({**self._layout(), _WHOLE: True}))

    def _serialize_to_tensors(self) -> dict[str, Any]:
        if are_saved_elsewhere() or not tf.executing_eagerly():
            return self.saved_tensors()
        # A restore calls this too, for names and types: only a save exports.
        table: Any = self
        saved, device = functools.cache(self.saved_tensors), table.resource_handle.device
        late = {
            name: LateTensor(lambda name=name: saved()[name], dtype, device)
            for name, dtype in _DTYPES.items()
        }
        return {**late, _LAYOUT: self._saved_layout()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> tf.Operation | None:
        table: Any = self
        if not restored_tensors:  # saved elsewhere
            return None
        records = Records(*(restored_tensors[f"-{name}"] for name in Records._fields))
        admission = AdmissionState(*(restored_tensors[f"-admission_{n}"] for n in AdmissionState._fields))
        if tf.executing_eagerly():
            noted = json.loads(restored_tensors[_LAYOUT].numpy())
            layout = {name: noted[name] for name in noted if name != _WHOLE}
            if layout != self._layout():
                if not table.follows:
                    raise ConfigError(
                        f"{table._owner} is {json.dumps(self._layout())}, but the checkpoint holds "
                        f"{json.dumps(layout)}: restore it into one like that"
                    )
                records = table.take_records_of(layout["optimizer"])(records)
            if self.divided and collectives.world().group_size > 1:
                refuse_part(table._owner, noted)
                records, admission = self._owned(records, admission)
        replaced = table.import_(records, replace=True)
        with tf.control_dependencies([] if replaced is None else [replaced]):
            return table.import_admission(admission)

    def _owned(self, records: Records, admission: AdmissionState) -> tuple[Records, AdmissionState]:
        """Return what this rank owns of a whole table."""
        table: Any = self
        here = collectives.world()
        own = owned_by(records.keys, here.group_rank, here.group_size)
        rows = {name: tf.boolean_mask(t, own) for name, t in records._asdict().items() if name != "step"}
        counted = owned_by(admission.keys, here.group_rank, here.group_size)
        counters, nothing = admission.filter, table.export_filter(0, 0)
        filters, width = int(nothing.count), nothing.counters.shape[1]
        if counters.shape[0] == filters * width:  # else the import refuses them
            # Each filter has the counts of some neighbouring logical shards.
            shards, first = owned_shards(here.group_rank, here.group_size), tf.range(filters) * LOGICAL_SHARDS
            covers = (first < shards.stop * filters) & (first + LOGICAL_SHARDS > shards.start * filters)
            by_filter = tf.reshape(counters, [filters, width]) * tf.cast(covers, tf.uint8)[:, tf.newaxis]
            counters = tf.reshape(by_filter, [-1])
        return Records(**rows, step=records.step), AdmissionState(
            tf.boolean_mask(admission.keys, counted),
            tf.boolean_mask(admission.counts, counted),
            counters,
        )

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """Refuse asynchronous checkpoints."""
        table: Any = self
        refuse_asynchronous(table._owner)
