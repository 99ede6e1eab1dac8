"""The contents of a folder of predictions: the plan, written first, and the manifest, written last.

::

    out/
      _plan.json            which data in which parts, by which model: a run with another plan is refused
      part-00000.arrow      the predictions for one part's groups; appears whole, by a rename
      part-00001.arrow
      _manifest.json        once all parts are written and read back: their rows and checksums

Readers of Arrow datasets skip names that begin with ``_``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import beside_data, write_atomically
from gmeta.core.json_values import (
    SealedManifest,
    folder_name,
    items,
    load_manifest_file,
    mapping,
    parse_json,
    text,
    whole,
)
from gmeta.core.settings import from_mapping

_PLAN, _MANIFEST = "plan.json", "manifest.json"
FORMAT, VERSION = "gmeta-predictions", 1
_ADVICE = "give another folder, or remove this one to predict again"


@dataclass(frozen=True)
class PredictionPlan(SealedManifest):
    """The caller's settings that determine the bytes of predictions.

    Attributes:
      data: The digest of the data set and the split (`gmeta.io.readers.epoch.EpochPlan`).
      groups: The number of the split's groups.
      groups_per_part: The number of groups of each part; the last one may have fewer.
      columns: Output column -> its place in a batch.
      batches: The form of the reader's batches.
      on_bad: How the reader treats bad data.
      model: The name of the model's weights, or "".
    """

    data: str
    groups: int
    groups_per_part: int
    columns: Mapping[str, str]
    batches: str
    on_bad: str
    model: str

    def _body(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def parts(self) -> int:
        """The number of parts."""
        return -(-self.groups // self.groups_per_part)

    def span(self, part: int) -> tuple[int, int]:
        """Return the positions of a part's groups in the order of the data set."""
        begin = part * self.groups_per_part
        return begin, min(self.groups, begin + self.groups_per_part)

    def agree_with(self, out: Path) -> None:
        """Write the plan into a folder, or check that the folder has the same plan.

        In a folder of an earlier version, files are renamed to this version's names.

        Raises:
          ConfigError: The folder has another plan, or files without one.
          DataError: The folder's plan isn't valid.
        """
        path = beside_data(out, _PLAN)
        if not path.exists():
            if any(out.glob("*.arrow")) or manifest_path(out).exists():
                raise ConfigError(
                    f"{out} holds files that are no predictions of gmeta's: give another folder"
                )
            write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")
            return
        try:
            there = from_mapping(PredictionPlan, parse_json(path.read_text()), where="plan")
        except ValueError as error:
            raise DataError(f"no plan of predictions: {error}", path=path, advice=_ADVICE) from error
        for field in fields(self):
            here, before = getattr(self, field.name), getattr(there, field.name)
            if here != before:
                raise ConfigError(
                    f"{out} was begun with other predictions: {field.name} was {before!r}, and is {here!r}; "
                    f"{_ADVICE}"
                )
        for name in (_PLAN, _MANIFEST):
            if (earlier := beside_data(out, name)).name == name:
                earlier.rename(out / f"_{name}")


def manifest_path(out: Path) -> Path:
    """Return where the manifest of a folder is."""
    return beside_data(out, _MANIFEST)


@dataclass(frozen=True)
class Part:
    """One Arrow file.

    Attributes:
      name: Its name.
      rows: Its rows.
      bytes: Its size.
      sha256: Its digest.
    """

    name: str
    rows: int
    bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return the part as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Part:
        """Read a part from what `to_json` returned; raise ValueError, KeyError or TypeError."""
        part = cls(**mapping(value, "a part"))
        folder_name(part.name, "a part's name")
        for name in ("rows", "bytes"):
            whole(getattr(part, name), name)
        text(part.sha256, "sha256")
        return part


@dataclass(frozen=True)
class Predictions(SealedManifest):
    """Complete predictions.

    Attributes:
      plan: Their plan.
      schema: The columns, name -> Arrow's name of its type.
      parts: The files, in the order of the data set.
    """

    plan: PredictionPlan
    schema: Mapping[str, str]
    parts: Sequence[Part]

    @property
    def rows(self) -> int:
        """The rows of all parts."""
        return sum(part.rows for part in self.parts)

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "rows": self.rows,
            "plan": asdict(self.plan),
            "schema": dict(self.schema),
            "parts": [part.to_json() for part in self.parts],
        }

    @classmethod
    def load(cls, folder: Path) -> Predictions:
        """Read the manifest of a folder.

        Raises:
          DataError: There is none, or it isn't one that `write_predictions` wrote.
        """
        path = manifest_path(folder)
        value = load_manifest_file(path, FORMAT, VERSION, advice="predict again", older=_ADVICE)
        try:
            found = cls(
                from_mapping(PredictionPlan, mapping(value["plan"], "plan"), where="plan"),
                {
                    text(k, "a column"): text(v, "a type")
                    for k, v in mapping(value["schema"], "schema").items()
                },
                tuple(Part.from_json(part) for part in items(value["parts"], "parts")),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"not a manifest of predictions: {error}", path=path, advice=_ADVICE) from error
        if found.digest != value.get("digest"):
            raise DataError("its digest doesn't match its content", path=path, advice=_ADVICE)
        return found


# Files of predictions: each is written whole or not at all, and names its plan and part.

_PLAN_KEY, _PART = b"gmeta.plan", b"gmeta.part"
_AGAIN = "remove the file and predict again: only this part is repeated"


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
    labels = {_PLAN_KEY: plan.digest.encode(), _PART: str(part).encode()}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema.with_metadata(labels)) as writer:
        writer.write_table(table.replace_schema_metadata(labels))
    write_atomically(part_path(out, part), sink.getvalue().to_pybytes())


def check_same(path: Path, before: pa.Schema, schema: pa.Schema) -> None:
    """Refuse columns that differ from the previous ones.

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
    """Read a part of these columns from beginning to end, and return its entry in the manifest.

    Raises:
      ConfigError: It has other columns.
      DataError: The file is missing, is damaged, or belongs to another part or plan.
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
    if (labels.get(_PLAN_KEY), labels.get(_PART)) != (plan.digest.encode(), str(part).encode()):
        raise DataError(f"not part {part} of these predictions", path=path, advice=_AGAIN)
    check_same(path, schema, table.schema.remove_metadata())
    return Part(path.name, table.num_rows, len(data), hashlib.sha256(data).hexdigest())


def _text(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
