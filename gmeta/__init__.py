"""gmeta: training of recommendation models that adapt, on TensorFlow.

Importing gmeta selects Keras 2 (tf-keras) and imports neither TensorFlow nor Horovod: the names below are
loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gmeta.core.imports import find_old_modules, name_missing_extras
from gmeta.core.keras import convert_only_calls, select_legacy_keras
from gmeta.core.version import __version__ as __version__
from gmeta.core.version import check_python

check_python()
select_legacy_keras()
convert_only_calls()
name_missing_extras()
find_old_modules()

if TYPE_CHECKING:
    from gmeta import callbacks as callbacks
    from gmeta import checkpoint as checkpoint
    from gmeta import experiment as experiment
    from gmeta import export as export
    from gmeta import initializers as initializers
    from gmeta import io as io
    from gmeta import layers as layers
    from gmeta import losses as losses
    from gmeta import meta as meta
    from gmeta import metrics as metrics
    from gmeta import models as models
    from gmeta import ops as ops
    from gmeta import optimizers as optimizers
    from gmeta import policies as policies
    from gmeta import preprocess as preprocess
    from gmeta import reinforcement as reinforcement
    from gmeta.core.collectives import init as init
    from gmeta.training.pipeline import Pipeline as Pipeline

__all__ = [
    "Pipeline",
    "callbacks",
    "checkpoint",
    "export",
    "init",
    "initializers",
    "io",
    "layers",
    "losses",
    "meta",
    "metrics",
    "models",
    "ops",
    "optimizers",
    "policies",
    "preprocess",
    "reinforcement",
]


def __getattr__(name: str) -> Any:
    if name == "init":
        return importlib.import_module("gmeta.core.collectives").init
    if name == "Pipeline":
        return importlib.import_module("gmeta.training.pipeline").Pipeline
    if name in __all__ or name == "experiment":
        return importlib.import_module(f"gmeta.{name}")
    raise AttributeError(f"module 'gmeta' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
