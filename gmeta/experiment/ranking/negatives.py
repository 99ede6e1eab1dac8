"""Negatives for data with only positive rows: copies of rows with other items and the label 0.

They are drawn once, after the protocol has cut the rows, for training, validation and test alike. So all
methods and baselines see the same rows, in all epochs and with all seeds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from gmeta.experiment.baselines.attributes import belongs
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.plan.drawn_negatives import DrawnNegatives
from gmeta.preprocess.source import Columns, Values, join_rows, row_count, single, take

_TRIES = 16


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
    for number, part in enumerate(parts):
        seen = np.concatenate(parts[: number + 1])
        held = np.unique((users * len(first) + items)[seen[positive[seen]]])
        pool = items[seen] if settings.law == "popularity" else np.unique(items[seen])
        rows = part[positive[part]]
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
        found.append(np.concatenate([part, np.arange(end, end + len(source))]))
        end += len(source)
    return join_rows(added), found
