"""Histories of a text file, a user a line, in the order of time: Amazon Beauty, Toys and Games, Yelp."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import tensorflow as tf
from histories import FEWEST, LeaveLastOut

from gmeta.core.errors import DataError

NAMES = {"beauty": "Beauty.txt", "toys": "Toys_and_Games.txt", "yelp": "Yelp.txt"}


FOLDERS = (Path("data/sequences"), Path("../shared/data/sequences"))


def find_file(name: str, folder: Path | None) -> Path | None:
    """Find the file of one of `NAMES`, in a folder or else in one of `FOLDERS`; None: it is no such name.

    Raises:
      DataError: There is no such file.
    """
    if name.lower() not in NAMES:
        return None
    folders = FOLDERS if folder is None else (folder,)
    for each in folders:
        if (path := each / NAMES[name.lower()]).exists():
            return path
    raise DataError(
        f"no {NAMES[name.lower()]} in {' or '.join(map(str, folders))}",
        advice="say by --folder or GMETA_SEQUENCES where it is, or give its path",
    )


def read_sequences(path: Path) -> LeaveLastOut:
    """Read lines of the form ``user item item …``; the last item of a line is the test.

    In these files an item's id tells when it first occurred, so that ids alone would tell an answer. So items
    are numbered in the order of a hash of their ids.

    Raises:
      DataError: A line isn't of that form, or no user has `FEWEST` items.
    """
    rows = _read_rows(path)
    ids, numbers = _number(rows)
    whole = tf.RaggedTensor.from_row_lengths(
        tf.constant(numbers[np.searchsorted(ids, np.concatenate(rows))], tf.int64), [*map(len, rows)]
    )
    train, validation = ({"item": whole[:, :-held]} for held in (2, 1))
    return LeaveLastOut(path.stem.lower(), len(ids), train, validation, {"item": whole})


def read_attributes(path: Path) -> dict[int, list[int]]:
    """Read the attributes of the items of a file of sequences, by the numbers that `read_sequences` gives.

    They stand beside it, in ``<name>_item2attributes.json``: a mapping from an item's id to numbers.

    Raises:
      DataError: There is no such file, or it isn't of that form.
    """
    beside = path.with_name(f"{path.stem}_item2attributes.json")
    try:
        found = {int(item): list(map(int, each)) for item, each in json.loads(beside.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"no mapping from items to attributes: {error}", path=beside) from error
    ids, numbers = _number(_read_rows(path))
    places = np.searchsorted(ids, [*found])
    known = [place < len(ids) and ids[place] == item for place, item in zip(places, found, strict=True)]
    return {
        int(numbers[place]): each
        for place, here, each in zip(places, known, found.values(), strict=True)
        if here
    }


def _read_rows(path: Path) -> list[list[int]]:
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            _, *items = map(int, line.split())
        except ValueError as error:
            raise DataError(f"not a line of whole numbers: {error}", path=path, line=number) from error
        if len(items) >= FEWEST:
            rows.append(items)
    if not rows:
        raise DataError(f"no user has {FEWEST} items", path=path)
    return rows


def _number(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of all items, sorted, and the number of each."""
    ids = np.unique(np.concatenate(rows))
    ranks = np.argsort([hashlib.blake2b(str(each).encode(), digest_size=8).digest() for each in ids])
    numbers = np.empty(len(ids), np.int64)
    numbers[ranks] = np.arange(len(ids))
    return ids, numbers
