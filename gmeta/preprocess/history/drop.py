"""Drops generations of a store that nothing needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from gmeta.core.data.history_manifest import GENERATIONS, HistoryManifest, generation_folder
from gmeta.core.errors import ConfigError
from gmeta.core.files import sync
from gmeta.core.staging import explain_write_errors
from gmeta.preprocess.history.example_sets import refuse_needed, registration_lock
from gmeta.preprocess.history.files.generation import generations, write_lock


def drop_generations(store: str | os.PathLike[str], numbers: Collection[int]) -> None:
    """Remove generations of a store that no other generation needs.

    Args:
      store: The store's folder.
      numbers: Which; the newest can't be one of them.

    Raises:
      ConfigError: A generation isn't there, or another one that stays reads its stripes, or a registered set
        of examples names it; nothing is removed.
      GmetaError: The store can't be written, or another process writes to it.
    """
    store, doomed = Path(store), set(numbers)
    with explain_write_errors(store), write_lock(store), registration_lock(store):
        there = generations(store)
        if absent := sorted(doomed - set(there)):
            raise ConfigError(f"{store} has no generation {absent[0]}; it has {', '.join(map(str, there))}")
        if there[-1] in doomed:
            raise ConfigError(f"generation {there[-1]} is the newest of {store}: readers open it")
        refuse_needed(store, doomed)
        for number in sorted(set(there) - doomed):
            if needed := sorted(doomed & set(HistoryManifest.load(store, number).reads)):
                raise ConfigError(
                    f"generation {number} of {store} reads stripes of generation {needed[0]}: run `gmeta "
                    "history compact`, and drop all generations before the one that it makes"
                )
        for number in sorted(doomed):
            folder = generation_folder(store, number)
            folder.rename(folder.with_name(f".{folder.name}.removed"))
            sync(folder.parent)
        for removed in (store / GENERATIONS).glob(".*.removed"):  # also those of a process that was killed
            shutil.rmtree(removed)
