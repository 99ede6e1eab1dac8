"""Files of predictions: each is written whole or not at all, and says which part of which plan it is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import write_atomically
from gmeta.io.predictions.prediction_plan import Part, PredictionPlan

_PLAN, _PART = b"gmeta.plan", b"gmeta.part"
_AGAIN = "remove the file and predict again: only this part is made anew"


def part_path(out: Path, part: int) -> Path:
    """Return where a part is."""
    return out / f"part-{part:05d}.arrow"


def write_part(out: Path, plan: PredictionPlan, part: int, batches: Sequence[pa.RecordBatch]) -> None:
    """Write a part as an Arrow IPC file (Feather, version 2) of one record batch.

    Raises:
      ConfigError: The batches have different columns.
      OSError: The folder can't be written, or the disk is full; no file is left.
    """
    schema = batches[0].schema
    for batch in batches:
        check_same(part_path(out, part), schema, batch.schema)
    table = pa.Table.from_batches(batches).combine_chunks()
    labels = {_PLAN: plan.digest.encode(), _PART: str(part).encode()}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema.with_metadata(labels)) as writer:
        writer.write_table(table.replace_schema_metadata(labels))
    write_atomically(part_path(out, part), sink.getvalue().to_pybytes())


def check_same(path: Path, before: pa.Schema, schema: pa.Schema) -> None:
    """Refuse columns that differ from those before.

    Raises:
      ConfigError: They do.
    """
    if not before.equals(schema):
        raise ConfigError(
            f"{path}: the columns of predictions must be the same for all batches and parts: they were "
            f"{_text(before)}, and are {_text(schema)}"
        )


def schema_of(path: Path) -> pa.Schema:
    """Return the columns of a part.

    Raises:
      DataError: The file is damaged.
    """
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).schema.remove_metadata()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"no Arrow file: {error}", path=path, advice=_AGAIN) from error


def read_part(out: Path, plan: PredictionPlan, part: int, schema: pa.Schema) -> Part:
    """Read a part of these columns from its beginning to its end, and return what the manifest says of it.

    Raises:
      ConfigError: It has other columns.
      DataError: The file isn't there, is damaged, or is another part or of another plan.
    """
    path = part_path(out, part)
    try:
        data = path.read_bytes()
        with pa.ipc.open_file(data) as reader:
            labels = reader.schema.metadata or {}
            table = reader.read_all()
            table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the part can't be read: {error}", path=path, advice=_AGAIN) from error
    if (labels.get(_PLAN), labels.get(_PART)) != (plan.digest.encode(), str(part).encode()):
        raise DataError(f"not part {part} of these predictions", path=path, advice=_AGAIN)
    check_same(path, schema, table.schema.remove_metadata())
    return Part(path.name, table.num_rows, len(data), hashlib.sha256(data).hexdigest())


def _text(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
