"""Where tests find the real data; without it they are skipped, with the reason said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gmeta.testing.data.maml_fixture import GoldenMaml

_VARIABLE = "GMETA_DATA"
_BESIDE_REPOSITORY = Path(__file__).resolve().parents[3].parent / "shared" / "data"


def movielens_100k() -> Path:
    """The folder of MovieLens-100K; skips the test where it isn't there."""
    return _find("ml-100k/u.data").parent


def golden_maml() -> GoldenMaml:
    """The reference fixture of MAML on MovieLens-100K; skips the test where it isn't there."""
    from gmeta.testing.data.maml_fixture import GoldenMaml

    return GoldenMaml.load(_find("golden/maml_ml100k.npz"))


def movielens_1m_of_melu() -> Path:
    """The folder of MovieLens-1M with MeLU's split; skips the test where it isn't there."""
    return _find("ml-1m/ratings.csv.gz").parent


def _find(name: str) -> Path:
    import pytest

    root = Path(os.environ.get(_VARIABLE) or _BESIDE_REPOSITORY)
    path = root / name
    if not path.exists():
        pytest.skip(f"no {name} in {root}: set {_VARIABLE} to a folder that has it")
    return path
