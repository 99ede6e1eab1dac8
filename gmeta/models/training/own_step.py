"""Refuses a train step of a model's own that would ignore what `compile` was told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gmeta.core.errors import ConfigError

Function = Callable[[Any], Any]


class OwnStep:
    """Checks that a model's train step calls that of `gmeta.models.Model`, which knows some settings.

    Args:
      model: The model.
      settings: Arguments of `compile` -> their values. A train step may ignore those that are 1.
    """

    def __init__(self, model: Any, settings: Mapping[str, int]) -> None:
        self._model = model
        self._settings = {name: value for name, value in settings.items() if value > 1}
        self._noted = not self._settings

    def note(self, *obeyed: str) -> None:
        """Note that a train step obeys some settings; without names, all, as `gmeta.models.Model`'s does."""
        for name in obeyed:
            self._settings.pop(name, None)
        self._noted = not obeyed or not self._settings

    def watch(self, function: Function) -> Function:
        """Return a train function that checks the train step when it is traced, before it has any effect."""
        return function if self._noted else lambda iterator: self._call(function, iterator)

    def _call(self, function: Function, iterator: Any) -> Any:
        model = self._model
        if self._noted or "train_step" in vars(model):  # another step stands in for it, for this call
            return function(iterator)
        step = model.train_step

        def train_step(data: Any) -> Any:
            logs = step(data)
            self._check()
            return logs

        model.train_step = train_step
        try:
            return function(iterator)
        finally:
            del model.train_step

    def _check(self) -> None:
        if self._noted:
            return
        self._model.train_function = None  # TensorFlow would go on with what it has traced of it
        told = ", ".join(f"{name}={value}" for name, value in self._settings.items())
        raise ConfigError(
            f"{self._model.name}: compile was told {told}, and {type(self._model).__name__}.train_step "
            "ignores it, because it doesn't call super().train_step(data): let it do so, and override "
            "compute_gradients(data) or learn(data) with what is its own; or leave these settings out"
        )
