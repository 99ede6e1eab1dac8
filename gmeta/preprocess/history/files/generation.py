"""Opens a generation of a store, and moves the store to a new one."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import numpy as np

from gmeta.core.data.history_manifest import (
    CURRENT,
    GENERATIONS,
    HistoryManifest,
    current_generation,
    generation_folder,
    newest_generation,
    shard_files,
    user_shards,
)
from gmeta.core.errors import DataError, GmetaError
from gmeta.core.files import sync, write_atomically
from gmeta.core.staging import explain_write_errors, lock_file
from gmeta.preprocess.history.files.shard_reader import ShardReader


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
        if not 1 <= number <= newest or not generation_folder(store, number).exists():
            raise DataError(
                f"there is no generation {number}; it has {show_numbers(generations(store))}",
                path=store,
            )
        self.store = store
        self.manifest = HistoryManifest.load(store, number)

    def files(self, shard: int) -> dict[int, Path]:
        """Return the number of each file that a shard's index may name -> its path."""
        return {
            number: shard_files(generation_folder(self.store, number), shard)[0]
            for number in self.manifest.reads
        }

    def open(self, shard: int) -> ShardReader:
        """Return a reader of a shard.

        Raises:
          DataError: The index is missing, or isn't the one that the manifest means.
        """
        path = shard_files(generation_folder(self.store, self.manifest.generation), shard)[1]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"can't read it: {error.strerror}", path=path) from error
        if hashlib.sha256(data).hexdigest() != self.manifest.shards[shard].index_sha256:
            raise DataError(
                "its SHA-256 isn't the one in the manifest",
                path=path,
                advice="restore the file, or take another generation",
            )
        return ShardReader(data, self.files(shard), where=str(path))

    def is_deleted(self, user: int, generation: int | None = None) -> bool:
        """Return whether events of a user that a generation held have been deleted since.

        Args:
          user: The user.
          generation: Which generation; None: any before this one.
        """
        shard = user_shards(np.array([user]), len(self.manifest.shards))[0]
        with closing(self.open(int(shard))) as reader:
            index = reader.index()
        by = index.deletions[index.users == user]
        return bool((by > max(0, generation or 0)).any())


def generations(store: Path) -> list[int]:
    """Return the numbers of the generations that a store has, ascending."""
    newest = current_generation(store)
    found = (int(path.name) for path in (store / GENERATIONS).glob("[0-9]*"))
    return sorted(number for number in found if number <= newest)


def write_lock(store: Path) -> AbstractContextManager[None]:
    """Return the lock that whoever writes to a store holds.

    Raises:
      GmetaError: Another process holds it.
    """
    return lock_file(store / ".lock", f"another process writes to {store}: wait for it, or end it")


@contextmanager
def new_generation(store: Path, newest: int) -> Iterator[tuple[int, Path]]:
    """Fill the folder of a store's next generation, and move CURRENT to it at the end.

    One process at a time does so. Whatever ends it leaves the store at the generation that it had; what it
    had written is removed at the latest when the next one begins.

    Args:
      store: The store's folder; it is made if it isn't there.
      newest: The generation that the caller has read; 0 if there was none.

    Yields:
      The generation's number, and an empty folder to fill.

    Raises:
      GmetaError: Another process writes to the store, or has done so meanwhile, or the disk is full.
    """
    with explain_write_errors(store):
        store.mkdir(parents=True, exist_ok=True)
        with write_lock(store):
            if current_generation(store) != newest:
                raise GmetaError(f"another process has written to {store} meanwhile: begin anew")
            number = newest + 1
            final = generation_folder(store, number)
            partial = final.with_name(f".{final.name}.partial")
            for left in (partial, final):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                yield number, partial
                sync(partial)
                partial.rename(final)
                sync(final.parent)
                write_atomically(store / CURRENT, f"{number}\n")
                sync(store)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


def show_numbers(generations: list[int]) -> str:
    """Return a text that names generations, which ascend, as an error does."""
    if not generations:
        return "none"
    if len(generations) > 8:
        return f"{generations[0]} to {generations[-1]}"
    return ", ".join(map(str, generations))
