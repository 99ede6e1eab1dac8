"""A file that names users of a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import DataError
from gmeta.core.json_values import short
from gmeta.preprocess.history.files.generation import Generation
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.plan.column_values import hash_text


def read_users(path: Path, store: Path) -> NDArray[np.int64]:
    """Read a file of users, one a line, as the tables that were appended name them.

    Args:
      path: A file of text. Blank lines are passed over.
      store: The store's folder. If its users are text, each line is hashed as an append hashes it.

    Returns:
      (U,) int64.

    Raises:
      DataError: The file can't be read, or a line is no int64; or there is no store.
    """
    spec = HistorySpec.from_json(Generation(store).manifest.spec)
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"can't read it: {getattr(error, 'strerror', None) or error}", path=path) from error
    users = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if spec.columns[spec.user].hash:
            users.append(hash_text(line))
            continue
        try:
            users.append(int(np.int64(int(line))))
        except (ValueError, OverflowError) as error:
            raise DataError(f"a user must be an int64, got {short(line)}", path=path, line=number) from error
    return np.array(users, np.int64)
