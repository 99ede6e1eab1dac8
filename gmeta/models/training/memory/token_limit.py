"""How many tokens a batch may have on a device, measured by training steps."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.arguments import finite_number, whole_number
from gmeta.core.collectives.shared_data import empty_batch
from gmeta.core.errors import ConfigError
from gmeta.models.training.memory.device_memory import PeakMemory, memory_limit, peak_memory
from gmeta.models.training.memory.kept_state import keep_state
from gmeta.models.training.memory.limit_search import FoundLimit, find_limit
from gmeta.models.training.model import Model
from gmeta.models.training.ranks.start import make_variables

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
      memory: A measure of your own, which calls its argument, a few training steps, and returns the most
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
