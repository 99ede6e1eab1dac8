"""Names the extra that installs a missing package.

Training needs TensorFlow and a few small packages. What preparation, reports and workers need comes with
extras of ``pyproject.toml``: ``pip install 'gmeta[prepare]'``. An import of it by gmeta's own code
ends in one line that names the extra. `name_missing_extras` adds the last finder that Python asks for a
module, so the finder sees only packages that aren't installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from gmeta.core.errors import GmetaError

EXTRAS = {
    "duckdb": "prepare",
    "sklearn": "report",
    "scipy": "report",
    "threadpoolctl": "report",
    "matplotlib": "report",
    "jinja2": "report",
    "cloudpickle": "workers",
    "optuna": "tune",
}
"""Package -> the extra that installs it."""


class MissingExtraError(GmetaError, ModuleNotFoundError):
    """A package isn't installed that comes with an extra."""


class _LastFinder:
    """Refuses imports that gmeta's own modules make of missing packages in `EXTRAS`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (extra := EXTRAS.get(name)) is not None and _importer() == "gmeta":
            raise MissingExtraError(
                f"{name} isn't installed: pip install 'gmeta[{extra}]', or 'gmeta[all]' for all extras",
                name=name,
            )
        return None


def _importer() -> str:
    """Return the package whose code imports, behind the frames of the import system."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def name_missing_extras() -> None:
    """Add the finder to ``sys.meta_path``; a second call changes nothing."""
    if not any(isinstance(finder, _LastFinder) for finder in sys.meta_path):
        sys.meta_path.append(_LastFinder())
