"""Predictions for new rows: reads a table as the run's data were prepared, and scores it part by part.

Each part (`gmeta.experiment.runs.parts`) is a fixed range of the input's records.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from gmeta.core.collectives.place import RankPlace
from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.core.schema import OnBad
from gmeta.core.settings import from_mapping
from gmeta.experiment.baselines.task_rows import Floats
from gmeta.experiment.ranking.drawn_data import read_rows
from gmeta.experiment.runs.best_epoch import CHOSEN
from gmeta.experiment.runs.parts import ALONE, Parts, about
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.preprocess.config import Progress
from gmeta.preprocess.local.duckdb_engine import connect, default_limit
from gmeta.preprocess.shape_spec import Shape
from gmeta.preprocess.source import ELEMENT, RECORD, BadRecords, Columns, join_rows, row_count, single, take
from gmeta.preprocess.table_spec import CsvForm, FormatName, TableSpec
from gmeta.preprocess.tables.recognition import open_text
from gmeta.preprocess.tables.table_files import find_files
from gmeta.preprocess.tables.table_source import TableSource

ROWS = 1 << 20
"""Records of the input in a part."""
SCORE, ROW, PLACE = "score", "row", "element"
"""The columns of the score, of the record's number in the input, and of an element's place in its exploded
list. Both count from 0."""

_ASKED = "_predict.json"


@dataclass(frozen=True)
class Predictor:
    """A predictor of rows.

    Attributes:
      name: Its name in tables.
      needed: The columns that it reads.
      kept: The columns that are written beside the score, if the input has them.
      predict: Columns -> (rows,) probabilities, or values.
      about: JSON values that change when the predictions do.
    """

    name: str
    needed: Sequence[str]
    kept: Sequence[str]
    predict: Callable[[Columns], Floats]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    """The outcome of a call.

    Attributes:
      name: The predictor's name.
      rows: The number of rows that this process predicted.
      parts: The number of parts that this process wrote.
      before: The number of its parts that already existed.
      left_out: (file name, reason) -> bad records that were skipped.
    """

    name: str
    rows: int
    parts: int
    before: int
    left_out: Mapping[tuple[str, str], int]


def predict_file(
    run: RunFolder,
    data: Sequence[str],
    out: Path,
    *,
    method: str | None = None,
    seed: int | None = None,
    file_format: FormatName | None = None,
    form: CsvForm | None = None,
    rows_per_part: int = ROWS,
    on_bad: OnBad = "raise",
    progress: Progress = lambda stage, done, total: None,
    place: RankPlace = ALONE,
) -> Written:
    """Score the rows of new files, and write Parquet files of the same rows in the same order.

    Files are read as the run's data were: columns by the same names and types, texts by the same hash, gaps
    by the same defaults, and side tables joined where the file lacks their columns. Filters of rows don't
    apply, and the label may be absent. A part has the columns `ROW`, the task, the time and the item, if the
    input has them, as the data set stores them, and `SCORE`. If the run's data have exploded lists, each
    element is a row, and its place in the list is in the column `PLACE`. A run for cold start first adapts to
    a user's rows in its data; users without rows get the shared weights.

    Args:
      run: A fully trained run for ranking or for cold start.
      data: Files, folders and patterns, as `gmeta prepare` takes them.
      out: The folder of the parts.
      method: Which method; None: for ranking, the best in validation; for cold start, the first.
      seed: Which of its seeds; None: the first.
      file_format: The files' format; None: by content.
      form: The form of text files; None: by content.
      rows_per_part: The number of records in a part.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.
      progress: As in `gmeta.preprocess.prepare`.
      place: The place of this process among those that divide the parts.

    Raises:
      ConfigError: The run can't predict rows, a column is missing, or the folder has parts of another
        request.
      DataError: A file can't be read, or the run isn't fully trained.
      GmetaError: A part can't be written.
    """
    if run.family not in PREDICTORS:
        raise ConfigError(
            f"{run.path} is a run of {run.family}: gmeta predict takes runs of {' and '.join(PREDICTORS)}"
        )
    if rows_per_part < 1:
        raise ConfigError(f"rows_per_part must be at least 1, got {rows_per_part}")
    manifest = Manifest.load(run.load()[1])
    predictor = PREDICTORS[run.family](run, method, seed)
    bad = BadRecords(on_bad)
    with closing(connect(default_limit())) as connection:
        spec = table_spec(manifest, predictor, data, file_format, form or CsvForm())
        source = TableSource(data, spec, connection, places=True)
        if on_bad == "skip" and any(file.is_text for file in find_files(data, spec)):
            raise ConfigError(
                "--on-bad skip: rows are numbered by their records, and a malformed line of a text file has "
                "no number: mend the line, or convert the file to Parquet"
            )
        read = {"format": file_format, "form": repr(form), "on_bad": on_bad, "rows_per_part": rows_per_part}
        total = -(-source.count_records() // rows_per_part)
        parts = Parts.begin(out, _ASKED, total, {**predictor.about, **read, "inputs": source.stamps()})
        done, own, rows = parts.there(), set(parts.of(place)), 0
        if own - done:
            for number, columns in _ranges(source.chunks(bad, progress), rows_per_part, total):
                if number in own - done:
                    rows += _write(parts, number, columns, predictor)
    left_out = {(file, reason.value): count for (file, reason), count in bad.counts.items()}
    return Written(predictor.name, rows, len(own - done), len(own & done), left_out)


def table_spec(
    manifest: Manifest,
    predictor: Predictor,
    data: Sequence[str],
    file_format: FormatName | None,
    form: CsvForm,
) -> TableSpec:
    """Return the spec of new files: that of the manifest's data, with the columns that are needed or kept.

    Raises:
      ConfigError: The data weren't prepared from a table, or a column is missing from the files.
    """
    table = manifest.config.get("table")
    if not table:
        raise ConfigError(
            "the run's data weren't prepared from a table, so nothing describes the columns of new files: "
            "prepare them with --task COLUMN or --label RULE"
        )
    held = from_mapping(
        TableSpec,
        {name: value for name, value in table.items() if name not in ("label", "unique")},
        "the run's data",
    )
    shape = replace(held.shape, where=None, distinct=(), core={}, session_gap=None)
    files = find_files(data, TableSpec(csv=form, format=file_format))
    names = {name for file in files for name in _names(file)}
    own = {} if held.shape.explode is None else dict.fromkeys(held.shape.explode.names)
    wanted = [
        name
        for name in dict.fromkeys((*predictor.needed, *predictor.kept))
        if name in held.columns and not (held.blocks and name == held.task)
    ]
    there = {name for name in wanted if held.columns[name].source in {*names, *own}}
    lacking = [name for name in predictor.needed if name in wanted and name not in there]
    if not lacking or not shape.joins:
        shape = replace(shape, joins=())
        if lacking:
            raise ConfigError(
                f"{data[0]} lacks the column{'s' * (len(lacking) > 1)} {', '.join(lacking)}, by which the "
                f"run predicts; it has {', '.join(sorted(names))}"
            )
    columns = {name: held.columns[name] for name in wanted if name in there or name in lacking}
    task = held.task if held.task in columns else ""
    return TableSpec(
        task,
        time=held.time if held.time in columns else None,
        columns=columns,
        format=file_format,
        csv=form,
        shape=shape if shape.explode or shape.joins else Shape(),
        defaults=held.defaults,
    )


def _names(file: Any) -> Sequence[str]:
    if file.format == "parquet":
        return parquet.read_schema(file.read).names
    if file.names:
        return file.names
    found: dict[str, None] = {}
    with open_text(file.read) as lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # a bad line is reported when rows are read
                found |= dict.fromkeys(json.loads(line))
    return [*found]


def _ranges(chunks: Iterator[Columns], size: int, total: int) -> Iterator[tuple[int, Columns]]:
    """Yield the rows of each range of records, in order; a range without good records has no rows."""
    held: list[Columns] = []
    current = 0
    nothing: Columns | None = None
    for chunk in chunks:
        nothing = take(chunk, np.zeros(0, np.int64)) if nothing is None else nothing
        number = single(chunk, RECORD) // size
        for part in np.unique(number):
            while current < part:
                yield current, join_rows(held or [nothing])
                held, current = [], current + 1
            held.append(take(chunk, np.flatnonzero(number == part)))
    if nothing is not None:
        while current < total or held:
            yield current, join_rows(held or [nothing])
            held, current = [], current + 1


def _write(parts: Parts, number: int, columns: Columns, predictor: Predictor) -> int:
    """Predict a part's rows and write them; return their number."""
    rows = single(columns, RECORD)
    place = {PLACE: columns[ELEMENT]} if ELEMENT in columns else {}
    scores = predictor.predict(columns) if len(rows) else np.zeros(0)
    kept = {name: columns[name] for name in predictor.kept if name in columns}
    table = pa.table({ROW: rows, **place, **kept, SCORE: np.asarray(scores, np.float32)})
    with parts.write(number, table.schema) as writer:
        writer.write_table(table)
    return len(rows)


# The predictors of each family of runs.


def _of_ranking(run: RunFolder, method: str | None, seed: int | None) -> Predictor:
    from gmeta.experiment.ranking.runs import columns_of, load_ranking

    trained = load_ranking(run)
    config, encoding = trained.config, trained.parts.encoding
    name, scorer = trained.choose(method, seed)
    roles = Manifest.load(run.load()[1]).roles

    def predict(columns: Columns) -> Floats:
        scores = scorer.scores(encoding(columns))
        return 1 / (1 + np.exp(-scores)) if config.binary else scores

    kept = (config.user, roles.time, config.item)
    every = (*config.encoded, *config.numbers, config.time)
    seed = next(iter(trained.methods[name])) if seed is None and name in trained.methods else seed
    return Predictor(
        trained.label(name),
        tuple(name for name in dict.fromkeys(every) if name in columns_of(scorer, config)),
        tuple(dict.fromkeys(each for each in kept if each is not None)),
        predict,
        about(run, name, seed, [run.path / CHOSEN]),
    )


def _of_cold_start(run: RunFolder, method: str | None, seed: int | None) -> Predictor:
    import tensorflow as tf

    from gmeta.experiment.runs.all_runs import choose_trained

    config, data = run.load()
    if not config.own_columns:
        raise ConfigError(f"{run.path} was trained on MovieLens' own features, which no new file has")
    method, seed, model = choose_trained(run, method, seed)
    manifest = Manifest.load(data)
    task = manifest.schema.task
    adapts = model.adapter.learner.inner.steps_in("serving") > 0
    known = read_rows(data, [task, config.label, *config.columns])
    order = np.argsort(single(known, task), kind="stable")
    tasks = single(known, task)[order]

    def samples(columns: Columns, rows: Any) -> dict[str, Any]:
        chosen = take({name: columns[name] for name in config.columns}, rows)
        return {
            name: tf.RaggedTensor.from_row_splits(each[0], each[1]) if isinstance(each, tuple) else each
            for name, each in chosen.items()
        }

    def support(user: int) -> tuple[dict[str, Any], Floats] | None:
        rows = order[slice(*np.searchsorted(tasks, [user, user + 1]))]
        return (samples(known, rows), single(known, config.label)[rows]) if len(rows) else None

    def predict(columns: Columns) -> Floats:
        one = np.zeros(row_count(columns), np.int64)
        users, places = np.unique(single(columns, task) if adapts else one, return_inverse=True)
        found = np.zeros(len(places))
        for begin in range(0, len(users), config.tasks_per_batch):
            some = range(begin, min(begin + config.tasks_per_batch, len(users)))
            own = {each: pair for each in some if adapts and (pair := support(int(users[each]))) is not None}
            adapted = dict(zip(own, model.adapt_many([*own.values()]) if own else [], strict=True))
            for each in some:
                rows = np.flatnonzero(places == each)
                found[rows] = model.adapter.predict(samples(columns, rows), adapted.get(each))
        return found if config.loss == "mse" else 1 / (1 + np.exp(-found))

    label = config.methods[method].label
    kept = (task, manifest.roles.time, config.item)
    return Predictor(
        label,
        (*([task] if adapts else []), *config.columns),
        tuple(dict.fromkeys(each for each in kept if each is not None)),
        predict,
        about(run, method, seed, [run.training(method, seed) / "history.json"]),
    )


PREDICTORS: Mapping[str, Callable[[RunFolder, str | None, int | None], Predictor]] = {
    "ranking": _of_ranking,
    "cold-start": _of_cold_start,
}
"""Family of runs -> what makes the predictor of one."""
