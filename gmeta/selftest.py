"""Proves an installation by running it: ``python -m gmeta.selftest``.

`gmeta doctor` lists what is installed; this checks that it works. Native ops are compared with NumPy, and the
commands prepare, train, evaluate and export a small experiment in a temporary folder. It takes about a
minute, needs neither data nor a compiler, prints a line for each check, and ends with exit code 1 if one
fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

import gmeta
from gmeta import testing as reference
from gmeta.ops import AttentionMask, HashTable, hstu_attention
from gmeta.optimizers import SGD
from gmeta.testing import small_100k, small_toml


def check_table(_: Path) -> str:
    """Train rows that are looked up twice, and compare them with NumPy's sums."""
    random = np.random.default_rng(0)
    table = HashTable(dim=8, optimizer=SGD(0.5), seed=3)
    ids = random.integers(-(2**62), 2**62, 50)[random.integers(0, 50, 1000)]
    first, again = table.lookup(ids), table.lookup(ids)
    np.testing.assert_array_equal(first.rows, again.rows)
    np.testing.assert_array_equal(first.keys.numpy()[first.inverse], ids)
    grads = random.normal(size=(1000, 8)).astype(np.float32)
    table.apply_gradients(ids, grads)
    sums = np.zeros(first.rows.shape)
    np.add.at(sums, first.inverse.numpy(), grads)
    found = table.lookup(first.keys, insert=False).rows
    np.testing.assert_allclose(found, first.rows - 0.5 * sums, rtol=1e-5, atol=1e-4)
    return f"{len(first.keys)} rows of 1,000 ids"


def check_attention(_: Path) -> str:
    """Attend within jagged sequences, and compare with the equations of HSTU."""
    random, lengths = np.random.default_rng(1), [70, 0, 33]
    offsets = np.cumsum([0, *lengths])
    q, k, v = (random.normal(size=(offsets[-1], 2, 16)).astype(np.float32) for _ in range(3))
    mask = AttentionMask()
    found = hstu_attention(q, k, v, offsets, mask.visible(offsets), scale=1 / 70)
    sees = [reference.sees(mask, length, 0, 0) for length in lengths]
    np.testing.assert_allclose(
        found, reference.hstu_attention(q, k, v, offsets, sees, 1 / 70), rtol=1e-4, atol=1e-5
    )
    return f"{len(lengths)} sequences of up to {max(lengths)} tokens"


def check_experiment(folder: Path) -> str:
    """Run the commands from raw ratings to a model that plain TensorFlow asks."""
    small_100k(folder / "ml")
    (folder / "short.toml").write_text(small_toml(epochs=2))
    for words in (
        "prepare --data ml --out run/data",
        "train --run run --config short.toml",
        "evaluate --run run --json table.json",
        "export --run run --out model",
    ):
        done = subprocess.run(
            [sys.executable, "-m", "gmeta", *words.split()], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"gmeta {words} ended with {done.returncode}:\n{done.stderr}")
    size = sum(file.stat().st_size for file in (folder / "model").rglob("*") if file.is_file())
    return f"trained, evaluated and exported: {size / 1e6:.1f} MB"


CHECKS: dict[str, Callable[[Path], str]] = {
    "tables": check_table,
    "attention": check_attention,
    "experiment": check_experiment,
}
"""The name of a check -> the function that runs it in a folder and returns a summary."""


def main() -> int:
    """Run all checks, and return the exit code."""
    failed = 0
    print(f"gmeta {gmeta.__version__}, TensorFlow {tf.__version__}, NumPy {np.__version__}")  # noqa: T201
    for name, check in CHECKS.items():
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gmeta-selftest-") as folder:
            try:
                text = f"ok      {name}: {check(Path(folder))}"
            except Exception as error:  # whatever may be broken
                failed += 1
                text = f"FAILED  {name}: {type(error).__name__}: {error}"
        print(f"{text} ({time.monotonic() - begin:.1f} s)", flush=True)  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
