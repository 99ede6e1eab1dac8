"""The real data of tests, which are skipped with a reason if they are missing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_VARIABLE = "GMETA_DATA"
_BESIDE_REPOSITORY = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def movielens_100k() -> Path:
    """The folder of MovieLens-100K; skips the test if it is missing."""
    return _find("ml-100k/u.data").parent


def golden_maml() -> GoldenMaml:
    """The reference fixture of MAML on MovieLens-100K; skips the test if it is missing."""

    return GoldenMaml.load(_find("golden/maml_ml100k.npz"))


def movielens_1m_of_melu() -> Path:
    """The folder of MovieLens-1M with MeLU's split; skips the test if it is missing."""
    return _find("ml-1m/ratings.csv.gz").parent


def _find(name: str) -> Path:
    import pytest

    root = Path(os.environ.get(_VARIABLE) or _BESIDE_REPOSITORY)
    path = root / name
    if not path.exists():
        pytest.skip(f"no {name} in {root}: set {_VARIABLE} to a folder that has it")
    return path


# The golden fixture of MAML on MeLU's network: four MovieLens-100K tasks, all in float64.
#
# Computed by an independent implementation. It holds initial weights, predictions after 0, 1 and 5 inner
# steps, and outer losses and gradients of first and second order.

Array = NDArray[Any]

INNER_LEARNING_RATE = 5e-3
DENSE = ("fc1", "fc2", "linear_out")
COLUMNS = {"year": 1, "gender": 21, "age": 22, "occupation": 23, "area": 24}
"""Single-valued feature -> its column in a row of the fixture; the genre flags are columns 2 to 20."""
FEATURES = ("year", "genre", "gender", "age", "occupation", "area")
"""The features in the order in which their vectors are concatenated."""


@dataclass(frozen=True)
class GoldenMaml:
    """The fixture's arrays under gmeta's names and layouts.

    Attributes:
      dense: ``"fc1/kernel"`` (in, out), ``"fc1/bias"`` (out,), … .
      tables: Feature -> (ids, 32) embedding rows.
      arrays: Everything else, under the fixture's own names.
    """

    dense: Mapping[str, Array]
    tables: Mapping[str, Array]
    arrays: Mapping[str, Array]

    @classmethod
    def load(cls, path: Path) -> GoldenMaml:
        """Read the fixture."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        return cls(_dense(arrays, "w/"), _tables(arrays, "w/"), arrays)

    def gradients(self, order: int, steps: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """The outer gradients of dense weights and tables, laid out as the weights are."""
        prefix = f"grad/o{order}_s{steps}/"
        return _dense(self.arrays, prefix), _tables(self.arrays, prefix)

    def loss(self, order: int, steps: int) -> float:
        """The outer loss: mean squared error over all query rows of the four tasks."""
        return float(self.arrays[f"loss/o{order}_s{steps}"])

    def predictions(self, steps: int) -> Array:
        """(tasks, query) predictions after this many inner steps."""
        return self.arrays[f"pred/s{steps}"]

    def task_batch(self) -> dict[str, Any]:
        """The four tasks in the form of `gmeta.io.tasks`, as NumPy arrays; genres as (values, row_splits)."""
        support_mask = (self.arrays["task/sm"] > 0).astype(np.float32)
        rows, labels, support_index, query_index = [], [], [], []
        start = 0
        for task, mask in enumerate(support_mask):
            size, query = int(mask.sum()), self.arrays["task/qx"].shape[1]
            rows += [self.arrays["task/sx"][task, :size], self.arrays["task/qx"][task]]
            labels += [self.arrays["task/sy"][task, :size], self.arrays["task/qy"][task]]
            support_index.append(np.where(mask > 0, start + np.arange(len(mask)), 0))
            query_index.append(start + size + np.arange(query))
            start += size + query
        table = np.concatenate(rows)
        flags = table[:, 2:21]
        features: dict[str, Any] = {name: table[:, column] for name, column in COLUMNS.items()}
        features["genre"] = (np.nonzero(flags)[1], np.concatenate([[0], np.cumsum(flags.sum(axis=1))]))
        return {
            "features": features,
            "label": np.concatenate(labels),
            "task": self.arrays["task/users"],
            "support": {"index": np.array(support_index), "mask": support_mask},
            "query": {
                "index": np.array(query_index),
                "mask": np.ones(self.arrays["task/qy"].shape, np.float32),
            },
        }


def _dense(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {
        f"{layer}/{kind}": arrays[f"{prefix}{layer}.{source}"].T
        for layer in DENSE
        for kind, source in (("kernel", "weight"), ("bias", "bias"))
    }


def _tables(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    tables = {name: arrays[f"{prefix}embedding_{name}.weight"] for name in FEATURES}
    return {**tables, "genre": tables["genre"].T}
