"""Loads models that earlier versions saved: finds the modules in which their classes were.

A ``.keras`` file names each class by its module. Keras imports that module when it loads the file, unless the
class is registered and its module was imported before. `find_old_modules` adds a finder that answers for the
modules that were merged into others: the module that it returns has the names of the present one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

OLD_MODULES = {
    "gmeta.experiment.runs.rated_at_least": "gmeta.experiment.runs.model_choice",
    "gmeta.experiment.runs.scaled_error": "gmeta.experiment.runs.model_choice",
    "gmeta.layers.embedding.entity_vector": "gmeta.layers.embedding.pooling",
    "gmeta.layers.sequence.group_layer_norm": "gmeta.layers.sequence.hstu",
    "gmeta.metrics.gauc": "gmeta.metrics.ranking",
    "gmeta.metrics.ndcg": "gmeta.metrics.ranking",
    "gmeta.metrics.sample_metric": "gmeta.metrics.auc",
    "gmeta.metrics.task_metric": "gmeta.metrics.ranking",
    "gmeta.models.generative.code_vectors": "gmeta.models.generative.code_scorer",
    "gmeta.models.meta.learner.adaptive_network": "gmeta.models.meta.task_view",
    "gmeta.models.meta.learner.inner_rates": "gmeta.models.meta.task_losses",
    "gmeta.models.meta.learner.task_losses": "gmeta.models.meta.task_losses",
    "gmeta.models.sequence.exposure_learner": "gmeta.models.sequence.meta_grm",
    "gmeta.models.sequence.label_metrics": "gmeta.models.sequence.exposure_trunk",
    "gmeta.models.training.model": "gmeta.training.model",
    "gmeta.models.training.pipeline.settings": "gmeta.training.pipeline",
    "gmeta.models.zoo.factor_network": "gmeta.models.zoo.factor_model",
    "gmeta.models.zoo.row_network": "gmeta.models.zoo.meta_emb",
    "gmeta.models.zoo.task_clusters": "gmeta.models.zoo.cbml_model",
}
"""Name in saved models -> the present module."""

_FOLDERS = frozenset(
    ".".join(name.split(".")[:depth]) for name in OLD_MODULES for depth in range(3, name.count(".") + 1)
)


class _OldModules:
    """A finder, and a loader, of the modules in `OLD_MODULES` and the packages that they were in."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in OLD_MODULES or name in _FOLDERS:
            return ModuleSpec(name, self, is_package=name in _FOLDERS)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the names of the present one."""
        if (present := OLD_MODULES.get(module.__name__)) is not None:
            names = vars(importlib.import_module(present))
            vars(module).update({name: value for name, value in names.items() if name[:2] != "__"})


def find_old_modules() -> None:
    """Add the finder to the end of ``sys.meta_path``; a second call changes nothing."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())
