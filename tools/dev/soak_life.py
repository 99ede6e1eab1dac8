"""One life of the soak: restores what the previous life saved, continues, and may be killed at any moment.

    python tools/dev/soak_life.py FOLDER SEED LIFE UNTIL [DUMP]

It prints a line for each event. With DUMP it writes all tables there at the end, as one .npz file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import gmeta.ops as ops
from gmeta.checkpoint.store import CheckpointStore, step_of
from support.tables import sorted_records

import numpy as np
import tensorflow as tf
from soak_draw import rigs as rigs_of
from soak_trace import Profile, Trace

Tables = Mapping[str, ops.HashTable]
SAVE, RELOAD = 0.03, 0.01
"""The probability that an operation is followed by a save, or by a return to the last save."""


class Store(Protocol):
    """Saves tables, and the number of their operations."""

    def save(self, tables: Tables, done: int) -> None:
        """Save; an interruption leaves the previous save."""

    def load(self, tables: Tables) -> int:
        """Fill tables from the last save and return the number of their operations; 0 if there is none."""


class WholeStore:
    """`tf.train.Checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _manager(self, tables: Tables, done: int = 0) -> tuple[tf.train.CheckpointManager, tf.Variable]:
        count = tf.Variable(done, dtype=tf.int64)
        checkpoint = tf.train.Checkpoint(tables=dict(tables), done=count)
        return tf.train.CheckpointManager(checkpoint, str(self._folder), max_to_keep=2), count

    def save(self, tables: Tables, done: int) -> None:
        """See `Store`."""
        self._manager(tables, done)[0].save(checkpoint_number=done)

    def load(self, tables: Tables) -> int:
        """See `Store`."""
        manager, count = self._manager(tables)
        if manager.latest_checkpoint is None:
            return 0
        manager.checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
        return int(count)


class ShardedStore:
    """`gmeta.checkpoint.store.CheckpointStore`: full checkpoints and increments on them."""

    def __init__(self, folder: Path) -> None:
        # A short journal sometimes overflows, which makes a full checkpoint.
        self._store = CheckpointStore(folder, keep=2, max_increments=4, journal=2000)

    def save(self, tables: Tables, done: int) -> None:
        """See `Store`."""
        self._store.save(tables, done)

    def load(self, tables: Tables) -> int:
        """See `Store`."""
        latest = self._store.latest()
        if latest is None:
            return 0
        self._store.load(tables, latest)
        return step_of(latest)


class Rig:
    """Tables that are saved together, and the number of their operations."""

    def __init__(self, name: str, profiles: tuple[Profile, ...], store: Store, seed: int) -> None:
        self.name, self._profiles, self._store, self._seed = name, profiles, store, seed
        self._traces = {profile.name: Trace(seed, profile) for profile in profiles}
        self.load()

    def load(self) -> None:
        """Start again from the last save, with new tables."""
        self.tables = {p.name: ops.HashTable(**p.settings(), seed=self._seed) for p in self._profiles}
        self.done = self.saved = self._store.load(self.tables)
        print(f"{self.name}: loaded {self.done}", flush=True)

    def save(self) -> None:
        """Save, unless nothing has changed since the last save."""
        if self.done > self.saved:
            print(f"{self.name}: saving {self.done}", flush=True)
            self._store.save(self.tables, self.done)
            self.saved = self.done
            print(f"{self.name}: saved {self.done}", flush=True)

    def step(self) -> None:
        """Run the next operation on every table."""
        for name, table in self.tables.items():
            self._traces[name].apply(self.done, table)
        self.done += 1


def live(folder: Path, seed: int, life: int, until: int) -> list[Rig]:
    """Bring all rigs to operation ``until``, saving and returning to saves at random, and save."""
    random = np.random.default_rng([seed, life])
    stores = {"whole": WholeStore(folder / "whole"), "sharded": ShardedStore(folder / "sharded")}
    rigs = [Rig(name, profiles, stores[name], seed) for name, profiles in rigs_of(seed).items()]
    while True:
        rig = min(rigs, key=lambda rig: rig.done)
        if rig.done >= until:
            break
        rig.step()
        chance = random.random()
        if chance < SAVE:
            rig.save()
        elif chance < SAVE + RELOAD:
            rig.load()
    for rig in rigs:
        rig.save()
    return rigs


def dump(rigs: list[Rig], path: Path) -> None:
    """Write the records of all tables, as ``rig/table/part``."""
    arrays = {
        f"{rig.name}/{name}/{part}": value
        for rig in rigs
        for name, table in rig.tables.items()
        for part, value in (
            *sorted_records(table).items(),
            ("half_rows", table.statistics().half_rows.numpy()),
        )
    }
    np.savez(path, **arrays)


if __name__ == "__main__":
    found = live(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
    if len(sys.argv) > 5:
        dump(found, Path(sys.argv[5]))
