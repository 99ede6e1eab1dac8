"""Opens a generation of a store, commits a new one, and finishes the work of a killed process.

A process may be killed at any point. If it has begun to delete generations, the next command of any kind that
uses the store finishes the deletion (`settle`): DROPPING names the generations before the first file is
removed. So events of deleted users don't stay on the disk until somebody drops generations again. A
generation that it didn't commit is removed by the next process that writes to the store.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

import numpy as np

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.files import explain_write_errors, lock_file, sync, write_atomically
from gmeta.core.history_manifest import (
    CURRENT,
    DROPPING,
    GENERATIONS,
    NEXT,
    HistoryManifest,
    Pointer,
    begin_to_drop,
    current_generation,
    dropping,
    folder_numbers,
    generation_folder,
    is_generation_name,
    newest_generation,
    read_index,
    shard_files,
    user_shards,
)
from gmeta.core.json_values import FILE_NAME
from gmeta.preprocess.history.shard_reader import ShardReader


class Generation:
    """A generation of a store, to read.

    Args:
      store: The store's folder.
      number: The generation's number; None: the newest.

    Attributes:
      manifest: Its manifest.

    Raises:
      DataError: There is no such store or generation, or its manifest is damaged.
    """

    def __init__(self, store: Path, number: int | None = None) -> None:
        newest = newest_generation(store)
        number = newest if number is None else number
        if number not in generations(store):
            raise DataError(
                f"there is no generation {number}; it has {show_numbers(generations(store))}",
                path=store,
            )
        self.store = store
        self.manifest = HistoryManifest.load(store, number)

    def files(self, shard: int) -> dict[int, Path]:
        """Return file number -> path, for each file that a shard's index may name."""
        return {
            number: shard_files(generation_folder(self.store, number), shard)[0]
            for number in self.manifest.reads
        }

    def open(self, shard: int) -> ShardReader:
        """Return a reader of a shard.

        Raises:
          DataError: The index is missing, or doesn't match the manifest.
        """
        path = shard_files(generation_folder(self.store, self.manifest.generation), shard)[1]
        data = read_index(self.store, self.manifest, shard)
        return ShardReader(data, self.files(shard), where=str(path))

    def is_deleted(self, user: int, generation: int | None = None) -> bool:
        """Return whether events of a user that a generation held have been deleted since.

        Args:
          user: The user.
          generation: The generation; None: any before this one.
        """
        shard = user_shards(np.array([user]), len(self.manifest.shards))[0]
        with closing(self.open(int(shard))) as reader:
            index = reader.index()
        by = index.deletions[index.users == user]
        return bool((by > max(0, generation or 0)).any())


def generations(store: Path) -> list[int]:
    """Return the numbers of the generations that a store has, ascending; not those that are being dropped."""
    newest, gone = current_generation(store), dropping(store)
    return [number for number in folder_numbers(store) if number <= newest and number not in gone]


def write_lock(store: Path) -> AbstractContextManager[None]:
    """Return the lock that the writer of a store holds.

    Raises:
      GmetaError: Another process holds it.
    """
    return lock_file(store / ".lock", f"another process writes to {store}: wait for it, or end it")


@contextmanager
def new_generation(store: Path, newest: int) -> Iterator[tuple[int, Path]]:
    """Fill the folder of a store's next generation, and commit it at the end.

    Only one process at a time may do so. If it ends before the commit, the store keeps its generation; the
    written files are removed when the next process begins, if not before.

    Args:
      store: The store's folder; it is made if it doesn't exist.
      newest: The generation that the caller has read; 0 if there was none.

    Yields:
      The generation's number, and an empty folder to fill.

    Raises:
      DataError: CURRENT doesn't name the newest generation.
      GmetaError: Another process writes to the store, or has done so meanwhile, or the disk is full.
    """
    with explain_write_errors(store):
        store.mkdir(parents=True, exist_ok=True)
        with write_lock(store):
            with suppress(OSError):  # `settle` has warned of it
                _remove(store, _dropped(store))
            _remove(store, _uncommitted(store))
            if current_generation(store) != newest:
                raise GmetaError(f"another process has written to {store} meanwhile: start again")
            number = newest + 1
            final = generation_folder(store, number)
            partial = final.with_name(f".{final.name}.partial")
            partial.mkdir(parents=True)
            try:
                yield number, partial
                sync(partial)
                digest = HistoryManifest.load_folder(partial, number).digest
                write_atomically(store / NEXT, str(Pointer(number, digest)))
                partial.rename(final)
                sync(final.parent)
                (store / NEXT).replace(store / CURRENT)
                sync(store)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


def remove_generations(store: Path, numbers: Collection[int]) -> None:
    """Remove generations that nothing needs; the caller holds `write_lock`."""
    _remove(store, _dropped(store))
    if numbers:
        begin_to_drop(store, numbers)
        sync(store)
        _remove(store, _dropped(store))


def settle(store: Path) -> list[str]:
    """Finish the deletions that a killed process has begun.

    Returns:
      The deletions that this process can't finish, one line each; none while another process writes to the
      store, since that process finishes them.

    Raises:
      DataError: DROPPING is damaged.
    """
    if not _dropped(store):
        return []
    try:
        with write_lock(store):
            _remove(store, _dropped(store))
    except OSError as error:
        return [
            f"{path}: its deletion was begun and isn't finished: {error.strerror}; run `gmeta history verify "
            f"{store}` where the store can be written"
            for path in _dropped(store)
            if path.name != DROPPING
        ]
    except DataError:
        raise
    except GmetaError:  # another process holds the lock
        return []
    return []


def settle_or_warn(store: Path) -> None:
    """Finish the deletions that a killed process has begun (`settle`), or warn that they aren't finished."""
    for line in settle(store):
        warnings.warn(line, stacklevel=3)


def find_left(store: Path) -> list[str]:
    """Return the remains of a killed process' uncommitted generations, one line each."""
    try:
        with write_lock(store):
            return [
                f"{path}: left by a process that was killed; the next append removes it"
                for path in _uncommitted(store)
            ]
    except (OSError, GmetaError):  # another process is writing, or this one can't
        return []


def find_strange(store: Path) -> list[str]:
    """Return the entries of the folder of generations that aren't the store's, one line each."""
    folder = store / GENERATIONS
    found = sorted(folder.iterdir()) if folder.exists() else []
    cut = [path for path in found if is_generation_name(path.name) and not (path / FILE_NAME).exists()]
    return [
        *(
            f"{path}: it has no manifest, and may hold events that were deleted: restore it, or drop it with "
            f"`gmeta history drop {store} {int(path.name)}`"
            for path in cut
        ),
        *(
            f"{path}: it isn't of the store, and may hold events that were deleted: move it elsewhere"
            for path in found
            if path.name[0] != "." and not is_generation_name(path.name)
        ),
    ]


def _dropped(store: Path) -> list[Path]:
    """Return the remains of generations whose deletion has begun, and the file that names them."""
    gone = dropping(store)
    found = [generation_folder(store, number) for number in folder_numbers(store) if number in gone]
    found += (store / GENERATIONS).glob(".*.removed")  # an older version of gmeta renamed them first
    return [*found, store / DROPPING] if gone else found


def _uncommitted(store: Path) -> list[Path]:
    """Return the existing parts of uncommitted generations, and the files that name them."""
    newest = current_generation(store)
    found = [generation_folder(store, number) for number in folder_numbers(store) if number > newest]
    found += (store / GENERATIONS).glob(".*.partial")
    found += [store / NEXT] if (store / NEXT).exists() else []
    return found + [path for name in (NEXT, DROPPING) for path in store.glob(f".{name}.*.tmp")]


def _remove(store: Path, paths: Sequence[Path]) -> None:
    """Remove folders, and then the files that name them, unless a folder can't be removed.

    Raises:
      OSError: A folder can't be removed; the others are removed.
    """
    failure: OSError | None = None
    for path in paths:
        try:
            if path.is_dir():
                shutil.rmtree(path)
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure
    if paths and (store / GENERATIONS).exists():
        sync(store / GENERATIONS)  # flushes the removal of the folders to the disk
    for path in paths:
        path.unlink(missing_ok=True)
    if paths:
        sync(store)


def show_numbers(generations: list[int]) -> str:
    """Format generations, in ascending order, for an error."""
    if not generations:
        return "none"
    if len(generations) > 8:
        return f"{generations[0]} to {generations[-1]}"
    return ", ".join(map(str, generations))
