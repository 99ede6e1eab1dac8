"""Generate the log of clicks that `make demo` starts from, and a new user's rows for its last step.

    python tools/dev/demo_clicks.py FOLDER

writes ``part-0.parquet``, ``part-1.parquet`` and ``new_user.json`` into FOLDER.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from support.data_files import write_parts

import numpy as np
import pyarrow as pa

USERS, ITEMS, ROWS = 400, 150, 40
NEW_USER = f"user-{USERS}"
DAYS = 60
CITIES = ("Basel", "Graz", "Leeds", "Nantes", "Turin")
AGES = ("18-24", "25-34", "35-49", "50+")
CATEGORIES = ("books", "garden", "home", "kitchen", "shoes", "toys")
TAGS = ("gift", "handmade", "new", "outdoor", "red", "sale", "vintage", "wool")
TASTES = 6

LAW = (
    "log-odds of a click = the item's appeal + the user's taste for it - the user's thrift * its log price; "
    "tastes follow age and city and drift from day to day, items follow category and tags, "
    "and a third of them appear during the log"
)


def shop_log(users: int = USERS + 1, items: int = ITEMS, rows: int = ROWS, *, seed: int = 0) -> pa.Table:
    """Draw the rows of users to whom a shop shows items over two months, by `LAW`.

    Args:
      users: The number of users.
      items: The number of items; popular ones are shown more often.
      rows: The mean number of rows of a user, who has at least half as many.
      seed: The seed of all draws.
    """
    rng = np.random.default_rng(seed)

    # Items: half of their differences come from category and tags, and half are individual.
    category = rng.integers(0, len(CATEGORIES), items)
    tags = [np.sort(rng.choice(len(TAGS), rng.integers(1, 4), replace=False)) for _ in range(items)]
    of_category = rng.normal(0.0, 1.0, (len(CATEGORIES), TASTES))
    of_tag = rng.normal(0.0, 1.0, (len(TAGS), TASTES))
    by_tags = np.stack([of_tag[each].sum(0) / np.sqrt(len(each)) for each in tags])
    style = (of_category[category] + by_tags) / 2 + rng.normal(0.0, 0.7, (items, TASTES))
    appeal = rng.normal(0.0, 0.5, items)
    price = np.exp(rng.normal(3.0, 0.8, items))
    first_day = np.where(rng.random(items) < 1 / 3, rng.uniform(0, 0.9 * DAYS, items), 0.0)
    shown = rng.zipf(1.6, items).clip(1, 20).astype(float) + 2

    # Users: a third of the differences of their tastes comes from age and city.
    age, city = rng.integers(0, len(AGES), users), rng.integers(0, len(CITIES), users)
    of_age, of_city = (rng.normal(0.0, 0.4, (len(each), TASTES)) for each in (AGES, CITIES))
    taste = of_age[age] + of_city[city] + rng.normal(0.0, 0.8, (users, TASTES))
    drift = rng.normal(0.0, 0.8 / np.sqrt(DAYS), (users, DAYS, TASTES)).cumsum(axis=1)
    thrift = rng.normal(0.3, 0.5, users)

    user = np.repeat(np.arange(users), rng.integers(rows // 2, rows * 3 // 2, users))
    when = rng.uniform(0, DAYS, len(user))
    order = np.argsort(when)
    user, when = user[order], when[order]
    weight = np.where(first_day <= when[:, None], shown, 0.0).cumsum(axis=1)
    item = (weight < rng.random((len(user), 1)) * weight[:, -1:]).sum(axis=1)
    liking = ((taste[user] + drift[user, when.astype(int)]) * style[item]).sum(axis=1)
    liking += appeal[item] - thrift[user] * (np.log(price[item]) - 3.0) - 0.5
    return pa.table(
        {
            "user_id": [f"user-{number}" for number in user],
            "ts": (when * 86_400).astype(np.int64) + 1_700_000_000,
            "item_id": [f"item-{number}" for number in item],
            "city": [CITIES[each] for each in city[user]],
            "age": [AGES[each] for each in age[user]],
            "category": [CATEGORIES[each] for each in category[item]],
            "tags": [[TAGS[tag] for tag in tags[each]] for each in item],
            "price": np.round(price[item], 2),
            "click": (rng.random(len(user)) < 1 / (1 + np.exp(-liking))).astype(np.int64),
        }
    )


def main(folder: Path, seed: int) -> None:
    """Write the files: the rows of one more user are written separately from the log."""
    table = shop_log(seed=seed)
    new = [row for row in table.to_pylist() if row["user_id"] == NEW_USER]
    write_parts(table.filter([user != NEW_USER for user in table["user_id"].to_pylist()]), folder)
    (folder / "new_user.json").write_text(json.dumps(new))
    print(f"{table.num_rows - len(new):,} rows of {USERS} users, and {len(new)} of a new one: {folder}")
    print(f"the law: {LAW}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="The seed of all draws.  [default: 0]")
    main(parser.parse_args().folder, parser.parse_args().seed)
