"""The recipe's data: generated logs, and their users as batches for training, validation and test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pyarrow
import pyarrow.parquet
import tensorflow as tf
from rankers import CONTEXTS, HISTORY, TARGETS, TIME

from gmeta import io
from gmeta.core.errors import GmetaError
from gmeta.metrics import UserGAUC
from gmeta.preprocess import EXPOSURE_SPEC, ExposureConfig, PrepareConfig, prepare, write_exposures

LABELS = ["click", "buy"]
COLD = 5  # every fifth user is new to the model; every other of these is for validation, the others for test
LAWS: dict[str, dict[str, float]] = {
    "recent": {},
    "lasting": {"now": 0.5, "next": 0.5, "taste": 6.0},
    "slow": {"fresh": 0.05, "drift": 0.0005, "focus": 0.15},
}


def prepare_log(out: Path, log: ExposureConfig) -> Path:
    """Generate the log and prepare it anew; old users are its split ``warm``.

    Beside it is a folder of the new users, ``new-<seed>``: ``warm`` is for validation, ``cold`` for test.

    Raises:
      click.ClickException: The folder can't be written to, or the log can't be made.
    """
    table, folder = out / f"log-{log.seed}.parquet", out / f"data-{log.seed}"
    halves = out / f"new-{log.seed}.parquet"
    try:
        rows = pyarrow.parquet.read_table(write_exposures(table, log))
        new = pyarrow.array(rows["user"].to_numpy() % COLD == 0)
        pyarrow.parquet.write_table(rows.filter(new), halves)
        for source, into, modulus in ((table, folder, COLD), (halves, out / f"new-{log.seed}", 2 * COLD)):
            config = PrepareConfig(cold_modulus=modulus, seed=log.seed)
            prepare([source], into, config, spec=EXPOSURE_SPEC, overwrite=True)
    except (GmetaError, OSError) as error:
        raise click.ClickException(f"{out}: {error}") from error
    return folder


def users(path: Path, *, tokens: int, labels: list[str] = LABELS, **options: Any) -> tf.data.Dataset:
    """Batches of users' sequences of about so many tokens."""
    return io.sequences(
        path,
        contexts=CONTEXTS,
        history=[*HISTORY, TIME],
        targets=[*TARGETS, TIME],
        labels=labels,
        exposed=io.Flag("exposed"),
        balance=io.Balance(tokens),
        options=io.ReadOptions(**options),
    ).prefetch(2)


def parts(folder: Path, seed: int, tokens: int) -> tuple[tf.data.Dataset, tf.data.Dataset, tf.data.Dataset]:
    """Read the old users, in another order each epoch, and the new ones for validation and for test."""
    new = folder.parent / f"new-{seed}"
    old = users(folder / "warm", tokens=tokens, seed=seed)
    return old, *(users(new / split, tokens=tokens, shuffle=False) for split in ("warm", "cold"))


def oracle(path: Path, tokens: int) -> dict[str, float]:
    """GAUC of the probabilities that the log was drawn with: no ranking does better, but by chance."""
    metrics = {"ctr": UserGAUC(), "ctcvr": UserGAUC()}
    for batch in users(path, tokens=tokens, labels=[*LABELS, "p_click", "p_buy"], shuffle=False):
        labels = batch["labels"]
        of = tf.repeat(batch["task"], labels["click"].row_lengths())
        for task, label in (("ctr", "click"), ("ctcvr", "buy")):
            metrics[task].update_state(labels[label].values, labels[f"p_{label}"].values, of)
    return {f"gauc_{task}": float(metric.result()) for task, metric in metrics.items()}
