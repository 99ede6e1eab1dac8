"""Predictions for all rows of a split, in parts that any number of ranks share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives.shared_data import empty_batch
from gmeta.core.errors import CollectiveError, ConfigError, GmetaError, whole_number
from gmeta.core.files import explain_write_errors, lock_file, sync
from gmeta.io.predictions.plan import (
    Part,
    PredictionPlan,
    Predictions,
    check_same,
    manifest_path,
    part_path,
    read_part,
    schema_of,
    write_part,
)
from gmeta.io.reader_stats import data_errors
from gmeta.io.readers.epoch import PartStart
from gmeta.io.readers.prepared_split import open_split
from gmeta.io.readers.read_options import DEFAULTS, ReadOptions, Start

# Tensors as Arrow columns: one row of the table for each entry of the first dimension.


def record_batch(columns: Mapping[str, Any]) -> pa.RecordBatch:
    """Convert tensors with equal numbers of rows to a record batch.

    Args:
      columns: Name -> a tensor (n, ...) or RaggedTensor (n, ...), eager.

    Returns:
      A record batch. Scalars become numbers, and strings become binary. Vectors, and further dimensions of a
      dense tensor, become lists of fixed size. Ragged dimensions become large lists.

    Raises:
      ConfigError: A value has no first dimension, or columns have different numbers of rows.

    Example:
      >>> record_batch({"user": tf.constant([4, 2]), "vector": tf.zeros([2, 3])}).schema
      user: int32 not null
      vector: fixed_size_list<item: float not null>[3] not null
        child 0, item: float not null
    """
    arrays = {name: _array(name, value) for name, value in columns.items()}
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            "columns of predictions must have a value for each row of the batch, but their numbers of rows "
            "are " + ", ".join(f"{name} {size}" for name, size in sizes.items())
        )
    fields = [pa.field(name, array.type, nullable=False) for name, array in arrays.items()]
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=pa.schema(fields))


def _array(name: str, value: Any) -> pa.Array:
    if isinstance(value, tf.SparseTensor):
        raise ConfigError(f"column {name!r} is a SparseTensor: make it dense or ragged")
    value = value if isinstance(value, tf.RaggedTensor) else tf.convert_to_tensor(value)
    if value.shape.rank == 0:
        raise ConfigError(f"column {name!r} is one number for the whole batch: give a value for each row")
    if not isinstance(value, tf.RaggedTensor):
        return _dense(value)
    array = _dense(value.flat_values)
    for splits in reversed(value.nested_row_splits):
        offsets = pa.array(splits.numpy().astype(np.int64))
        kind = pa.large_list(pa.field("item", array.type, nullable=False))
        array = pa.LargeListArray.from_arrays(offsets, array, type=kind)
    return array


def _dense(tensor: tf.Tensor) -> pa.Array:
    if tensor.dtype == tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    values = tensor.numpy()
    flat = values.reshape(-1)
    array = pa.array(flat.tolist(), pa.binary()) if tensor.dtype == tf.string else pa.array(flat)
    for size in reversed(values.shape[1:]):
        kind = pa.list_(pa.field("item", array.type, nullable=False), size)
        array = pa.FixedSizeListArray.from_arrays(array, type=kind)
    return array


# Calls a model on ranks with different numbers of batches, and raises errors on all ranks.

T = TypeVar("T")


class ToldError(GmetaError):
    """An error of another rank."""


class Calls:
    """Calls a function of batches: a Keras model on all ranks in step, other functions on each rank alone.

    Args:
      model: A Keras model, whose ``predict_step`` is called, or a function.
      spec: The form of the batches.
    """

    def __init__(self, model: tf.keras.Model | Callable[[Any], Any], spec: Any) -> None:
        self._spec, self._in_step, self._inside = spec, False, False
        self._function: Callable[[Any], Any] = model
        if isinstance(model, tf.keras.Model):
            self._in_step = collectives.world().size > 1
            self._function = tf.function(model.predict_step, input_signature=[spec], autograph=False)

    def __call__(self, batch: Any) -> Any:
        """Return the model's predictions for a batch."""
        if self._in_step:
            _tell(True)
        self._inside = self._in_step
        found = self._function(batch)
        self._inside = False
        return found

    def nothing(self) -> tuple[Any, Any]:
        """Return a batch of no samples, and the model's predictions for it."""
        batch = empty_batch(self._spec)
        return batch, self(batch)

    @contextmanager
    def of_all_ranks(self) -> Iterator[None]:
        """Enter with all ranks, and leave when no rank has calls left; an error on one is raised on all."""
        try:
            yield
        except (ToldError, CollectiveError):
            raise
        except Exception as error:
            if not self._inside:  # otherwise, the others wait for this rank inside the model
                collectives.allgather_objects(str(error) or type(error).__name__)
            raise
        while _tell(False):
            self._function(empty_batch(self._spec))


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Call a function on each rank, and return all results; an error on one rank is raised on all."""
    try:
        found = work()
    except Exception as error:
        collectives.allgather_objects(str(error) or type(error).__name__)
        raise
    told = collectives.allgather_objects([found])
    _raise_told(told)
    return [result for (result,) in told]


def on_first_rank(work: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on all ranks; an error is raised on all."""
    first = collectives.world().rank == 0
    found: list[Any] = on_all_ranks(lambda: work() if first else None)
    result: T = found[0]
    return result


def _tell(has_batch: bool) -> bool:
    """Return whether any rank has a batch; all ranks call this together."""
    told: list[Any] = collectives.allgather_objects(has_batch)
    _raise_told(told)
    return any(told)


def _raise_told(told: list[Any]) -> None:
    for rank, said in enumerate(told):
        if isinstance(said, str):
            raise ToldError(f"rank {rank}: {said}")


class Reader(Protocol):
    """A function that returns a dataset: ``start`` and ``options`` are those of any reader."""

    def __call__(self, *, start: Start, options: ReadOptions) -> tf.data.Dataset:
        """Return a dataset of the batches from ``start``."""


def write_predictions(
    model: tf.keras.Model | Callable[[Any], Any],
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    reader: Reader,
    columns: Mapping[str, str],
    groups_per_part: int = 4096,
    model_name: str = "",
    options: ReadOptions = DEFAULTS,
) -> Predictions:
    """Predict for all rows of a split, and write Arrow files; resume an interrupted run.

    The split's groups, in their order on the disk, are cut into parts of ``groups_per_part``, on any number
    of ranks. Each part becomes a file ``part-00012.arrow`` (Arrow IPC, i.e. Feather version 2), which is
    renamed to this name once it is completely on the disk. The ranks divide the missing parts. After Ctrl-C,
    ``kill -9`` or the loss of a rank, the same call therefore resumes with the missing parts, on any number
    of ranks; each row is in exactly one part, and the files have the same bytes if the model returns the same
    numbers. At the end, all parts are read back, and ``_manifest.json`` is written with their rows and
    checksums. Later calls return it without predicting.

    All ranks of a job call this together, with a shared folder. All ranks call a Keras model in step, as
    tables divided among ranks require: a rank without a batch passes an empty one. Each rank calls other
    functions alone.

    Args:
      model: A Keras model, whose ``predict_step`` gets each batch; or any function of a batch, called eagerly
        (wrap it in `tf.function` if needed). The result is a tensor, which is named ``prediction``, or a dict
        of tensors, with one row for each row of the table.
      path: ``"<folder>/<split>"``, as for `gmeta.io.groups`.
      out: A local folder, which is created if it doesn't exist.
      reader: Returns a dataset of the batches by any reader of this split; it must pass on ``start`` and
        ``options``. It is called once. Each iteration of its result reads one part, so no batch spans two
        parts.
      columns: Other parts of a batch to write: column -> its place, the keys of dicts and indices of tuples
        separated by slashes, such as ``"task"``, ``"targets/item"`` or, of `gmeta.io.rows`, ``"0/user"``.
      groups_per_part: Number of groups in a part, which is kept in memory until it is written.
      model_name: Identifies the model's weights, such as the name of a checkpoint. A run resumes only with
        the same name.
      options: ``on_bad``, ``threads`` and ``stats`` of the reader. The order is always that on the disk.

    Returns:
      The manifest: the plan, the columns and the parts. In the files, scalars are numbers, vectors are lists
      of fixed size, and ragged rows are large lists.

    Raises:
      ConfigError: The folder belongs to a run with another data set, other columns, another model name or
        other arguments; a column or its place doesn't exist, or has another number of rows; or ``reader``
        ignores its arguments.
      DataError: The split or a part is damaged.
      GmetaError: Another job writes to the folder, or it can't be written.
      CollectiveError: Another rank has ended.

    Example:
      >>> done = write_predictions(  # doctest: +SKIP
      ...     model, "data/test", "scores", model_name="checkpoint-12000",
      ...     reader=lambda **start: sequences("data/test", history=["item"], longest=1000, **start),
      ...     columns={"user": "task"},
      ... )
      >>> table = pyarrow.dataset.dataset("scores", format="arrow").to_table()  # doctest: +SKIP
    """
    out, split, world = Path(out), open_split(path, options.on_bad), collectives.world()
    size = whole_number("write_predictions: groups_per_part", groups_per_part, least=1)
    options = replace(options, shuffle=False, shuffle_buffer=None, shard=(0, 1))
    start = PartStart()
    dataset = _batches(reader, start, options)
    plan = PredictionPlan(
        data=split.digest,
        groups=split.groups,
        groups_per_part=size,
        columns=dict(columns),
        batches=str(dataset.element_spec),
        on_bad=options.on_bad,
        model=model_name,
    )
    collectives.check_agreement({"plan of the predictions": plan.digest}, advice="pass the same on all ranks")
    with explain_write_errors(out), ExitStack() as held:
        missing = on_first_rank(lambda: _begin(out, plan, held))
        if missing is None:
            return Predictions.load(out)
        calls = Calls(model, dataset.element_spec)
        with calls.of_all_ranks():
            known = _known_schema(out, plan)
            for part in missing[world.rank :: world.size]:
                start.move_to(plan.span(part))
                with data_errors():
                    rows = [_rows(batch, calls(batch), plan.columns) for batch in dataset]
                rows = rows or [_rows(*calls.nothing(), plan.columns)]
                known = known or rows[0].schema
                check_same(part_path(out, part), known, rows[0].schema)
                write_part(out, plan, part, rows)
        return _finish(out, plan)


def _begin(out: Path, plan: PredictionPlan, held: ExitStack) -> list[int] | None:
    """Claim the folder, and return the missing parts; None if all are done."""
    out.mkdir(parents=True, exist_ok=True)
    refusal = f"another job writes predictions to {out}: wait for it, or end it"
    held.enter_context(lock_file(out / ".lock", refusal))
    plan.agree_with(out)
    if manifest_path(out).exists():
        return None
    for rest in out.glob(".*.tmp"):  # left by killed processes
        rest.unlink()
    return [part for part in range(plan.parts) if not part_path(out, part).exists()]


def _batches(reader: Reader, part: PartStart, options: ReadOptions) -> tf.data.Dataset:
    dataset = reader(start=part, options=options)
    if not part.readers or any(_order(given) != _order(options) for given in part.readers):
        raise ConfigError(
            "write_predictions: reader must read the requested part: pass on start and options, as in "
            "reader=lambda **start: gmeta.io.sequences(path, ..., **start)"
        )
    return dataset


def _order(options: ReadOptions) -> tuple[Any, ...]:
    return options.shuffle, options.shard, options.seed, options.on_bad


def _known_schema(out: Path, plan: PredictionPlan) -> pa.Schema | None:
    there = (path for path in (part_path(out, part) for part in range(plan.parts)) if path.exists())
    return next(map(schema_of, there), None)


def _rows(batch: Any, predicted: Any, columns: Mapping[str, str]) -> pa.RecordBatch:
    named = predicted if isinstance(predicted, Mapping) else {"prediction": predicted}
    twice = sorted(set(named) & set(columns))
    if twice:
        raise ConfigError(
            f"columns and predictions are both named {', '.join(twice)}: rename those of columns"
        )
    return record_batch({**{name: _find(batch, place) for name, place in columns.items()}, **named})


def _find(batch: Any, place: str) -> Any:
    value = batch
    for key in place.split("/"):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, tuple) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            parts = isinstance(value, Mapping | tuple)
            there = value if isinstance(value, Mapping) else range(len(value) if parts else 0)
            raise ConfigError(
                f"write_predictions: columns: a batch has no {place!r}; in place of {key!r} there are "
                f"{', '.join(map(str, there)) or 'no parts'}"
            )
    return value


def _finish(out: Path, plan: PredictionPlan) -> Predictions:
    """Read all parts, each on one rank, and write the manifest."""
    world = collectives.world()
    schema = schema_of(part_path(out, 0))
    own = range(plan.parts)[world.rank :: world.size]
    told = on_all_ranks(lambda: {part: read_part(out, plan, part, schema).to_json() for part in own})
    found = {part: Part.from_json(value) for parts in told for part, value in parts.items()}
    parts = [found[part] for part in range(plan.parts)]
    done = Predictions(plan, {field.name: str(field.type) for field in schema}, tuple(parts))

    def save() -> None:
        sync(out)  # flush the parts' names before the manifest's
        done.save(out, manifest_path(out).name)

    on_first_rank(save)
    return done
