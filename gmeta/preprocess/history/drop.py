"""Drops generations of a store that nothing needs."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta.core.data.history_manifest import HistoryManifest, generation_folder, newest_generation
from gmeta.core.data.manifest_file import FILE_NAME, SealedManifest, load_manifest_file
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.json_values import items, text
from gmeta.core.staging import explain_write_errors
from gmeta.preprocess.history.example_sets import refuse_needed, registration_lock
from gmeta.preprocess.history.files.generation import (
    generations,
    remove_generations,
    settle_or_warn,
    write_lock,
)

_INPUTS, _FORMAT, _VERSION = "dropped-inputs.json", "gmeta-history-inputs", 1


def drop_generations(store: str | os.PathLike[str], numbers: Collection[int]) -> None:
    """Remove generations of a store that no other generation needs.

    If the process is killed, the next command that uses the store removes the rest.

    Args:
      store: The store's folder.
      numbers: Which; the newest can't be one of them.

    Raises:
      ConfigError: A generation isn't there, or another one that stays reads its stripes, or a registered set
        of examples names it; nothing is removed.
      DataError: There is no store, or a manifest is damaged.
      GmetaError: The store can't be written, or another process writes to it.
    """
    store, doomed = Path(store), set(numbers)
    newest = newest_generation(store)
    settle_or_warn(store)
    with explain_write_errors(store), write_lock(store), registration_lock(store):
        there = generations(store)
        if absent := sorted(doomed - set(there)):
            raise ConfigError(f"{store} has no generation {absent[0]}; it has {', '.join(map(str, there))}")
        if newest in doomed:
            raise ConfigError(f"generation {newest} is the newest of {store}: readers open it")
        refuse_needed(store, doomed)
        cut = {number for number in doomed if not (generation_folder(store, number) / FILE_NAME).exists()}
        manifests = {number: HistoryManifest.load(store, number) for number in there if number not in cut}
        for number in sorted(set(there) - doomed):
            if needed := sorted(doomed & set(manifests[number].reads)):
                raise ConfigError(
                    f"generation {number} of {store} reads stripes of generation {needed[0]}: run `gmeta "
                    "history compact`, and drop all generations before the one that it makes"
                )
        stay = {digest for number in set(there) - doomed for digest in manifests[number].inputs.values()}
        gone = {digest for number in doomed - cut for digest in manifests[number].inputs.values()} - stay
        if gone:
            DroppedInputs(tuple(sorted(gone | dropped_inputs(store)))).save(store, _INPUTS)
        remove_generations(store, doomed)


@dataclass(frozen=True)
class DroppedInputs(SealedManifest):
    """The files of which dropped generations were made: their events may still be in the store.

    Attributes:
      digests: Their digests, ascending.
    """

    digests: tuple[str, ...]

    def _body(self) -> dict[str, Any]:
        return {"format": _FORMAT, "version": _VERSION, "digests": list(self.digests)}


def dropped_inputs(store: Path) -> frozenset[str]:
    """Return the digests of the files of which dropped generations were made, unless another one has them.

    Raises:
      DataError: The file that has them is damaged.
    """
    path, advice = store / _INPUTS, "restore the file: without it, files may be appended twice"
    if not path.exists():
        return frozenset()
    value = load_manifest_file(path, _FORMAT, _VERSION, advice=advice, older="use the gmeta that wrote it")
    try:
        found = DroppedInputs(tuple(text(one, "a digest") for one in items(value["digests"], "digests")))
    except (KeyError, ValueError) as error:
        raise DataError(" ".join(str(error).split()), path=path, advice=advice) from error
    if found.digest != value.get("digest"):
        raise DataError("its digest doesn't match its content: it was edited", path=path, advice=advice)
    return frozenset(found.digests)
