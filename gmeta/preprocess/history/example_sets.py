"""Sets of examples that point into a store, and the generations that they keep.

::

    store/examples/clicks.json    the path of the set "clicks", the digest of its manifest, its generations

A set's examples name the generation that a ranker read. As long as the set is registered, that generation
stays: `drop_generations` refuses to remove it. The set itself may be anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import explain_write_errors, lock_file, sync
from gmeta.core.history_manifest import (
    DROPPED_INPUTS,
    DroppedInputs,
    HistoryManifest,
    dropped_inputs,
    generation_folder,
    newest_generation,
)
from gmeta.core.json_values import (
    FILE_NAME,
    SealedManifest,
    folder_name,
    load_manifest_file,
    text,
    whole,
    wholes,
)
from gmeta.preprocess.history.generation import generations, remove_generations, settle_or_warn, write_lock

FOLDER, FORMAT, VERSION = "examples", "gmeta-history-examples", 1


@dataclass(frozen=True)
class ExampleSet(SealedManifest):
    """A store's registration of a set of examples.

    Attributes:
      name: The set's name in the store.
      folder: The prepared data set, an absolute path.
      manifest: The digest of its manifest.
      rows: The number of its exposures.
      generations: The generations that its rows name, ascending.
      longest: The largest number of events of a history.
    """

    name: str
    folder: str
    manifest: str
    rows: int
    generations: tuple[int, ...]
    longest: int

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "folder": self.folder,
            "manifest": self.manifest,
            "rows": self.rows,
            "generations": list(self.generations),
            "longest": self.longest,
        }

    @property
    def exists(self) -> bool:
        """Whether its folder exists."""
        return Path(self.folder).exists()


def register(store: Path, examples: ExampleSet) -> None:
    """Register a set, and replace a registered set of the same name.

    Raises:
      DataError: A generation that it reads doesn't exist.
      GmetaError: The store can't be written, or another process changes the registrations.
    """
    with explain_write_errors(store), registration_lock(store):
        absent = sorted({*examples.generations} - {*generations(store)})
        if absent:
            raise DataError(
                f"generation {absent[0]}, which the examples at {examples.folder} read, isn't there any more",
                path=store,
                advice="make them again",
            )
        folder = store / FOLDER
        folder.mkdir(exist_ok=True)
        for left in folder.glob(".*.tmp"):  # of a process that was killed
            left.unlink()
        examples.save(folder, f"{examples.name}.json")
        sync(folder)
        sync(store)


def remove_examples(store: str | os.PathLike[str], name: str) -> None:
    """Unregister a set of examples from a store; the set itself stays where it is.

    Generations that only this set needed can then be dropped.

    Args:
      store: The store's folder.
      name: The set's name.

    Raises:
      ConfigError: There is no such set.
      DataError: There is no store.
      GmetaError: The store can't be written, or another process changes the registrations.
    """
    store = Path(store)
    newest_generation(store)
    settle_or_warn(store)
    with explain_write_errors(store), registration_lock(store):
        path = store / FOLDER / f"{name}.json"
        names = [each.stem for each in _files(store)]
        if name not in names:
            raise ConfigError(f"{store} has no set of examples {name!r}; it has {', '.join(names) or 'none'}")
        path.unlink()
        sync(path.parent)


def list_examples(store: str | os.PathLike[str]) -> list[ExampleSet]:
    """Return the sets of examples that are registered in a store, by name.

    Raises:
      DataError: There is no store, or a registration is damaged.
    """
    newest_generation(Path(store))
    settle_or_warn(Path(store))
    return [_load(path) for path in _files(Path(store))]


def registration_lock(store: Path) -> AbstractContextManager[None]:
    """Return the lock that is held to register a set or to drop generations.

    Raises:
      GmetaError: Another process holds it.
    """
    return lock_file(
        store / ".examples.lock", f"another process changes the sets of examples of {store}: run this again"
    )


def refuse_needed(store: Path, doomed: Set[int]) -> None:
    """Refuse to drop generations that a registered set reads.

    Raises:
      ConfigError: A set reads one of them.
      DataError: A registration is damaged.
    """
    for examples in list_examples(store):
        if needed := sorted(doomed & {*examples.generations}):
            raise ConfigError(
                f"the examples {examples.name!r} at {examples.folder} read generation {needed[0]} of {store}"
                ": keep it, or unregister them with `gmeta history examples "
                f"{store} --remove {examples.name}`"
            )


def find_faults(store: Path) -> Iterator[str]:
    """Yield the faults of the registered sets, one line each.

    Each set must be at its folder, with its files and the manifest that was registered, and the generations
    that it reads must exist.
    """
    there = {*generations(store)}
    for path in _files(store):
        try:
            examples = _load(path)
            manifest = Manifest.load(Path(examples.folder))
        except DataError as error:
            yield f"examples {path.stem!r}: {error}"
            continue
        if manifest.digest != examples.manifest:
            yield (
                f"examples {path.stem!r}: {examples.folder} holds another data set than the one that was "
                "registered: make them again with `gmeta history examples`"
            )
        if absent := sorted({*examples.generations} - there):
            yield f"examples {path.stem!r}: they read generation {absent[0]}, which isn't there"


def _files(store: Path) -> list[Path]:
    return sorted((store / FOLDER).glob("*.json"))


def _load(path: Path) -> ExampleSet:
    advice = f"make the examples again, or unregister them with --remove {path.stem}"
    value = load_manifest_file(
        path, FORMAT, VERSION, advice=advice, older="read the store with the gmeta that wrote it"
    )
    try:
        examples = ExampleSet(
            folder_name(value["name"], "name"),
            text(value["folder"], "folder"),
            text(value["manifest"], "manifest"),
            whole(value["rows"], "rows"),
            tuple(wholes(value["generations"], "generations")),
            whole(value["longest"], "longest", 1),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(" ".join(str(error).split()), path=path, advice=advice) from error
    if examples.digest != value.get("digest") or examples.name != path.stem:
        raise DataError("its digest doesn't match its content: it was edited", path=path, advice=advice)
    return examples


# Drops generations of a store that nothing needs.


def drop_generations(store: str | os.PathLike[str], numbers: Collection[int]) -> None:
    """Remove generations of a store that no other generation needs.

    If the process is killed, the next command that uses the store removes the rest.

    Args:
      store: The store's folder.
      numbers: The generations to remove; the newest can't be removed.

    Raises:
      ConfigError: A generation doesn't exist, a remaining generation reads its stripes, or a registered set
        of examples names it; nothing is removed then.
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
            DroppedInputs(tuple(sorted(gone | dropped_inputs(store)))).save(store, DROPPED_INPUTS)
        remove_generations(store, doomed)
