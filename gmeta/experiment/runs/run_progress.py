"""Progress display of several training runs in the terminal."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn

from gmeta.core.bars import Bars


class TrainingProgress(Bars):
    """A progress bar for each training run or, if the output isn't a terminal, a line for each.

    Example:
      ::

        with TrainingProgress() as progress:
            model.fit(data, epochs=10, verbose=0, callbacks=[progress.track("MAML, seed 0", epochs=10)])
    """

    def __init__(self, console: Console | None = None) -> None:
        columns = (TextColumn("epochs"), TimeElapsedColumn(), TextColumn("{task.fields[logs]}"))
        super().__init__(*columns, console=console)

    def track(self, label: str, epochs: int) -> tf.keras.callbacks.Callback:
        """Make a Keras callback that shows one run of ``epochs`` epochs under ``label``."""
        return _EpochBar(self, label, epochs)


class _EpochBar(tf.keras.callbacks.Callback):
    def __init__(self, progress: Bars, label: str, epochs: int) -> None:
        super().__init__()
        self._progress, self._label, self._epochs = progress, label, epochs
        self._task = progress.bars.add_task(label, total=epochs, logs="")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        text = "  ".join(f"{name} {value:.4f}" for name, value in (logs or {}).items())
        self._progress.bars.update(self._task, completed=epoch + 1, logs=text)
        if not self._progress.drawn and epoch + 1 == self._epochs:
            self._progress.say(f"{self._label}: {epoch + 1} epochs, {text}")
