"""gmeta's own format: stripes in a file, and the index of a shard."""

from __future__ import annotations

from pathlib import Path

from gmeta.preprocess.history.shard_reader import PLACE, Index, ShardReader, StripeEncoder, encode_index

import numpy as np
from numpy.typing import NDArray
from parts.history_formats.events import COLUMNS, READ, Events
from parts.history_formats.newest import Histories


class GMeta:
    """A shard in gmeta's format.

    Args:
      folder: An empty one, for its file.
      events: The events to store.

    Attributes:
      size: Bytes of its file and its index.
    """

    def __init__(self, folder: Path, events: Events) -> None:
        owners, begins, ends = events.stripes()
        encoder = StripeEncoder()
        data, byte_ends = encoder.encode([events.columns[name] for name in COLUMNS], ends)
        encoder.close()
        places = np.zeros(len(ends), PLACE)
        places["offset"] = np.concatenate([[0], byte_ends[:-1]])
        places["bytes"] = byte_ends - places["offset"]
        places["events"] = ends - begins
        places["first"], places["last"] = events.columns["time"][begins], events.columns["time"][ends - 1]
        places["born_first"] = np.minimum.reduceat(events.columns["birth"], begins)
        places["born_last"] = np.maximum.reduceat(events.columns["birth"], begins)
        user_ends = np.searchsorted(owners, np.arange(len(events.users)), side="right")
        index = encode_index(Index(events.users, user_ends, np.zeros_like(events.users), places))
        (folder / "stripes").write_bytes(data)
        self.size = len(data) + len(index)
        self._reader = ShardReader(index, {0: folder / "stripes"}, where="the index")
        self._columns = [COLUMNS.index(name) for name in READ]

    def scan(self, requests: NDArray[np.void], longest: int) -> Histories:
        """Answer requests.

        Args:
          requests: (R,) `REQUEST`.
          longest: The most events of a request, the newest.

        Returns:
          Their histories.
        """
        found = self._reader.scan(requests, self._columns, longest=longest)
        return Histories(found.row_splits, found.columns)
