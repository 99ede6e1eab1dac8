"""The settings of a preparation: everything that decides which bytes are written, except the input."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal, Protocol, get_args

from gmeta.core.errors import ConfigError
from gmeta.core.group_index import LAYOUTS, Codec, Layout, check_codec

Engine = Literal["duckdb", "spark", "streaming"]
"""The engine that does the work: this process, a Spark cluster, or jobs of Hadoop Streaming."""

ENGINES: tuple[Engine, ...] = get_args(Engine)
DEFAULT_LAYOUT: Layout = "columnar"


@dataclass(frozen=True)
class PlanConfig:
    """The settings for the plan's functions: `PrepareConfig` with every default filled in.

    Attributes:
      seed: Seeds the order of the batches.
      cold_modulus: A task is cold if its id is divisible by this number; 0: there is one split.
      min_rows: The smallest number of rows of a kept task.
      max_rows: The largest number of rows of a kept task; 0: any number.
      batch_rows: The smallest number of rows of a batch; None: each task is one batch.
      shards: TFRecord files for each split.
      layout: How rows are encoded.
      codec: The compression of each record, if any.
      partitions: The splits of a source whose rows name their own split (`Source.parts`); a task is then the
        rows of one id in one of these splits. Empty: a task's id decides its split.
      partition: The number of the partition that is being sorted.
    """

    seed: int = 0
    cold_modulus: int = 0
    min_rows: int = 1
    max_rows: int = 0
    batch_rows: int | None = None
    shards: int = 2
    layout: Layout = DEFAULT_LAYOUT
    codec: Codec | None = None
    partitions: tuple[str, ...] = ()
    partition: int = 0


@dataclass(frozen=True)
class PrepareConfig:
    """The settings that turn records into a prepared data set.

    Tasks with ``min_rows`` to ``max_rows`` rows, both included, are kept. Those whose id is a multiple of
    ``cold_modulus`` form the split ``cold``, the others ``warm``; without a modulus all form ``train``. The
    split into support and query isn't stored; the reader makes it.

    Attributes:
      seed: Seeds everything that is random: the order of the batches, and the synthetic data set.
      cold_modulus: A task is cold if its id is divisible by this number, at least 2; 0 makes one split. None:
        5 for MovieLens, 0 for a table.
      min_rows: The smallest number of rows of a kept task. None: 13 for MovieLens, 1 for a table.
      max_rows: The largest number of rows of a kept task; 0: any number. None: 100 for MovieLens, 0 for a
        table.
      batch_rows: Cut a task of ``n`` rows into ``max(1, n // batch_rows)`` batches of consecutive rows, whose
        sizes differ by at most one. No batch has fewer than ``batch_rows`` rows unless the whole task has
        fewer. At least ``min_rows``. None makes each task one batch, as needed for MAML on users.
      shards: TFRecord files for each split.
      layout: ``"columnar"``, a record for each batch, or ``"example"``, a ``tf.train.Example`` for each row,
        for other tools.
      codec: ``"zstd"`` compresses each record of the columnar layout separately; equal settings then give
        equal shards only with the same version of zstd.

    Raises:
      ConfigError: A value is outside its range.
    """

    seed: int = 0
    cold_modulus: int | None = None
    min_rows: int | None = None
    max_rows: int | None = None
    batch_rows: int | None = None
    shards: int = 2
    layout: Layout = DEFAULT_LAYOUT
    codec: Codec | None = None

    def __post_init__(self) -> None:
        _check(self)

    def resolve(self, default: PlanConfig) -> PlanConfig:
        """Replace each None by its default.

        Args:
          default: Has ``cold_modulus``, ``min_rows`` and ``max_rows`` for the kind of source.

        Raises:
          ConfigError: The settings contradict each other with these defaults.
        """
        own = {name: value for name, value in asdict(self).items() if value is not None}
        config = replace(default, **own)
        _check(config)
        return config


def _check(config: PrepareConfig | PlanConfig) -> None:
    least, most = config.min_rows, config.max_rows
    if not 0 <= config.seed < 1 << 63:
        raise ConfigError(f"seed must be in 0..2^63-1, got {config.seed}")
    for name in ("cold_modulus", "min_rows", "max_rows", "batch_rows"):
        if (getattr(config, name) or 0) >= 1 << 63:
            raise ConfigError(f"{name} must be below 2^63, got {getattr(config, name)}")
    if config.cold_modulus is not None and (config.cold_modulus < 0 or config.cold_modulus == 1):
        raise ConfigError(f"cold_modulus must be at least 2, or 0 for one split, got {config.cold_modulus}")
    if isinstance(config, PlanConfig) and config.partitions and config.cold_modulus:
        raise ConfigError(
            f"cold_modulus={config.cold_modulus} can't split rows that have a split of their own "
            f"({', '.join(config.partitions)}): leave it out"
        )
    if least is not None and least < 1:
        raise ConfigError(f"min_rows must be at least 1, got {least}")
    if most is not None and (most < 0 or (most and most < (least or 1))):
        raise ConfigError(f"max_rows must be at least min_rows, or 0 for any number, got {most} and {least}")
    if config.batch_rows is not None and config.batch_rows < (least or 1):
        raise ConfigError(f"batch_rows must be at least min_rows={least or 1}, got {config.batch_rows}")
    if not 1 <= config.shards <= 99_999:
        raise ConfigError(f"shards must be in 1..99999, got {config.shards}")
    if config.layout not in LAYOUTS:
        raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, got {config.layout!r}")
    check_codec(config.codec, config.layout)


# The reporting of an engine's progress.

STAGES = {"read": "reading rows", "sort": "sorting and cutting", "write": "writing shards"}
"""The stages of a preparation, and their texts for display."""


class Progress(Protocol):
    """A callback that receives the progress of a stage."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Report that ``done`` of ``total`` rows of ``stage`` are done; the stage ends when they are equal.

        While rows are read from files that don't state their number, ``total`` is an estimate or None.
        """


def no_progress(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""


class PartsProgress:
    """The joint progress of parts that run through every stage one after another.

    Args:
      progress: Receives the sums; the total is known in the last part.
      parts: The number of parts.
    """

    def __init__(self, progress: Progress, parts: int) -> None:
        self._progress, self._parts = progress, parts
        self._before: dict[str, int] = {}

    def of(self, part: int) -> Progress:
        """Return the callback for the part with this number."""
        before = dict(self._before)

        def tell(stage: str, done: int, total: int | None) -> None:
            through = before.get(stage, 0)
            self._before[stage] = through + done
            last = part + 1 == self._parts
            self._progress(stage, through + done, None if total is None or not last else through + total)

        return tell
