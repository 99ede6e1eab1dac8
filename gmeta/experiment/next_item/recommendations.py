"""The likeliest items of users, from all their rows in the data set.

The file is written in parts with equal numbers of users (`gmeta.experiment.runs.parts`), in a folder beside
it that is deleted when the parts are joined.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gmeta.core.collectives.place import RankPlace
from gmeta.core.data_manifest import TEXT, Manifest, hash_text
from gmeta.core.errors import ConfigError, DataError
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.next_item.counting import Scorer, Scores
from gmeta.experiment.next_item.generative import check_answer
from gmeta.experiment.next_item.ranked import top, without_seen
from gmeta.experiment.next_item.runs import Trained, load_catalogue
from gmeta.experiment.runs.best_epoch import CHOSEN
from gmeta.experiment.runs.parts import ALONE, Parts, about
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.preprocess.plan.column_values import is_text

USERS = 4096
"""Users in a part."""

_AT_ONCE = 256  # users
_ASKED = "_recommend.json"


def recommend(
    trained: Trained, scorer: Scorer, users: Ints | None, k: int, *, leave_out_seen: bool
) -> Iterator[tuple[Ints, Ints, Scores]]:
    """Find the k likeliest items of users, from all their rows in the data set.

    Args:
      trained: The run.
      scorer: The scorer that ranks.
      users: (users,) ids, in the order of the answer; None: all users of the data set. An unknown user has an
        empty history.
      k: The number of items.
      leave_out_seen: Whether to leave out the items of a user's history.

    Yields:
      Blocks of (users,) ids, (users, k) ids of items, the likeliest first, and (users, k) scores. Where fewer
      than k items remain, the item is -1, with the score -inf.
    """
    whole, ids = trained.cuts.whole, trained.cuts.ids
    asked = whole.users if users is None else np.asarray(users, np.int64)
    place = np.minimum(np.searchsorted(whole.users, asked), len(whole) - 1)
    known = whole.users[place] == asked
    for begin in range(0, len(asked), _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        part = whole.choose(place[some])
        # An unknown user has an empty history, not that of the next higher id.
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
    users_per_part: int = USERS,
    place: RankPlace = ALONE,
) -> tuple[str, int]:
    """Write the results of `recommend` as a Parquet file with a row for each user.

    After an interruption, the same call writes the missing parts. With several processes, each writes its own
    parts, and `join_recommendations` joins them to the file.

    Args:
      run: A fully trained run.
      out: The file: a column of users' ids, ``items`` and ``scores``. Where the data set keeps them
        (`gmeta.core.data_manifest.Texts`), the users' texts follow, in a column such as ``user_text``, and
        lists of the items' ``texts`` and ``titles``, with null where an item has none.
      users: A text file with a user in each line, or a Parquet file whose first column has the users; None:
        all users of the data set. If `gmeta prepare` hashed the users, give their texts or the hashes.
      k: The number of items.
      method: As in `TrainedRun.choose`.
      seed: As in `TrainedRun.choose`.
      leave_out_seen: Whether to leave out the items of a history; None: as in the run's measurement.
      users_per_part: The number of users in a part.
      place: The place of this process among those that divide the parts.

    Returns:
      The method's name in tables, and the number of users that this process wrote.

    Raises:
      ConfigError: There is no such method or seed, the beam of a search is narrower than k, or the folder of
        parts belongs to another request.
      DataError: The run isn't fully trained, or the file of users can't be read.
      GmetaError: The file can't be written.
    """
    if users_per_part < 1:
        raise ConfigError(f"users_per_part must be at least 1, got {users_per_part}")
    trained, data = load_catalogue(run), run.load()[1]
    of_user, manifest = trained.schema.task, Manifest.load(data)
    whole = trained.cuts.whole.users
    asked = whole
    if users is not None:
        asked = _read_users(users, whole if of_user in manifest.roles.hashed else None)
    name, scorer = trained.choose(method, seed)
    check_answer(scorer, k)
    leave_out_seen = not trained.config.seen if leave_out_seen is None else leave_out_seen
    total = max(-(-len(asked) // users_per_part), 1)
    request = {
        **about(run, name, seed, [run.path / CHOSEN]),
        "users": hashlib.sha256(np.ascontiguousarray(asked).tobytes()).hexdigest(),
        "k": k,
        "leave_out_seen": leave_out_seen,
        "users_per_part": users_per_part,
        "data": manifest.digest,
        "parts": total,
    }
    parts = Parts.begin(_folder(out), _ASKED, total, request)
    schema, done, count = _schema(trained), parts.there(), 0
    for number in parts.of(place):
        if number in done:
            continue
        some = asked[number * users_per_part : (number + 1) * users_per_part]
        with parts.write(number, schema) as file:
            for block in recommend(trained, scorer, some, k, leave_out_seen=leave_out_seen):
                file.write_table(_table(trained, schema, *block))
        count += len(some)
    if place.size == 1:
        return trained.label(name), parts.join(out)
    return trained.label(name), count


def join_recommendations(out: Path) -> int:
    """Join the parts that several processes wrote to the file, and return the number of its users.

    Raises:
      DataError: A part is missing.
      GmetaError: The file can't be written.
    """
    folder = _folder(out)
    return Parts(folder, _ASKED, int(Parts.asked(folder, _ASKED)["parts"])).join(out)


def _folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.parts")


def _schema(trained: Trained) -> pa.Schema:
    of_user, texts = trained.schema.task, trained.texts
    kinds = {of_user: pa.int64(), "items": pa.list_(pa.int64()), "scores": pa.list_(pa.float32())}
    if TEXT in texts.kinds(of_user):
        kinds[f"{of_user}_{TEXT}"] = pa.string()
    kinds |= {f"{kind}s": pa.list_(pa.string()) for kind in texts.kinds(trained.config.item)}
    return pa.schema([*kinds.items()])


def _table(trained: Trained, schema: pa.Schema, ids: Ints, items: Ints, scores: Scores) -> pa.Table:
    of_user, item, texts = trained.schema.task, trained.config.item, trained.texts
    left = scores > -np.inf
    lists: dict[str, Any] = {"items": items[left], "scores": scores[left]}
    lists |= {f"{kind}s": texts.find(item, items[left], kind) for kind in texts.kinds(item)}
    splits = pa.array(np.concatenate([[0], np.cumsum(left.sum(axis=1))]), pa.int32())
    columns: dict[str, Any] = {of_user: ids, f"{of_user}_{TEXT}": texts.find(of_user, ids, TEXT)}
    for kind, flat in lists.items():
        columns[kind] = pa.ListArray.from_arrays(splits, pa.array(flat, schema.field(kind).type.value_type))
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _read_users(path: Path, hashed: Ints | None) -> Ints:
    """Read the users of a file as numbers; ``hashed`` has the known users if they are hashes of texts."""
    from pyarrow import lib, parquet

    try:
        with path.open("rb") as file:
            columnar = file.read(4) == b"PAR1"
        if columnar:
            given = parquet.read_table(path).column(0)
            if hashed is None or not is_text(given.type):
                return given.cast("int64").drop_null().to_numpy()  # raises for fractions
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
