"""The rows of a prepared data set, and negatives for data with only positive rows.

Negatives are copies of rows with other items and the label 0. They are drawn once, after the protocol has cut
the rows, for training, validation and test alike (`add_negatives`). So all methods and baselines see the same
rows, in all epochs and with all seeds.

Experiments that read tasks from files need a data set with negatives (`with_negatives`). The rows of a data
set and the negatives drawn for them are written once, in a folder of the run, as a data set in the format of
`gmeta prepare`. Training, measurement, baselines and exports read it.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta import io
from gmeta.core.collectives.rank_group import Ranks
from gmeta.core.data_manifest import TEXTS_FOLDER, Manifest
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.schema import OnBad
from gmeta.core.settings import from_mapping
from gmeta.experiment.baselines.attributes import belongs
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.plan.experiment_config import NEGATIVES_ADVICE, DrawnNegatives
from gmeta.experiment.plan.own_columns import likeliest_item, survey
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.io.cuts.task_choice import TaskChoice
from gmeta.io.reader_stats import data_errors
from gmeta.io.readers.read_options import OneEpoch
from gmeta.preprocess.config import PlanConfig, PrepareConfig, Progress
from gmeta.preprocess.local.preparation import prepare_source
from gmeta.preprocess.source import (
    NUMBER,
    BadRecords,
    Columns,
    Source,
    Values,
    join_rows,
    part,
    row_count,
    single,
    take,
)
from gmeta.preprocess.table_spec import TableSpec

FOLDER = "with-negatives"
"""The data set's folder in that of a run."""

_GROUPS = 256  # per element
_TRIES = 16  # of an item that isn't the user's
_ROWS = 1 << 16  # a chunk
_SETTINGS = "negatives"  # the manifest's entry that describes how negatives were drawn


def read_rows(data: Path, names: Sequence[str], on_bad: OnBad = "raise") -> dict[str, Values]:
    """Read columns of all rows of a prepared data set, from all splits.

    Args:
      data: The data set.
      names: The columns.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.

    Raises:
      DataError: The data set can't be read, or has no rows.
    """
    manifest = Manifest.load(data)
    task, parts = manifest.schema.task, list[Columns]()
    for split in manifest.splits:
        options = io.ReadOptions(shuffle=False, shard=(0, 1), on_bad=on_bad)
        with data_errors():
            for element in io.groups(
                data / split, groups_per_element=_GROUPS, start=OneEpoch(), options=options
            ):
                sizes = np.diff(element["row_splits"].numpy())
                found: dict[str, Values] = {}
                for name in names:
                    if name == task:
                        found[name] = np.repeat(element["task"].numpy(), sizes)
                    else:
                        found[name] = _values(element["columns"][name])
                parts.append(found)
    if not parts:
        raise DataError("no rows", path=data, advice="prepare a data set with rows")
    return join_rows(parts)


def _values(column: Any) -> Values:
    if hasattr(column, "row_splits"):
        return column.flat_values.numpy(), column.row_splits.numpy().astype(np.int64)
    found: NDArray[Any] = column.numpy()
    return found


def add_negatives(
    columns: Columns,
    parts: Sequence[Ints],
    settings: DrawnNegatives,
    *,
    user: str,
    item: str,
    label: str,
    apart: Collection[str] = (),
) -> tuple[dict[str, Values], list[Ints]]:
    """Add negatives to the rows of the parts of a data set.

    Each row with a label above 0 gets ``settings.count`` copies, with the label 0 and the item of another
    row, with all columns that describe this item (`gmeta.experiment.baselines.attributes.belongs`). A part
    draws from the items of its rows and of the parts before it. An item that the user has taken there is
    drawn again, at most 16 times, and then left out. So nothing in training depends on the rows of validation
    or test.

    Args:
      columns: Column -> values.
      parts: The places of the rows of training, validation and test.
      settings: How negatives are drawn.
      user: The column of users.
      item: The column of items.
      label: The column of labels.
      apart: Columns that keep the row's values, such as its time.

    Returns:
      The columns with the negatives at the end, and the places of all rows of each part, ascending.

    Example:
      >>> taken = {"user": np.array([1, 1, 2]), "item": np.array([5, 6, 7]), "click": np.ones(3)}
      >>> settings = DrawnNegatives(count=1)
      >>> found, (rows,) = add_negatives(
      ...     taken, [np.arange(3)], settings, user="user", item="item", label="click"
      ... )
      >>> found["click"]
      array([1., 1., 1., 0., 0., 0.])
      >>> found["item"][3:5]  # of user 1, who has the items 5 and 6
      array([7, 7])
    """
    _, first, items = np.unique(single(columns, item), return_index=True, return_inverse=True)
    users = np.unique(single(columns, user), return_inverse=True)[1]
    positive = single(columns, label) > 0
    own = [
        name
        for name in columns
        if name not in (user, item, label, *apart) and belongs(columns[name], first[items])
    ]
    added: list[Columns] = [columns]
    found: list[Ints] = []
    end = row_count(columns)
    for number, places in enumerate(parts):
        seen = np.concatenate(parts[: number + 1])
        held = np.unique((users * len(first) + items)[seen[positive[seen]]])
        pool = items[seen] if settings.law == "popularity" else np.unique(items[seen])
        rows = places[positive[places]]
        source = np.repeat(rows, settings.count)
        rng = np.random.default_rng([settings.seed, number])
        drawn = np.full(len(source), -1)
        open_ = np.arange(len(source))
        for _ in range(_TRIES):
            tried = pool[rng.integers(0, len(pool), len(open_))]
            good = ~np.isin(users[source[open_]] * len(first) + tried, held)
            drawn[open_[good]] = tried[good]
            open_ = open_[~good]
        source, drawn = source[drawn >= 0], drawn[drawn >= 0]
        more = take(columns, source)
        more |= take({name: columns[name] for name in (item, *own)}, first[drawn])
        more[label] = np.zeros(len(source), single(columns, label).dtype)
        added.append(more)
        found.append(np.concatenate([places, np.arange(end, end + len(source))]))
        end += len(source)
    return join_rows(added), found


def with_negatives(
    settings: Mapping[str, Any], data: Path, run: RunFolder, where: str, on_bad: OnBad = "raise"
) -> Path:
    """Return the data that an experiment for cold start reads: with negatives, if its settings draw some.

    The first rank of a job writes them.

    Args:
      settings: The experiment's settings, perhaps incomplete.
      data: The experiment's data set.
      run: The experiment's folder, in which `FOLDER` is written.
      where: The name of the settings in error messages.
      on_bad: As for `draw_data`.

    Raises:
      ConfigError: As for `draw_data`, or the data already have other negatives.
      DataError: As for `draw_data`.
      GmetaError: As for `draw_data`.
    """
    if settings.get("negatives") is None:
        return data
    drawn = from_mapping(DrawnNegatives, settings["negatives"], f"{where}.negatives")
    held = (Manifest.load(data).config.get("inputs") or {}).get(_SETTINGS)
    if held is None:
        out, new = run.path / FOLDER, not (run.path / "config.json").exists()
        item = settings.get("item")
        return Ranks.of().from_first(lambda: draw_data(drawn, data, out, item, on_bad, overwrite=new))
    if held != repr(drawn):
        raise ConfigError(f"{data} has negatives already, by {held}: name the data that it was made of")
    return data


def draw_data(
    settings: DrawnNegatives,
    data: Path,
    out: Path,
    item: str | None = None,
    on_bad: OnBad = "raise",
    *,
    overwrite: bool = False,
) -> Path:
    """Write a data set's rows with negatives, unless the folder has them, and return the folder.

    Each row with the label 1 gets negatives of the items of all rows
    (`add_negatives`), with the row's task and time. A task stays in its
    split.

    Args:
      settings: How negatives are drawn.
      data: A data set that `gmeta prepare` made from a table, with a label of 1 in some rows, 0 in the rest.
      out: The folder to write.
      item: The column of items; None: the likeliest.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.
      overwrite: Whether to replace other data in the folder.

    Raises:
      ConfigError: The data lack users, items or labels, have other labels, or were prepared differently.
      DataError: The data can't be read.
      GmetaError: The folder has other data, or can't be written.
    """
    source = _Drawn(settings, data, item, on_bad)
    kept = {each.name for each in fields(PrepareConfig)} & source.manifest.config.keys()
    config = PrepareConfig(**{name: source.manifest.config[name] for name in kept})
    config = replace(config, max_rows=0)  # tasks were chosen before negatives were added
    prepare_source(lambda connection, bad: source, out, config, overwrite=overwrite)
    return out


class _Drawn:
    """The rows of a data set and their negatives, as a `Source`."""

    defaults = PlanConfig()
    rows_read = 0

    def __init__(self, settings: DrawnNegatives, data: Path, item: str | None, on_bad: OnBad) -> None:
        self.manifest, self.path, self._on_bad = Manifest.load(data), data, on_bad
        schema, roles, table = self.manifest.schema, self.manifest.roles, self.manifest.config.get("table")
        if not table or table.get("blocks") or self.manifest.config.get("partitions"):
            raise ConfigError(
                f"{data}: negatives need data that gmeta prepare made of one table, with --task, the user"
            )
        if roles.label is None:
            raise ConfigError(
                f"{data} was prepared without a label: prepare it with --label '*=1', which makes each row a "
                f"positive, and draw negatives, {NEGATIVES_ADVICE}"
            )
        self.name = f"{self.manifest.config.get('source', data.name)}, with negatives"
        self.spec = replace(from_mapping(TableSpec, table, "the data set"), unique=())
        self._settings, self._label, self._task = settings, roles.label, schema.task
        apart = {schema.task, schema.batch, roles.time, roles.label}
        ids = [
            each.name
            for each in schema
            if each.dtype == "int64" and not each.is_list and each.name not in apart
        ]
        if item is None:
            found = survey(data / next(iter(self.manifest.splits)), schema, roles.label, TaskChoice())
            item = likeliest_item(found, ids)
        if item not in ids:
            raise ConfigError(
                f"{data}: no column {item or 'of items'} of ids to draw items from; name one of "
                f"{', '.join(ids)}, --set 'item=\"COLUMN\"'"
            )
        self._item = item

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield the rows, then the negatives."""
        columns = read_rows(self.path, [*self.spec.columns], self._on_bad)
        labels = single(columns, self._label)
        if not np.isin(labels, (0, 1)).all():
            raise ConfigError(
                f"{self.path}: negatives have the label 0, and {self._label!r} holds others than 0 and 1"
            )
        names = {"user": self._task, "item": self._item, "label": self._label}
        times = [name for name in (self.manifest.roles.time,) if name]
        every, _ = add_negatives(columns, [np.arange(len(labels))], self._settings, **names, apart=times)
        total = row_count(every)
        for begin in range(0, total, _ROWS):
            end = min(begin + _ROWS, total)
            yield {**part(every, begin, end), NUMBER: np.arange(begin, end)}
            self.rows_read = end
            progress("read", end, total)

    def parts(self) -> Sequence[Source]:
        """Return the source itself."""
        return (self,)

    def digests(self) -> Mapping[str, str]:
        """Return the digest of the data, and the settings."""
        return {self.path.name: self.manifest.digest, _SETTINGS: repr(self._settings), "item": self._item}

    def start_digests(self) -> None:
        """Do nothing: the manifest has the digest."""

    def stamps(self) -> Mapping[str, Any]:
        """Return values that change when the rows do."""
        return {**self.digests(), **asdict(self._settings)}

    def count(self) -> int:
        """Return the maximum number of rows."""
        rows = sum(split.rows for split in self.manifest.splits.values())
        return rows * (1 + self._settings.count)

    def write_texts(self, folder: Path) -> Sequence[str]:
        """Copy the texts of the data."""
        if (self.path / TEXTS_FOLDER).is_dir():
            shutil.copytree(self.path / TEXTS_FOLDER, folder / TEXTS_FOLDER)
        return ()

    def where(self, number: int) -> tuple[Path, int | None, str]:
        """Return the place of a row."""
        return self.path, None, f"row {number + 1}: "

    def check(self, tasks: Any, bad: BadRecords) -> None:
        """Do nothing: the rows come from a prepared data set."""

    def holds_rows(self, file: str) -> bool:
        """Return whether a name is the data set's."""
        return file == self.path.name
