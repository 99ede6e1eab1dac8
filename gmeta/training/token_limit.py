"""How many tokens a batch may have on a device, measured by training steps."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.client import device_lib

from gmeta.core import collectives
from gmeta.core.collectives.shared_data import empty_batch
from gmeta.core.errors import ConfigError, finite_number, whole_number
from gmeta.layers.embedding.table_weights import tables_of
from gmeta.ops.table.restored_rows import TableSnapshot
from gmeta.training.model import Model
from gmeta.training.rank_steps import make_variables

# The largest batch within a budget of memory: a line through measured peaks, measured at its end.

REACH = 8
"""How many times larger than anything measured the next batch may be."""

CLIMBS = 4
"""How often a batch that many times larger is tried before peaks count as not growing with tokens."""

TRIES = 8
"""How many smaller batches are tried after one that exceeds the budget."""

FIT_ERROR = 1e-9
"""The relative error that rounding may leave in a size from least squares; it differs between processors."""


@dataclass(frozen=True)
class MemoryLine:
    """Peak memory as a function of a batch's tokens, ``base + per_token * tokens``.

    Attributes:
      base: Bytes without a batch: weights, slots, what libraries hold.
      per_token: Bytes that each token adds.
    """

    base: float
    per_token: float

    @classmethod
    def through(cls, peaks: dict[int, float]) -> MemoryLine:
        """Return the line of least squares through peaks, tokens -> bytes; of one size from zero on."""
        if len(peaks) == 1:
            ((tokens, peak),) = peaks.items()
            return cls(0.0, peak / tokens)
        per_token, base = np.polyfit(list(peaks), list(peaks.values()), 1)
        return cls(float(base), float(per_token))

    def tokens_at(self, peak: float) -> int:
        """Return the tokens at which the line reaches a peak, rounded down.

        A size that is a whole number but for `FIT_ERROR` is that number, not the one below.
        """
        return math.floor((peak - self.base) / self.per_token * (1 + FIT_ERROR))


@dataclass(frozen=True)
class FoundLimit:
    """What `find_limit` found.

    Attributes:
      tokens: The largest number of tokens that was measured within the budget.
      peak: The peak measured with so many tokens, in bytes.
      line: Through all measured peaks.
      refused: The sizes that exceeded the budget, in the order of their measurement.
    """

    tokens: int
    peak: float
    line: MemoryLine
    refused: tuple[int, ...]


def find_limit(measure: Callable[[int], float | None], sizes: Sequence[int], budget: float) -> FoundLimit:
    """Find the most tokens whose peak memory stays within a budget.

    A line is put through the peaks of the first sizes. Where it reaches the budget, a batch is measured. If
    this exceeds the budget, the next size is where the chord between it and the largest size that fits
    reaches the budget: peaks that grow faster than a line, such as squares, lie below the chord. A size is
    returned only if its own peak was measured to fit.

    Args:
      measure: Tokens -> the peak in bytes; None if memory ran out. Each size is measured once.
      sizes: The first sizes, two or more, rising, well below the limit.
      budget: Bytes.

    Raises:
      ConfigError: The smallest size doesn't fit, or peaks don't grow with tokens.

    Example:
      >>> find_limit(lambda tokens: 100 + 2.0 * tokens, (1, 2, 4), 150).tokens
      25
    """
    search = _Search(measure, budget)
    for tokens in sizes:
        if not search.fits(tokens):
            break
    search.check_smallest(sizes[0])
    search.climb()
    search.shrink()
    line = MemoryLine.through(search.peaks)
    return FoundLimit(search.best, search.peaks[search.best], line, tuple(search.over))


class _Search:
    """What was measured so far."""

    def __init__(self, measure: Callable[[int], float | None], budget: float) -> None:
        self._measure, self._budget = measure, budget
        self.peaks: dict[int, float] = {}
        self.over: list[int] = []
        self.best = 0

    def fits(self, tokens: int) -> bool:
        """Measure a size, and return whether it stays within the budget."""
        peak = self._measure(tokens)
        if peak is not None:
            self.peaks[tokens] = peak
        fits = peak is not None and peak <= self._budget
        if fits:
            self.best = max(self.best, tokens)
        else:
            self.over.append(tokens)
        return fits

    def check_smallest(self, tokens: int) -> None:
        """Refuse a budget in which not even the smallest size fits."""
        if not self.best:
            peak = self.peaks.get(tokens)
            took = "ran out of memory" if peak is None else f"took {peak:,.0f} bytes"
            raise ConfigError(
                f"max_tokens: a batch of {tokens} tokens {took}, and the budget is {self._budget:,.0f}: give "
                "smaller sizes in tokens=, or make the model smaller"
            )

    def climb(self) -> None:
        """Measure where the line reaches the budget; a batch far larger than any so far comes in steps."""
        for _ in range(CLIMBS):
            if self.over:
                return
            line = MemoryLine.through(self.peaks)
            if line.per_token <= 0:
                break
            end = line.tokens_at(self._budget)
            aim = min(end, REACH * self.best)
            if aim <= self.best or (self.fits(aim) and aim == end):
                return
        if not self.over:
            measured = ", ".join(f"{peak:,.0f} with {tokens}" for tokens, peak in self.peaks.items())
            raise ConfigError(
                f"max_tokens: bytes in use don't grow with tokens ({measured}), so no limit follows from the "
                f"budget of {self._budget:,.0f}: give larger sizes in tokens=, and batches of so many"
            )

    def shrink(self) -> None:
        """While the smallest size measured last exceeds the budget, measure one below it."""
        for _ in range(TRIES):
            if not self.over:
                return
            upper, share = min(self.over), 0.5
            if upper in self.peaks:
                low = self.peaks[self.best]
                share = (self._budget - low) / (self.peaks[upper] - low)
            aim = self.best + min(int(share * (upper - self.best)), upper - self.best - 1)
            if aim <= self.best or self.fits(aim):
                return


# Keeps a model's state over training steps that shall leave no trace.


@contextmanager
def keep_state(model: Model) -> Iterator[None]:
    """Restore the model when the block ends, also by an error.

    Variables (weights, the optimizer's slots and step, moving averages, metrics, states of generators) are
    copied to host memory. Tables are restored from snapshots: rows, their slots and frequencies, the step and
    what admission remembers. A snapshot of a table in host memory costs only the rows that the block uses;
    that of a table on a GPU is a copy of it in host memory. What the block added to a table's statistics, and
    random numbers drawn from TensorFlow's global generator, aren't taken back.

    Args:
      model: A compiled model that has its variables (`gmeta.training.rank_steps.make_variables`).

    Raises:
      ConfigError: The model has accumulated gradients, which can't be kept.
    """
    if model.is_accumulating:
        raise ConfigError(
            f"{model.name} has accumulated gradients, which trial steps would use up: call apply_accumulated "
            "first, or measure before training"
        )
    if hasattr(model.optimizer, "_create_all_weights"):  # a legacy optimizer's slots, which have no `build`
        model.optimizer._create_all_weights(model.trainable_variables)
    if model.joint_optimizer.divides:  # as the first step would
        model.joint_optimizer.divide(model.trainable_variables)
    values = [(variable, variable.numpy()) for variable in _variables(model)]
    # Slots that another rank has hold no numbers here, and no step changes them.
    variables = [
        (variable, value) for variable, value in values if variable.shape.is_compatible_with(value.shape)
    ]
    snapshots = [TableSnapshot(table) for table in tables_of(model)]
    plain = {name: getattr(model, name, None) for name in ("history", "stop_training")}
    try:
        yield
    finally:
        model.reset_metrics()  # also of those that the block has made
        for variable, value in variables:
            variable.assign(value)
        for snapshot in snapshots:
            snapshot.restore()
        for name, value in plain.items():
            setattr(model, name, value)
        model.train_function = None  # its graphs hold the memory of their largest batch, and random states


def _variables(model: Model) -> list[tf.Variable]:
    tracked: list[Any] = [
        part for part in tf.train.TrackableView(model).descendants() if isinstance(part, tf.Variable)
    ]
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    optimizer = model.optimizer.variables
    optimizer = optimizer() if callable(optimizer) else optimizer
    counted = getattr(getattr(model, "catalogue", None), "variables", [])  # which checkpoints hold by key
    every = [*model.variables, *metrics, *optimizer, *tracked, *counted]
    return list({id(variable): variable for variable in every if variable.dtype != tf.resource}.values())


# The most memory that was in use on a device while something ran, and how much there is.

PeakMemory: TypeAlias = Callable[[Callable[[], object]], float]
"""Calls its argument, and returns the most bytes that were in use meanwhile."""


def peak_memory(device: str) -> PeakMemory:
    """Return a measure of what TensorFlow's allocator has handed out on a device.

    Args:
      device: Such as ``"GPU:0"``.

    Raises:
      ConfigError: The device is no GPU of this process. Of a CPU's memory TensorFlow counts parts at most.
    """
    _check_statistics(device)

    def measure(run: Callable[[], object]) -> float:
        tf.config.experimental.reset_memory_stats(device)
        run()
        return float(tf.config.experimental.get_memory_info(device)["peak"])

    return measure


def memory_limit(device: str) -> float:
    """Return the bytes that TensorFlow's allocator may hand out on a device.

    Raises:
      ConfigError: As for `peak_memory`.
    """
    name = _check_statistics(device)
    limits = {found.name: found.memory_limit for found in device_lib.list_local_devices()}
    return float(limits[f"/device:{name}"])


def _check_statistics(device: str) -> str:
    """Return the device's short name, such as ``GPU:0``."""
    name = device.upper().removeprefix("/").removeprefix("DEVICE:")
    there = [found.name.removeprefix("/physical_device:") for found in tf.config.list_physical_devices("GPU")]
    if name not in there:
        raise ConfigError(
            f"max_tokens: TensorFlow counts no memory of {device} (GPUs: {', '.join(there) or 'none'}): pass "
            "memory=, a function that calls its argument and returns the most bytes in use meanwhile, and "
            "limit=, in bytes"
        )
    return name


SIZES = (4096, 8192, 16384)


def max_tokens(
    model: Model,
    make_batch: Callable[[int], Any],
    share: float = 0.95,
    *,
    tokens: Sequence[int] = SIZES,
    device: str = "GPU:0",
    memory: PeakMemory | None = None,
    limit: float | None = None,
) -> int:
    r"""Find the most tokens of a batch whose training steps stay within a share of a device's memory.

    Steps with batches of the given sizes measure the peak of memory in use, and

    .. math:: peak = a + b \cdot tokens

    is fitted to them. A batch of :math:`(share \cdot limit - a) / b` tokens is then measured too. If it takes
    more, or memory runs out, smaller batches are measured until one fits, and a warning says so. The number
    that is returned was itself measured to fit. Give it to `gmeta.io.Balance` as ``max_tokens``: no batch is
    then larger.

    The steps leave the model as it was: weights, the optimizer's slots and step, moving averages, metrics and
    the tables' rows, slots, frequencies and admission are restored, also after an error. A model without
    weights has its initial ones then. A table's counters (`HashTable.statistics`) count the steps, and random
    numbers that come from TensorFlow's global generator go on after theirs. Dense variables are copied to
    host memory meanwhile, and so are tables on a GPU; a table in host memory keeps copies of the rows that
    the steps use. So call it before training, when tables are empty, or with host memory to spare.

    On several ranks, all call it together. Each measures its own device; the largest peak and the smallest
    limit count, and all get the same number. A rank whose memory runs out fails there, as others wait for it.

    Args:
      model: A compiled model; its pipeline's batches ahead and ``accumulate_steps`` are measured with it.
      make_batch: Tokens -> a batch of about as many, an element of the training data. It should be the batch
        that takes most: the model's longest sequences if attention is computed over padded squares, as many
        contexts and exposures as users have, and ids that differ. Tokens are what `Balance` counts.
      share: How much of the limit steps may take, above 0 and at most 1. What is left is for memory outside
        of TensorFlow's allocator and for its fragments.
      tokens: The sizes to begin with, rising, two or more, well below the limit.
      device: Whose memory is measured. Steps run where the model trains, whatever this says.
      memory: A custom measure, which calls its argument, a few training steps, and returns the most
        bytes in use meanwhile. None: what TensorFlow's allocator of ``device`` has handed out.
      limit: Bytes that the device has. None: what TensorFlow's allocator of ``device`` may hand out.

    Returns:
      The number of tokens, at least the smallest of ``tokens``.

    Raises:
      ConfigError: An argument is invalid; the device is no GPU, and ``memory`` or ``limit`` isn't
        given; not even the smallest batch fits; or memory doesn't grow with tokens.

    Example:
      >>> most = max_tokens(model, lambda tokens: batch_of(lengths=[3000] * (tokens // 3000)))
      >>> balance = Balance.of("data/train", sequences=480, max_tokens=most, longest=3000)

    References:
      MTGenRec, section 3.4 ("batches near device memory limits") and table 3.
    """
    sizes = [whole_number("max_tokens: a size in tokens", size, 1) for size in tokens]
    if len(sizes) < 2 or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise ConfigError(f"max_tokens: tokens={list(tokens)} must be two rising sizes or more")
    if not 0 < finite_number("max_tokens: share", share) <= 1:
        raise ConfigError(f"max_tokens: share={share} must be above 0 and at most 1")
    if limit is not None and not finite_number("max_tokens: limit", limit) > 0:
        raise ConfigError(f"max_tokens: limit={limit} must be above 0 bytes")
    measure = peak_memory(device) if memory is None else memory
    own = memory_limit(device) if limit is None else float(limit)
    budget = share * min(collectives.allgather_objects(own))
    found = measure_batches(model, make_batch, sizes, budget, measure)
    if found.refused:
        warnings.warn(
            f"max_tokens: batches of {', '.join(map(str, found.refused))} tokens take more than "
            f"{budget:,.0f} bytes; {found.tokens} tokens take {found.peak:,.0f}",
            stacklevel=2,
        )
    return found.tokens


def measure_batches(
    model: Model, make_batch: Callable[[int], Any], sizes: Sequence[int], budget: float, memory: PeakMemory
) -> FoundLimit:
    """Find the largest batch within a budget of bytes, as `max_tokens` does, and return what was measured.

    Args:
      model: As for `max_tokens`.
      make_batch: As for `max_tokens`.
      sizes: As for `find_limit`.
      budget: Bytes, the same on all ranks.
      memory: As for `max_tokens`.

    Raises:
      ConfigError: As for `find_limit`; or gradients are accumulated.
    """

    def peak(size: int) -> float | None:
        data = _repeated(make_batch(size), 2 + model.batches_ahead)
        try:
            found = memory(lambda: model.fit(data, epochs=1, verbose=0))
        except tf.errors.ResourceExhaustedError:
            if collectives.world().size > 1:
                raise
            return None
        return max(collectives.allgather_objects(float(found)))

    make_variables(model, empty_batch(_spec(make_batch(sizes[0]))))
    with keep_state(model):
        return find_limit(peak, sizes, budget)


def _repeated(batch: Any, times: int) -> tf.data.Dataset:
    """Return a rank's own data set of one batch again and again, whose sizes are open, as a reader's are."""
    data = tf.data.Dataset.from_generator(
        lambda: (batch for _ in range(times)), output_signature=_spec(batch)
    )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


def _spec(batch: Any) -> Any:
    return tf.nest.map_structure(_open, batch)


def _open(part: Any) -> tf.TypeSpec:
    if isinstance(part, tf.RaggedTensor):
        shape = part.shape[: part.ragged_rank + 1].as_list()
        inner = part.shape[part.ragged_rank + 1 :]
        open_shape = tf.TensorShape([None] * len(shape)).concatenate(inner)
        return tf.RaggedTensorSpec(open_shape, part.dtype, part.ragged_rank, part.row_splits.dtype)
    if isinstance(part, tf.SparseTensor):
        return tf.SparseTensorSpec([None, *part.shape[1:]], part.dtype)
    tensor = tf.convert_to_tensor(part)
    return tf.TensorSpec([None] * bool(tensor.shape.rank) + tensor.shape[1:].as_list(), tensor.dtype)
