"""The likeliest items of users, by all that the data set knows of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import DataError
from gmeta.core.files import explain_write_errors
from gmeta.core.texts import TEXT
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.next_item.counting import Scorer, Scores
from gmeta.experiment.next_item.generative import check_answer
from gmeta.experiment.next_item.ranked import top, without_seen
from gmeta.experiment.next_item.runs import Trained, load_catalogue
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.preprocess.plan.column_values import hash_text, is_text

_USERS = 256  # at once


def recommend(
    trained: Trained, scorer: Scorer, users: Ints | None, k: int, *, leave_out_seen: bool
) -> Iterator[tuple[Ints, Ints, Scores]]:
    """Find the k likeliest items of users, by all that the data set knows of them.

    Args:
      trained: The run.
      scorer: What ranks.
      users: (users,) ids, in the order of the answer; None: all users of the data set. A user who isn't in it
        has an empty history.
      k: The number of items.
      leave_out_seen: Whether to leave out the items of a user's history.

    Yields:
      Blocks of (users,) ids, (users, k) ids of items, the likeliest first, and (users, k) scores. Where fewer
      than k items are left, the item is -1, with the score -inf.
    """
    whole, ids = trained.cuts.whole, trained.cuts.ids
    asked = whole.users if users is None else np.asarray(users, np.int64)
    place = np.minimum(np.searchsorted(whole.users, asked), len(whole) - 1)
    known = whole.users[place] == asked
    for begin in range(0, len(asked), _USERS):
        some = slice(begin, begin + _USERS)
        part = whole.choose(place[some])
        # A stranger has an empty history, and isn't the user whose id is the next one.
        part = replace(part.first(np.where(known[some], part.sizes, 0)), users=asked[some])
        scores = np.asarray(scorer.scores(part), np.float32)
        scores = without_seen(scores, part) if leave_out_seen else scores
        chosen = top(scores, k)
        own = np.where(chosen < 0, -np.inf, np.take_along_axis(scores, np.maximum(chosen, 0), axis=1))
        yield asked[some], np.where(chosen < 0, -1, ids[np.maximum(chosen, 0)]), own.astype(np.float32)


def write_recommendations(
    run: RunFolder,
    out: Path,
    *,
    users: Path | None = None,
    k: int = 20,
    method: str | None = None,
    seed: int | None = None,
    leave_out_seen: bool | None = None,
) -> tuple[str, int]:
    """Write what `recommend` finds as a Parquet file with a row for each user.

    Args:
      run: A run that is trained to the end.
      out: The file: a column of users' ids, ``items`` and ``scores``. Where the data set keeps them
        (`gmeta.core.texts`), the users' texts follow, in a column such as ``user_text``, and lists of the
        items' ``texts`` and ``titles``, with null for an item that has none.
      users: A text file with a user in each line, or a Parquet file whose first column has the users; None:
        all users of the data set. If `gmeta prepare` has hashed the users, a user is its text, or the hash.
      k: The number of items.
      method: As in `TrainedRun.choose`.
      seed: As in `TrainedRun.choose`.
      leave_out_seen: Whether to leave out the items of a history; None: as the run was measured.

    Returns:
      The method's name in tables, and the number of users.

    Raises:
      ConfigError: There is no such method or seed, or the beam of a search is narrower than k.
      DataError: The run isn't trained to the end, or the file of users can't be read.
      GmetaError: The file can't be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    trained = load_catalogue(run)
    of_user, item, texts = trained.schema.task, trained.config.item, trained.texts
    asked = None
    if users is not None:
        hashed = of_user in Manifest.load(run.load()[1]).roles.hashed
        asked = _read_users(users, trained.cuts.whole.users if hashed else None)
    name, scorer = trained.choose(method, seed)
    check_answer(scorer, k)
    leave_out_seen = not trained.config.seen if leave_out_seen is None else leave_out_seen
    kinds = {of_user: pa.int64(), "items": pa.list_(pa.int64()), "scores": pa.list_(pa.float32())}
    if TEXT in texts.kinds(of_user):
        kinds[f"{of_user}_{TEXT}"] = pa.string()
    kinds |= {f"{kind}s": pa.list_(pa.string()) for kind in texts.kinds(item)}
    schema, count = pa.schema([*kinds.items()]), 0
    unfinished = out.with_name(f".{out.name}.unfinished")
    with explain_write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with parquet.ParquetWriter(unfinished, schema) as file:
                for ids, items, scores in recommend(trained, scorer, asked, k, leave_out_seen=leave_out_seen):
                    left = scores > -np.inf
                    lists = {"items": items[left], "scores": scores[left]}
                    lists |= {f"{kind}s": texts.find(item, items[left], kind) for kind in texts.kinds(item)}
                    splits = pa.array(np.concatenate([[0], np.cumsum(left.sum(axis=1))]), pa.int32())
                    columns: dict[str, Any] = {
                        of_user: ids,
                        f"{of_user}_{TEXT}": texts.find(of_user, ids, TEXT),
                    }
                    for kind, flat in lists.items():
                        values = pa.array(flat, kinds[kind].value_type)
                        columns[kind] = pa.ListArray.from_arrays(splits, values)
                    file.write_table(pa.table([columns[name] for name in schema.names], schema=schema))
                    count += len(ids)
            unfinished.replace(out)
        finally:
            unfinished.unlink(missing_ok=True)
    return trained.label(name), count


def _read_users(path: Path, hashed: Ints | None) -> Ints:
    """Read the users of a file as numbers; ``hashed`` has the known users if they are hashes of texts."""
    from pyarrow import lib, parquet

    try:
        with path.open("rb") as file:
            columnar = file.read(4) == b"PAR1"
        if columnar:
            given = parquet.read_table(path).column(0)
            if hashed is None or not is_text(given.type):
                return given.cast("int64").drop_null().to_numpy()  # refuses fractions
            lines = given.drop_null().to_pylist()
        elif hashed is None:
            return np.array([int(line) for line in path.read_text().split()], np.int64)
        else:
            lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError, TypeError, OverflowError, lib.ArrowException) as error:
        what = "a whole number" if hashed is None else "a user"
        raise DataError(
            f"no ids of users: {error}",
            path=path,
            advice=f"give a text file with {what} in each line, or a Parquet file whose first column has "
            "them",
        ) from error
    known = set(hashed.tolist())

    def number(line: str) -> int:
        own = hash_text(line)
        is_hash = own not in known and re.fullmatch("-?[0-9]+", line) and int(line) in known
        return int(line) if is_hash else own

    return np.array([number(line) for line in lines], np.int64)
