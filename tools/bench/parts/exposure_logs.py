"""Generated logs of exposures, and batches of their users for training, validation and test."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta import io
from gmeta.metrics import UserGAUC
from gmeta.preprocess import HistorySpec, PrepareConfig, prepare
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.synthetic.exposures import EXPOSURE_SPEC, ExposureConfig, write_exposures

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import tensorflow as tf
from parts.exposure_rankers import CONTEXTS, HISTORY, TARGETS, TIME

LABELS = ["click", "buy"]
COLD = 5  # every fifth user is new to the model; half of these are for validation, the others for test
LAWS: dict[str, dict[str, float]] = {
    "recent": {},
    "lasting": {"now": 0.5, "next": 0.5, "taste": 6.0},
    "slow": {"fresh": 0.05, "drift": 0.0005, "focus": 0.15},
}


EVENTS = HistorySpec("user", TIME, groups={"events": tuple(HISTORY)})
"""The columns of events in a store of histories."""


@dataclass(frozen=True)
class Batches:
    """Settings for reading users' sequences.

    Attributes:
      tokens: The approximate tokens of a batch.
      users: The users of a batch, instead of tokens; None: as many as have about `tokens`.
      store: The store of the histories; None: they are stored with the exposures.
      longest: Most events of a history; None: all.
    """

    tokens: int = 6000
    users: int | None = None
    store: Path | None = None
    longest: int | None = None

    def read(self, path: Path, *, labels: list[str] = LABELS, **options: Any) -> tf.data.Dataset:
        """Return the batches of a split; `options` are those of `gmeta.io.ReadOptions`."""
        columns: dict[str, Any] = {
            "contexts": CONTEXTS,
            "history": [*HISTORY, TIME],
            "targets": [*TARGETS, TIME],
            "labels": labels,
            "longest": self.longest,
            "options": io.ReadOptions(**options),
        }
        if self.users is not None:
            columns["sequences_per_batch"] = self.users
        if self.store is not None:
            return io.late(path, io.HistoryStore(self.store), **columns)
        balance = io.Balance(self.tokens) if self.users is None else None
        return io.sequences(path, exposed=io.Flag("exposed"), balance=balance, **columns)


def prepare_log(
    out: Path, log: ExposureConfig, *, store: Path | None = None, batch_rows: int | None = None
) -> Path:
    """Generate the log and prepare it anew; old users are its split ``warm``.

    Beside it is a folder of the new users, ``new-<seed>``: ``warm`` is for validation, ``cold`` for test.
    Events that precede no exposure are left out.

    Args:
      out: The folder to write to.
      log: The log.
      store: The folder for a store of all events; the data sets then have only exposures.
      batch_rows: Exposures of an example; None: all of a user.
    """
    table, folder = out / f"log-{log.seed}.parquet", out / f"data-{log.seed}"
    halves = out / f"new-{log.seed}.parquet"
    rows = seen(pyarrow.parquet.read_table(write_exposures(table, log)))
    if store is not None:
        shown = pyarrow.array(rows["exposed"].to_numpy() == 1)
        keep_events(store, rows.filter(pyarrow.compute.invert(shown)))
        rows = rows.filter(shown)
    new = pyarrow.array(rows["user"].to_numpy() % COLD == 0)
    pyarrow.parquet.write_table(rows, table)
    pyarrow.parquet.write_table(rows.filter(new), halves)
    for source, into, modulus in ((table, folder, COLD), (halves, out / f"new-{log.seed}", 2 * COLD)):
        config = PrepareConfig(cold_modulus=modulus, seed=log.seed, batch_rows=batch_rows)
        prepare([source], into, config, spec=EXPOSURE_SPEC, overwrite=True)
    return folder


def seen(rows: pyarrow.Table) -> pyarrow.Table:
    """Leave out events that are no earlier than their user's last exposure: no exposure sees them."""
    user, time, exposed = (rows[name].to_numpy() for name in ("user", TIME, "exposed"))
    last = np.full(user.max() + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, user[exposed == 1], time[exposed == 1])
    return rows.filter(pyarrow.array((exposed == 1) | (time < last[user])))


def keep_events(store: Path, events: pyarrow.Table) -> None:
    """Make the store of the events, replacing an existing one."""
    if (store / "CURRENT").exists():
        shutil.rmtree(store)
    table = store.with_suffix(".parquet")
    pyarrow.parquet.write_table(events, table)
    append_history(store, table, EVENTS)


def parts(
    folder: Path, seed: int, batches: Batches
) -> tuple[tf.data.Dataset, tf.data.Dataset, tf.data.Dataset]:
    """Read the old users, in another order each epoch, and the new ones for validation and for test."""
    new = folder.parent / f"new-{seed}"
    old = batches.read(folder / "warm", seed=seed)
    return old, *(batches.read(new / split, shuffle=False) for split in ("warm", "cold"))


def oracle(path: Path, batches: Batches) -> dict[str, float]:
    """GAUC of the probabilities that the log was drawn with: no ranking does better, except by chance."""
    metrics = {"ctr": UserGAUC(), "ctcvr": UserGAUC()}
    for batch in batches.read(path, labels=[*LABELS, "p_click", "p_buy"], shuffle=False):
        labels = batch["labels"]
        of = tf.repeat(batch["task"], labels["click"].row_lengths())
        for task, label in (("ctr", "click"), ("ctcvr", "buy")):
            metrics[task].update_state(labels[label].values, labels[f"p_{label}"].values, of)
    return {f"gauc_{task}": float(metric.result()) for task, metric in metrics.items()}
