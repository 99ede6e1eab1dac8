"""A log of clicks with planted tastes, as a shop would have it: text for users, items, cities and tags."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from gmeta.preprocess import ColumnSpec, PrepareConfig, TableSpec, prepare

TAGS = ("new", "sale", "red", "wool", "home", "toys", "books", "garden")


def click_log(users: int = 200, rows: int = 40, *, items: int = 60, seed: int = 0) -> pa.Table:
    """Rows of users, each of whom likes some tags and dislikes others, and cheap things or dear ones.

    Args:
      users: How many users.
      rows: Rows of a user on average, half as many at least.
      items: How many items.
      seed: Gives everything.
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
    """Write `click_log` as two Parquet files below ``folder``; the pattern that names them."""
    return write_parts(click_log(**options), folder)


def write_parts(table: pa.Table, folder: Path) -> Path:
    """Write a table as two Parquet files below ``folder``; the pattern that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    half = table.num_rows // 2
    pyarrow.parquet.write_table(table.slice(0, half), folder / "part-0.parquet")
    pyarrow.parquet.write_table(table.slice(half), folder / "part-1.parquet")
    return folder / "*.parquet"


SPEC = TableSpec(
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
"""What `gmeta prepare --task user_id --time ts --label click` makes of it."""


def prepared_clicks(folder: Path, config: PrepareConfig | None = None, **options: int) -> Path:
    """Prepare a log of clicks below ``folder``."""
    prepare(str(write_click_log(folder / "clicks", **options)), folder / "data", config, spec=SPEC)
    return folder / "data"
