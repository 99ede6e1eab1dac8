"""Progress of several training runs in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class TrainingProgress:
    """A bar for each training run, and on anything but a terminal a line for each.

    Example:
      ::

        with TrainingProgress() as progress:
            model.fit(data, epochs=10, verbose=0, callbacks=[progress.track("MAML, seed 0", epochs=10)])
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("epochs"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[logs]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> TrainingProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def track(self, label: str, epochs: int) -> tf.keras.callbacks.Callback:
        """A Keras callback that shows one run of ``epochs`` epochs under ``label``."""
        return _EpochBar(self._bars, label, epochs)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(text, highlight=False, soft_wrap=True)


class _EpochBar(tf.keras.callbacks.Callback):
    def __init__(self, bars: Progress, label: str, epochs: int) -> None:
        super().__init__()
        self._bars, self._label, self._epochs = bars, label, epochs
        self._task = bars.add_task(label, total=epochs, logs="")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        text = "  ".join(f"{name} {value:.4f}" for name, value in (logs or {}).items())
        self._bars.update(self._task, completed=epoch + 1, logs=text)
        if self._bars.disable and epoch + 1 == self._epochs:
            self._bars.console.print(
                f"{self._label}: {epoch + 1} epochs, {text}", highlight=False, soft_wrap=True
            )
