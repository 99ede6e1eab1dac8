"""gmeta's additions to imports: names loaded on first use, missing extras, moved modules.

* `load_lazily` loads a package's exported names, moved names and submodules on first use (PEP 562).
* `name_missing_extras` names the extra that installs a missing package. Training needs TensorFlow and a few
  small packages. Packages for preparation, reports and workers come with extras of ``pyproject.toml``: ``pip
  install 'gmeta[prepare]'``. If gmeta's own code imports a missing one, the error is one line that names the
  extra. Python asks this finder last, so it sees only packages that aren't installed.
* `import_for` imports the packages of the extra ``stores``, each of which one kind of store needs.
* `find_old_modules` loads models that earlier versions saved, and finds modules for scripts by their former
  names. A ``.keras`` file names each class by its module, which Keras imports when it loads the file, unless
  the class is registered and its module already imported. The finder handles modules that were merged into
  others: the module that it returns has the names of the current one.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gmeta.core.errors import ConfigError, GmetaError


def load_lazily(
    package: str, where: Mapping[str, str], moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``.

    A moved name stays available under its old name for one release, with a `DeprecationWarning` that names
    the new place and points at the line that uses the old name. ``__dir__`` doesn't list it. A submodule is
    imported on first use, so ``gmeta.io.features.FetchPolicy`` works after ``import gmeta``.

    Args:
      package: The package's ``__name__``.
      where: Exported name -> the module that defines it.
      moved: Old name -> the module that now defines it, or ``"module:new name"`` if the name has changed.

    Returns:
      The two functions.

    Example:
      >>> __getattr__, __dir__ = load_lazily("gmeta", {"Manifest": "gmeta.core.data_manifest"})
      >>> __getattr__("Manifest").__name__
      'Manifest'
    """
    moved = moved or {}

    def get(name: str) -> Any:
        if name in where:
            return getattr(importlib.import_module(where[name]), name)
        if name not in moved:
            inside = "__path__" in vars(sys.modules[package])  # as in every package, and in no module
            if inside and name[0] != "_" and importlib.util.find_spec(f"{package}.{name}"):
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, new = moved[name].partition(":")
        # `from package import name` looks twice: the import system checks for a submodule, then the line
        # itself.
        if sys._getframe(1).f_globals.get("__name__") != "importlib._bootstrap":
            change = f"{package}.{name} has moved to {module}.{new or name}"
            warnings.warn(
                f"{change}; the old name goes in the next release", DeprecationWarning, stacklevel=2
            )
        return pkgutil.resolve_name(f"{module}:{new or name}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return get, names


EXTRAS = {
    "duckdb": "prepare",
    "sklearn": "report",
    "scipy": "report",
    "threadpoolctl": "report",
    "matplotlib": "report",
    "jinja2": "report",
    "cloudpickle": "workers",
    "optuna": "tune",
    "faiss": "nearest",
    "prometheus_client": "online",
    "confluent_kafka": "online",
}
"""Package -> the extra that installs it."""


class MissingExtraError(GmetaError, ModuleNotFoundError):
    """A package of an extra isn't installed."""


class _LastFinder:
    """Refuses imports of missing packages in `EXTRAS` by gmeta's own modules."""

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
    """Return the package whose code imports, skipping the frames of the import system."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def name_missing_extras() -> None:
    """Add the finder to ``sys.meta_path``; a second call changes nothing."""
    if not any(isinstance(finder, _LastFinder) for finder in sys.meta_path):
        sys.meta_path.append(_LastFinder())


def import_for(store: str, package: str, extra: str = "stores") -> ModuleType:
    """Import a package of an extra.

    Raises:
      ConfigError: The package isn't installed, or doesn't load.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{store} needs {package} ({error}): pip install 'gmeta[{extra}]'") from error


OLD_MODULES = {
    "gmeta.core.texts": "gmeta.core.data_manifest",
    "gmeta.experiment.runs.rated_at_least": "gmeta.experiment.runs.model_choice",
    "gmeta.experiment.runs.scaled_error": "gmeta.experiment.runs.model_choice",
    "gmeta.io.readers.negatives": "gmeta.io.readers.row_reader",
    "gmeta.layers.adaptive.mlp": "gmeta.layers.networks",
    "gmeta.layers.adaptive.task_network": "gmeta.layers.networks",
    "gmeta.layers.embedding.entity_vector": "gmeta.layers.embedding.pooling",
    "gmeta.layers.multitask.mmoe": "gmeta.layers.mmoe",
    "gmeta.layers.multitask.task_heads": "gmeta.layers.task_heads",
    "gmeta.layers.sequence.bias_tables": "gmeta.layers.sequence.block",
    "gmeta.layers.sequence.fuxi": "gmeta.layers.sequence.stack",
    "gmeta.layers.sequence.group_layer_norm": "gmeta.layers.sequence.hstu",
    "gmeta.metrics.gauc": "gmeta.metrics.ranking",
    "gmeta.metrics.ndcg": "gmeta.metrics.ranking",
    "gmeta.metrics.retrieval": "gmeta.metrics.next_item",
    "gmeta.metrics.sample_metric": "gmeta.metrics.auc",
    "gmeta.metrics.task_metric": "gmeta.metrics.ranking",
    "gmeta.models.generative.code_scorer": "gmeta.models.generative.digit_decoder",
    "gmeta.models.generative.code_vectors": "gmeta.models.generative.digit_decoder",
    "gmeta.models.generative.searches": "gmeta.models.generative.digit_decoder",
    "gmeta.models.meta.learner.adaptive_network": "gmeta.models.meta.task_view",
    "gmeta.models.meta.learner.inner_rates": "gmeta.models.meta.task_losses",
    "gmeta.models.meta.learner.task_losses": "gmeta.models.meta.task_losses",
    "gmeta.models.sequence.exposure_learner": "gmeta.models.sequence.meta_grm",
    "gmeta.models.sequence.label_metrics": "gmeta.models.sequence.exposure_trunk",
    "gmeta.models.training.model": "gmeta.training.model",
    "gmeta.models.training.pipeline.settings": "gmeta.training.pipeline",
    "gmeta.models.zoo.factor_network": "gmeta.models.zoo.factor_model",
    "gmeta.models.zoo.melu_model": "gmeta.models.meta.meta_model",
    "gmeta.models.zoo.row_network": "gmeta.models.zoo.meta_emb",
    "gmeta.models.zoo.scaled_numbers": "gmeta.models.zoo.factor_model",
    "gmeta.models.zoo.task_clusters": "gmeta.models.zoo.cbml_model",
    "gmeta.preprocess.history.spark_append": "gmeta.preprocess.history.cluster_append",
}
"""Name in saved models and scripts -> the present module."""

_FOLDERS = frozenset(
    ".".join(name.split(".")[:depth]) for name in OLD_MODULES for depth in range(3, name.count(".") + 1)
)


class _OldModules:
    """A finder and loader of the modules in `OLD_MODULES` and their former packages."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in OLD_MODULES or name in _FOLDERS:
            return ModuleSpec(name, self, is_package=name in _FOLDERS)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Make Python create an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Copy the names of the current module to the old one."""
        if (present := OLD_MODULES.get(module.__name__)) is not None:
            names = vars(importlib.import_module(present))
            vars(module).update({name: value for name, value in names.items() if name[:2] != "__"})


def find_old_modules() -> None:
    """Add the finder to the end of ``sys.meta_path``; a second call changes nothing."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())
