"""`Pipeline`, the argument ``pipeline`` of `compile`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.layers.exchange.window_keys import MOST_MICRO_BATCHES


@tf.keras.saving.register_keras_serializable("gmeta")
@dataclass(frozen=True)
class Pipeline:
    """How a training step fetches ahead of its batch, and computes it in parts (NestPipe).

    Depth (the paper's dual buffer): nothing that a step computes depends on it. Rows, slots, frequencies,
    evictions, losses and checkpoints are those of depth 0, bit for bit. What is fetched ahead has no effects,
    and a row that changes between its fetch and its step is read again. What is looked up may depend on the
    number of the step, as the negatives of `gmeta.models.NextItemModel` do. It is predicted, and a batch for
    which it was wrong is fetched again: a callback has set ``optimizer.iterations`` (on several ranks all
    must set the same), or an epoch has ended during an accumulation. Only an error in a batch, such as a bad
    id, is raised up to `depth` steps earlier.

    When training ends before the data does, up to `depth` batches were read and not trained. Checkpoints
    count the trained ones, so `gmeta.checkpoint.ShardedCheckpoint` reads the others again, on however many
    ranks an elastic job goes on. Of data that can be read only once, such as a queue, they are lost.

    Micro-batches (its frozen windows): parameters change only at the end of a step, so a step may compute its
    batch in parts. Each row still travels once, before the first part that uses it, and its gradient once,
    after the last; both travel while another part computes. A part takes the memory of its own forward and
    backward pass. Gradients are sums over the parts, weighted by samples, and make one update, which equals
    that of the whole batch up to rounding. So the loss must be a mean over samples. What relates samples of a
    batch to each other sees only those of a part: the means and variances of ``BatchNormalization``, and
    negatives that samples share. Random numbers, such as those of ``Dropout``, are drawn for each part.
    Frequencies, evictions and statistics of tables are those of the whole batch, exactly.

    A part has whole samples; of batches of tasks it has whole tasks, and of `gmeta.models.GRM` and
    `gmeta.models.NextItemModel` whole users. `gmeta.models.Model.split_batch` makes the parts.

    Tables may be in host memory or on a GPU. The keys of micro-batches are divided in host memory, and travel
    from there. For tables on a GPU with rows in host memory (`gmeta.policies.Tiers`), the rows of a batch
    begin to move to the GPU when its keys have reached their owners, by one prefetch per table. With depth 2
    they have a whole step for it; with depth 1, the rest of one.

    Args:
      depth: 0: a step begins with an exchange of its keys, then reads the rows. 1: while a batch computes,
        the keys of the next one go to the ranks that own them, and its rows are read there. 2: the keys are
        sent two batches ahead and the rows read one batch ahead, so that neither waits for the other. Each
        batch ahead takes the memory of its data, keys and rows.
      micro_batches: The number of parts in which a step computes its batch, 1 to 8.
      cluster: Whether samples (tasks, users) that share keys come into the same part, in place of their order
        in the batch; `gmeta.models.Model.unit_keys` gives the keys. The bytes stay the same, because each row
        travels once in any case. Fewer rows are held from one part to a later one, and the first part waits
        for fewer. Each rank divides its own batch; an error that names a sample by its number may mean the
        new order.

    Raises:
      ConfigError: The depth isn't 0, 1 or 2, the number of micro-batches isn't within 1 to 8,
        or there is only one to cluster.

    Example:
      >>> Pipeline(depth=1, micro_batches=4)
      Pipeline(depth=1, micro_batches=4, cluster=False)
    """

    depth: int = 1
    micro_batches: int = 1
    cluster: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        whole_number("Pipeline: depth", self.depth, least=0)
        if self.depth > 2:
            raise ConfigError(
                f"Pipeline: depth must be 0, 1 or 2, got {self.depth}: a batch has two stages before its step"
            )
        whole_number("Pipeline: micro_batches", self.micro_batches, least=1)
        if self.micro_batches > MOST_MICRO_BATCHES:
            raise ConfigError(
                f"Pipeline: micro_batches must be 1 to {MOST_MICRO_BATCHES}, got {self.micro_batches}: keys "
                "are divided by the first and the last micro-batch that uses them, and dividing them further "
                "costs more than it hides"
            )
        if not isinstance(self.cluster, bool):
            raise ConfigError(f"Pipeline: cluster must be True or False, got {self.cluster!r}")
        if self.cluster and self.micro_batches == 1:
            raise ConfigError(
                "Pipeline: cluster=True assigns samples to micro-batches, but there is only one: "
                "give micro_batches=2 to 8, or leave cluster out"
            )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this object, in a form that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Pipeline:
        """Recreate the object from the result of `get_config`."""
        return cls(**config)


def check_pipeline(value: Any) -> Pipeline:
    """Return the argument ``pipeline`` of `compile`; None stands for depth 0.

    Raises:
      ConfigError: It isn't a `Pipeline`.
    """
    if value is None:
        return Pipeline(depth=0)
    if not isinstance(value, Pipeline):
        raise ConfigError(f"compile: pipeline must be a gmeta.Pipeline, got {value!r}")
    return value
