"""A log of clicks with planted tastes, like a shop's: text for users, items, cities and tags."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from gmeta.core.data_manifest import Manifest
from gmeta.preprocess import PrepareConfig, prepare
from gmeta.preprocess.movielens.movielens_records import MELU_HEADER, PARTITIONS
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

TAGS = ("new", "sale", "red", "wool", "home", "toys", "books", "garden")


def click_log(users: int = 200, rows: int = 40, *, items: int = 60, seed: int = 0) -> pa.Table:
    """Draw rows of users who each like some tags and dislike others, and prefer cheap or expensive items.

    Args:
      users: The number of users.
      rows: The mean number of rows of a user, who has at least half as many.
      items: The number of items.
      seed: The seed of all draws.
    """
    rng = np.random.default_rng(seed)
    tags = [rng.choice(len(TAGS), rng.integers(1, 4), replace=False) for _ in range(items)]
    prices = np.exp(rng.normal(3.0, 1.0, items))
    taste = rng.normal(0.0, 2.0, (users, len(TAGS)))
    thrift = rng.normal(0.0, 1.0, users)
    user = np.repeat(np.arange(users), rng.integers(rows // 2, rows * 3 // 2, users))
    user = rng.permutation(user)
    item = rng.integers(0, items, len(user))
    liking = np.array([taste[u, tags[i]].sum() for u, i in zip(user, item, strict=True)])
    liking -= thrift[user] * (np.log(prices[item]) - 3.0)
    city = rng.integers(0, 5, users)
    return pa.table(
        {
            "user_id": [f"user-{number}" for number in user],
            "ts": np.arange(len(user)) + 1_700_000_000,
            "item_id": [f"item-{number}" for number in item],
            "city": [f"city {number}" for number in city[user]],
            "tags": [[TAGS[tag] for tag in tags[number]] for number in item],
            "price": np.round(prices[item], 2),
            "click": (rng.random(len(user)) < 1 / (1 + np.exp(-liking))).astype(np.int64),
        }
    )


def write_click_log(folder: Path, **options: int) -> Path:
    """Write `click_log` as two Parquet files below ``folder``, and return the pattern that names them."""
    return write_parts(click_log(**options), folder)


def write_parts(table: pa.Table, folder: Path) -> Path:
    """Write a table as two Parquet files below ``folder``, and return the pattern that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    half = table.num_rows // 2
    pyarrow.parquet.write_table(table.slice(0, half), folder / "part-0.parquet")
    pyarrow.parquet.write_table(table.slice(half), folder / "part-1.parquet")
    return folder / "*.parquet"


CLICK_SPEC = TableSpec(
    task="user_id",
    time="ts",
    label="click",
    columns={
        "user_id": ColumnSpec(hash=True),
        "item_id": ColumnSpec(hash=True),
        "city": ColumnSpec(hash=True),
        "tags": ColumnSpec(hash=True, is_list=True),
        "price": ColumnSpec(),
    },
)
"""The spec that `gmeta prepare --task user_id --time ts --label click` derives from it."""


def prepared_clicks(folder: Path, config: PrepareConfig | None = None, **options: int) -> Path:
    """Prepare a log of clicks below ``folder``."""
    prepare(str(write_click_log(folder / "clicks", **options)), folder / "data", config, spec=CLICK_SPEC)
    return folder / "data"


# Small tables of events for tests of preprocessing: drawn, written in every format, and as plain rows.

EVENT_SPEC = TableSpec(
    task="user",
    time="ts",
    label="click",
    columns={
        "user": ColumnSpec(dtype="int64"),
        "item": ColumnSpec(hash=True),
        "price": ColumnSpec(dtype="float32"),
        "tags": ColumnSpec(dtype="int64", is_list=True),
    },
)


def event_table(rows: int, *, users: int = 20, seed: int = 0) -> pa.Table:
    """A table that `EVENT_SPEC` fits: users with very different numbers of rows, and many equal times."""
    rng = np.random.default_rng(seed)
    tags = [rng.integers(0, 50, size).tolist() for size in rng.integers(0, 4, rows)]
    return pa.table(
        {
            "user": (users * rng.random(rows) ** 3).astype(np.int64) - 3,
            "ts": rng.integers(0, max(rows // 8, 1), rows),
            "item": [f"item {number}" for number in rng.integers(0, 30, rows)],
            "price": rng.integers(0, 1000, rows) / 8,
            "tags": pa.array(tags, pa.list_(pa.int64())),
            "click": rng.integers(0, 2, rows),
            "unused": ["x"] * rows,
        }
    )


def write_table(table: pa.Table, path: Path) -> Path:
    """Write a table in the format of its file's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=max(table.num_rows // 3, 1))
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{_json(row)}\n" for row in table.to_pylist()))
    else:
        flat = pa.table({name: _as_text(table[name]) for name in table.column_names})
        delimiter = "\t" if path.suffix == ".tsv" else ","
        pyarrow.csv.write_csv(flat, path, pyarrow.csv.WriteOptions(delimiter=delimiter))
    return path


def shuffled(table: pa.Table, seed: int = 0) -> pa.Table:
    """The rows in another order."""
    return table.take(np.random.default_rng(seed).permutation(table.num_rows))


def parts(table: pa.Table, cuts: Sequence[int]) -> list[pa.Table]:
    """The table cut before some of its rows."""
    edges = [0, *cuts, table.num_rows]
    return [table.slice(a, b - a) for a, b in itertools.pairwise(edges)]


def _as_text(column: pa.ChunkedArray) -> Any:
    if not pa.types.is_list(column.type):
        return column
    return ["|".join(map(str, values)) for values in column.to_pylist()]


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


# A small folder in the layout of MovieLens-1M with MeLU's split, with random ratings that follow tastes.

USERS, MOVIES = 40, 60
NAMES = {
    "rate": ["PG", "R", "G"],
    "genre": ["Drama", "nan", "Comedy", "War"],
    "director": ["nan", "Ada B.", "Béla C", "Cy D"],
    "actor": ["Ann (I)", "Bo", "nan", "Cleo", "Dee"],
    "gender": ["M", "F"],
    "age": ["1", "18", "56"],
    "occupation": ["0", "1", "2"],
    "zipcode": ["48067", "70072", "T8H1N"],
}
"""The vocabularies, each in the order of its numbers."""
WRITERS = ["Ada B.", "Cy D", "Émile"]
"""Names of writers, which have no file; a movie without writers has ``N/A``."""


def small_melu(folder: Path, seed: int = 0) -> Path:
    """Write `USERS` users who rated 14 to 20 movies in every partition, out of `MOVIES` movies."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for name, values in NAMES.items():
        (folder / f"m_{name}.txt").write_bytes("".join(f"{value}\r\n" for value in values).encode())
    users = []
    for user in range(1, USERS + 1):
        gender, age, occupation, zipcode = (str(draw.choice(NAMES[name])) for name in [*NAMES][4:])
        users.append(f"{user}::{gender}::{age}::{occupation}::{zipcode}-1234")
    (folder / "users.dat").write_text("\n".join(users) + "\n")
    movies, quality = [], draw.normal(3.3, 0.8, MOVIES + 1)
    for movie in range(1, MOVIES + 1):
        rate = draw.choice(NAMES["rate"])
        genres, directors, actors = (
            ", ".join(draw.choice(NAMES[name], draw.integers(1, 4), replace=False)).replace("nan", "N/A")
            for name in ("genre", "director", "actor")
        )
        writers = ", ".join(f"{name} (story, uncredited)" for name in WRITERS[: movie % 4]) or "N/A"
        movies.append(
            f"{movie}::Film {movie}::{1990 + movie % 9}::{rate}::1 Jan 1990::{genres}"
            f"::{directors}(co-director)::{writers}::{actors}::A plot: it thickens.::N/A"
        )
    (folder / "movies_extrainfos.dat").write_text("\r\n".join(movies) + "\r\n", encoding="utf-8", newline="")
    ratings = [MELU_HEADER.decode()]
    for partition in PARTITIONS:
        for user in range(1, USERS + 1):
            for movie in draw.choice(MOVIES, draw.integers(14, 21), replace=False) + 1:
                stars = int(np.clip(round(quality[movie] + draw.normal(0, 0.6)), 1, 5))
                ratings.append(f"{user},{movie},{stars},{partition}")
    write_ratings(folder, ratings)
    return folder


def write_ratings(folder: Path, lines: list[str]) -> None:
    """Write the ratings file, its header among the lines."""
    (folder / "ratings.csv.gz").write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))


def read_ratings(folder: Path) -> list[str]:
    """The lines of the ratings file."""
    return gzip.decompress((folder / "ratings.csv.gz").read_bytes()).decode().splitlines()


# Reads prepared records independently of gmeta's readers: with TensorFlow's own, or the plain reference.

Row = dict[str, list[int] | list[float]]


def read_shard(path: Path) -> list[Row]:
    """The rows of one TFRecord file of examples: column -> its values, a list even for one value."""
    import tensorflow as tf

    records = []
    for record in tf.data.TFRecordDataset([str(path)]).as_numpy_iterator():
        features = tf.train.Example.FromString(record).features.feature
        records.append({name: list(getattr(f, f.WhichOneof("kind")).value) for name, f in features.items()})
    return records


def read_groups(path: Path) -> list[Row]:
    """The rows of one file of groups, in the same form."""
    from support.reference.reader import decode, records

    found = []
    for _, payload in records(path):
        group = decode(payload)
        columns: dict[str, Any] = dict(
            zip(group.key_names, ([key] * group.rows for key in group.key), strict=True)
        )
        for name, values in group.columns.items():
            if isinstance(values, tuple):
                flat, ends = values[0].tolist(), values[1].tolist()
                columns[name] = [flat[a:b] for a, b in itertools.pairwise(ends)]
            else:
                columns[name] = values.tolist()
        for row in zip(*columns.values(), strict=True):
            pairs = zip(columns, row, strict=True)
            found.append({name: value if isinstance(value, list) else [value] for name, value in pairs})
    return found


def read_split(folder: Path, split: str) -> list[Row]:
    """The rows of all shards of a split, in order, in either layout."""
    manifest = Manifest.load(folder)
    read = read_shard if manifest.layout == "example" else read_groups
    return [row for shard in manifest.splits[split].shards for row in read(folder / shard.name)]
