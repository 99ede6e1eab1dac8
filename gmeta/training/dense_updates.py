"""How a Keras optimizer updates dense variables: in one computation, and divided among the ranks.

`UpdatesJoined` compiles the updates of all variables together.

`OptimizerShards` divides the optimizer's state among the ranks, as ZeRO's first stage does (Rajbhandari et
al., 2020, section 5.1). Each variable has an owner. In a step

1. each owner gets the mean gradients of its variables (`gmeta.training.mean_gradients.scattered_means`),
2. it updates these variables by the Keras optimizer,
3. and sends their new values to all ranks (`ShardedStep.send_weights`).

Variables are divided whole, as `torch.distributed.optim.ZeroRedundancyOptimizer` divides them: the largest
first, each to the rank that has fewest bytes so far. A variable is thus updated by the same operations as on
one rank, whatever the optimizer computes from it, such as the norm of its gradient, and has the same bits.

The optimizer's list of slots is complete on each rank, so checkpoints have the same form whether it is
divided or not. But the slots of other ranks' variables are released: they hold no numbers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.graph import lift_variables
from gmeta.ops.device import compute_place
from gmeta.training.mean_gradients import GlobalMeans, Gradient, all_finite, scattered_means

_OF_UPDATES = ("_distributed_apply_gradients_fn", "_update_step_xla")  # by which Keras updates variables
_MOST_JOINT = 8  # sets of variables that one optimizer compiles an update for
_HOOKED = threading.RLock()  # held while an attribute of an optimizer is replaced


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that a ``LossScaleOptimizer`` wraps, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


class UpdatesJoined:
    """Makes a Keras optimizer compile the updates of all variables as one XLA computation.

    Keras compiles one for each variable, and a GPU is idle between two of them.

    Args:
      optimizer: The Keras optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = inner_optimizer(optimizer)
        self._updates: dict[tuple[int, ...], Callable[[list[tf.Tensor]], None]] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Join the updates that are traced in a ``with`` block."""
        inner = self._optimizer
        keras: Any = tf.keras.optimizers.Optimizer
        overrides = any(getattr(type(inner), each, None) != getattr(keras, each) for each in _OF_UPDATES)
        if overrides or not inner.jit_compile or inner.use_ema or tf.distribute.has_strategy():
            yield
            return

        def jointly(strategy: Any, pairs: Any, **kwargs: Any) -> Any:
            pairs = list(pairs)
            dense = [pair for pair in pairs if not isinstance(pair[0], tf.IndexedSlices)]
            update = self._update_of([variable for _, variable in dense])
            if update is not None:
                update([gradient for gradient, _ in dense])
                pairs = [pair for pair in pairs if isinstance(pair[0], tf.IndexedSlices)]
            # The others', and the count of steps.
            return keras._distributed_apply_gradients_fn(inner, strategy, pairs, **kwargs)

        with _HOOKED:  # other threads may train with the same optimizer
            inner._distributed_apply_gradients_fn = jointly
            try:
                yield
            finally:
                vars(inner).pop("_distributed_apply_gradients_fn", None)

    def _update_of(self, variables: list[tf.Variable]) -> Any:
        """Return the compiled update of variables; None if there are none, or it would be one too many."""
        key = tuple(map(id, variables))
        if key not in self._updates:
            if not variables or len(self._updates) == _MOST_JOINT:
                return None

            def update(gradients: list[tf.Tensor]) -> None:
                for gradient, variable in zip(gradients, variables, strict=True):
                    self._optimizer._update_step(gradient, variable)

            self._updates[key] = tf.function(update, jit_compile=True)
        return self._updates[key]


def balance(sizes: Sequence[int], held: Sequence[int]) -> list[int]:
    """Divide things among ranks: the largest first, each to the rank that has least.

    Args:
      sizes: The size of each thing.
      held: What each rank has already.

    Returns:
      The rank of each thing.

    Example:
      >>> balance([3, 9, 4, 4], held=[0, 0])
      [1, 0, 1, 1]
    """
    totals, owners = list(held), [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owners[number] = min(range(len(totals)), key=totals.__getitem__)
        totals[owners[number]] += sizes[number]
    return owners


class OptimizerShards:
    """The division of a Keras optimizer's state among the ranks; an optimizer has one at most."""

    def __init__(self) -> None:
        self._owners: dict[str, int] = {}  # key of a variable -> its rank
        self._held = [0] * collectives.world().size  # bytes of each rank's variables
        self._slots: list[tuple[tf.Variable, int]] = []

    @staticmethod
    def of(optimizer: Any) -> OptimizerShards | None:
        """Return an optimizer's division; None if it isn't divided."""
        return _divided.get(inner_optimizer(optimizer))

    @staticmethod
    def divide(optimizer: Any, variables: Sequence[tf.Variable]) -> OptimizerShards:
        """Return an optimizer's division, of these variables too, after releasing other ranks' slots.

        Args:
          optimizer: The Keras optimizer; if it isn't built, it is built for the variables.
          variables: The dense variables, in the same order on all ranks.

        Raises:
          ConfigError: The optimizer was built for other variables, or has state that doesn't belong to one
            variable.
        """
        inner = inner_optimizer(optimizer)
        with lift_variables():
            inner.build(variables)
            found = _divided.get(inner) or OptimizerShards()
            found._add(inner, variables)
            _divided[inner] = found
            found.release()
        return found

    def _add(self, optimizer: Any, variables: Sequence[tf.Variable]) -> None:
        """Give the variables that have no owner one."""
        new = {optimizer._var_key(each): each for each in variables}
        new = {key: each for key, each in new.items() if key not in self._owners}
        if not new:
            return
        if strange := [each.name for key, each in new.items() if key not in optimizer._index_dict]:
            raise ConfigError(
                f"{type(optimizer).__name__} was built for other variables than {strange[0]}: call "
                "optimizer.build(variables) with all of them before the first step, or use another optimizer "
                "for it"
            )
        slots = _slots_of(optimizer)
        sizes = [each.shape.num_elements() * each.dtype.size for each in new.values()]
        for key, size, owner in zip(new, sizes, balance(sizes, self._held), strict=True):
            self._owners[key] = owner
            self._held[owner] += size
            self._slots += [(slot, owner) for slot in slots[key]]

    @property
    def slots(self) -> list[tf.Variable]:
        """The slots of all variables, of which this rank has some."""
        return [slot for slot, _ in self._slots]

    def step(self, optimizer: Any, variables: Sequence[tf.Variable], sums: Sequence[Gradient]) -> ShardedStep:
        """Return the step of variables that `divide` was called with.

        Args:
          optimizer: The Keras optimizer.
          variables: The dense variables.
          sums: Their gradients, some of which may be None, the same ones on all ranks.
        """
        inner = inner_optimizer(optimizer)
        owners = [self._owners[inner._var_key(variable)] for variable in variables]
        return ShardedStep(inner, variables, owners, sums)

    @contextmanager
    def whole(self, gather: bool) -> Iterator[None]:
        """Make all slots whole in a ``with`` block, to save or load them; then release them again.

        Args:
          gather: Whether rank 0 gets the values of all slots, which it saves; all ranks must call this
            together. False: slots of other ranks' variables are zeros until they are loaded.
        """
        try:
            if gather:
                self._gather()
            else:
                for slot in self._of_others():
                    _fill(slot, tf.zeros(slot.shape, slot.dtype))
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Release the slots of other ranks' variables; call it eagerly."""
        for slot in self._of_others():
            _fill(slot, tf.zeros([0], slot.dtype))

    def _of_others(self) -> Iterator[tf.Variable]:
        rank = collectives.world().rank
        # A scalar has nothing to release.
        return (slot for slot, owner in self._slots if owner != rank and slot.shape.rank)

    def _gather(self) -> None:
        """Send the slots to rank 0, one after another."""
        here = collectives.world()
        for slot, owner in self._slots:
            if owner == 0:
                continue
            size, own = slot.shape.num_elements(), here.rank == owner
            with tf.device("CPU:0"):
                sent = tf.one_hot(0, here.size, on_value=size if own else 0, dtype=tf.int32)
                coming = tf.one_hot(owner, here.size, on_value=0 if here.rank else size, dtype=tf.int32)
                rows = tf.reshape(slot.read_value(), [-1]) if own else tf.zeros([0], slot.dtype)
            rows, _ = collectives.alltoall(rows, sent, name="optimizer/slots", received_splits=coming)
            if here.rank == 0:
                _fill(slot, tf.reshape(rows, slot.shape))


_divided: weakref.WeakKeyDictionary[Any, OptimizerShards] = weakref.WeakKeyDictionary()


def _slots_of(optimizer: Any) -> dict[str, list[tf.Variable]]:
    """Return a built Keras optimizer's slots by the key of their variable.

    Keras' optimizers keep slots in attributes that are lists in the order of the variables.

    Raises:
      ConfigError: The optimizer has a variable that isn't in such a list, and isn't its rate or its count.
    """
    keys = sorted(optimizer._index_dict, key=optimizer._index_dict.get)
    slots: dict[str, list[tf.Variable]] = {key: [] for key in keys}
    known = {id(optimizer._iterations)}
    left: dict[int, str] = {id(variable): variable.name for variable in optimizer.variables}
    for name, value in vars(optimizer).items():
        if isinstance(value, tf.Variable):
            if name in ("_learning_rate", "_current_learning_rate"):
                known.add(id(value))
            left.setdefault(id(value), name)
        elif isinstance(value, list) and name != "_variables" and len(value) == len(keys):
            for key, slot in zip(keys, value, strict=True):
                if isinstance(slot, tf.Variable):
                    slots[key].append(slot)
                    known.add(id(slot))
    shared = [name for each, name in left.items() if each not in known]
    if shared:
        raise ConfigError(
            f"shard_optimizer divides state that belongs to one variable each, and "
            f"{type(optimizer).__name__} has {', '.join(shared[:3])} for several: compile without "
            "shard_optimizer, or with another optimizer, such as Adam"
        )
    return slots


def _fill(slot: tf.Variable, value: tf.Tensor) -> None:
    """Replace a slot's value by one that may have another shape."""
    with tf.device(slot.device):
        tf.raw_ops.AssignVariableOp(resource=slot.handle, value=tf.identity(value))


class ShardedStep:
    """A step in which each rank updates the variables that it owns.

    Args:
      optimizer: The Keras optimizer, without its loss scaling.
      variables: The dense variables.
      owners: The rank that owns each of them.
      sums: Their gradients, some of which may be None.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[tf.Variable],
        owners: Sequence[int],
        sums: Sequence[Gradient],
    ) -> None:
        self._optimizer, self._variables, self._owners = optimizer, list(variables), list(owners)
        self._learning = [number for number, gradient in enumerate(sums) if gradient is not None]

    @property
    def has_gradients(self) -> bool:
        """Whether any variable has a gradient, on whichever rank."""
        return bool(self._learning)

    def means(
        self, sums: Sequence[Gradient], samples: tf.Tensor, state: tf.Tensor, stop: tf.Tensor
    ) -> GlobalMeans:
        """Return the means of this rank's variables; see `scattered_means`."""
        return scattered_means(sums, self._variables, self._owners, samples, state, stop)

    def own(self, pairs: Sequence[tuple[Gradient, tf.Variable]]) -> list[tuple[Gradient, tf.Variable]]:
        """Return the gradients and variables that this rank owns."""
        rank = collectives.world().rank
        return [pair for pair, owner in zip(pairs, self._owners, strict=True) if owner == rank]

    def global_norm(self, gradients: Sequence[Gradient]) -> tf.Tensor:
        """Return `tf.linalg.global_norm` of the gradients of all ranks, with the same bits.

        Args:
          gradients: For each variable that this rank owns its gradient, or None.
        """
        zero = tf.zeros([], self._variables[self._learning[0]].dtype)
        halves = [zero if gradients[n] is None else tf.nn.l2_loss(gradients[n]) for n in self._learning]
        (halves,) = collectives.allreduce_sum(
            [tf.stack(halves)], name="step/dense_norms", place=compute_place()
        )
        return tf.sqrt(tf.reduce_sum(halves) * 2.0)

    def clip(self, gradients: Sequence[Gradient], limit: float | None) -> list[Gradient]:
        """Clip gradients by the global norm of all ranks, as the Keras optimizer does by that of one rank.

        Args:
          gradients: As for `global_norm`.
          limit: The largest norm; None or 0: no clipping.
        """
        if not limit or not self._learning:
            return list(gradients)
        return tf.clip_by_global_norm(list(gradients), limit, use_norm=self.global_norm(gradients))[0]

    def all_finite(self, gradients: Sequence[Gradient]) -> tf.Tensor:
        """Return whether the gradients of all ranks are finite, () bool."""
        bad = tf.cast(~all_finite(gradients), tf.float32)
        (bad,) = collectives.allreduce_sum([bad], name="step/dense_finite", place=compute_place())
        return tf.equal(bad, 0)

    @contextmanager
    def clipped(self) -> Iterator[None]:
        """Keep the Keras optimizer from clipping by the norm of this rank's gradients alone."""
        with _HOOKED:
            limit = self._optimizer.global_clipnorm
            self._optimizer.global_clipnorm = None
            try:
                yield
            finally:
                self._optimizer.global_clipnorm = limit

    def send_weights(self) -> None:
        """Send the updated variables to all ranks, in one collective for each dtype."""
        here = collectives.world()
        by_dtype: dict[tf.DType, list[int]] = {}
        for number in self._learning:
            by_dtype.setdefault(self._variables[number].dtype, []).append(number)
        for dtype, members in by_dtype.items():
            of_rank = [[n for n in members if self._owners[n] == rank] for rank in range(here.size)]
            sizes = [[self._variables[n].shape.num_elements() for n in numbers] for numbers in of_rank]
            own = [tf.reshape(self._variables[n].read_value(), [-1]) for n in of_rank[here.rank]]
            vector = tf.concat(own, axis=0) if own else tf.zeros([0], dtype)
            found = collectives.allgather(
                vector, [sum(each) for each in sizes], name="step/weights", place=compute_place()
            )
            for rank, numbers in enumerate(of_rank):
                if rank == here.rank or not numbers:
                    continue
                for number, values in zip(numbers, tf.split(found[rank], sizes[rank]), strict=True):
                    variable = self._variables[number]
                    variable.assign(tf.reshape(values, variable.shape))
