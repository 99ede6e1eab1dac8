"""Elements of about equal cost: the cost of training on a sequence, and the time of a step.

`SequenceCost` is the cost of a sequence, which `fit_steps` fits to measured steps. `Balance` distributes
equal work to all ranks: elements with enough groups to reach a target cost, and no more tokens than fit into
memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.graph import assert_first
from gmeta.core.schema import Schema
from gmeta.io.readers.prepared_split import open_split

# Fits the cost of sequences to measured steps.

_SAME = 1e-9
"""Columns that differ by less than this part of their size are one column: sums of lengths are exact."""


def fit_steps(batches: Sequence[npt.ArrayLike], seconds: npt.ArrayLike) -> tuple[float, float]:
    """Fit seconds per token and per pair of tokens, as `SequenceCost.of_steps` describes.

    Args:
      batches: The lengths of each batch's sequences.
      seconds: The time of each batch's step.

    Returns:
      a and b.

    Raises:
      ConfigError: As in `SequenceCost.of_steps`.
    """
    took = _times(seconds, len(batches))
    sums = np.array([_sums(number, lengths) for number, lengths in enumerate(batches)])
    largest = np.maximum(sums.max(axis=0), 1.0)
    columns = np.column_stack([np.ones(len(sums)), sums / largest])  # scaled to similar size
    if np.linalg.matrix_rank(columns, tol=_SAME) < 3:
        raise ConfigError(
            f"of_steps: the {len(batches)} batches are too alike: their tokens ({_range(sums[:, 0])}) and "
            f"squared lengths ({_range(sums[:, 1])}) don't vary independently, so nothing shows what "
            "each of them costs. Add a batch of many short sequences, one of a few long ones, and a small one"
        )
    _, linear, quadratic = _least_distance(columns, took / took.max())
    if linear == quadratic == 0:
        raise ConfigError(
            f"of_steps: steps of more tokens don't take longer: {_range(took)} seconds for "
            f"{_range(sums[:, 0])} tokens. Time larger batches, each several times, and give the medians"
        )
    scale = took.max() / largest
    return float(linear * scale[0]), float(quadratic * scale[1])


def _least_distance(
    columns: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the x >= 0 that minimizes sum |columns @ x - values|, by a linear program over distances."""
    from scipy.optimize import linprog  # SciPy takes a while to import

    count, terms = columns.shape[1], np.eye(len(values))
    solved = linprog(
        np.repeat([0.0, 1.0], [count, len(values)]),
        A_ub=np.block([[columns, -terms], [-columns, -terms]]),  # a term is at least the distance, up or down
        b_ub=np.concatenate([values, -values]),
        bounds=(0, None),
        # The smallest that HiGHS accepts. If c dominates a step, its defaults leave a and b only a few
        # digits.
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    return np.asarray(solved.x[:count])


def _times(seconds: npt.ArrayLike, batches: int) -> npt.NDArray[np.float64]:
    """Return the times as float64; refuse too few batches, or another number of times."""
    took = np.asarray(seconds, np.float64)
    if batches < 3 or took.shape != (batches,):
        raise ConfigError(
            f"of_steps: got {batches} batches and seconds of shape {took.shape}: give at least 3 batches, "
            "and one number of seconds for each"
        )
    wrong = np.flatnonzero(~(np.isfinite(took) & (took > 0)))
    if wrong.size:
        raise ConfigError(
            f"of_steps: batch {wrong[0]} took {took[wrong[0]]} seconds: give finite numbers above 0"
        )
    return took


def _sums(number: int, lengths: npt.ArrayLike) -> tuple[float, float]:
    """Return the sum of a batch's lengths, and the sum of their squares."""
    length = np.asarray(lengths, np.float64)
    if length.ndim != 1 or not (np.isfinite(length) & (length >= 0)).all():
        raise ConfigError(
            f"of_steps: batch {number} must be a list of lengths, finite and at least 0, got {lengths!r}"
        )
    return float(length.sum()), float(np.square(length).sum())


def _range(values: npt.NDArray[np.float64]) -> str:
    return f"{values.min():.4g} to {values.max():.4g}"


Costs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SequenceCost:
    r"""The cost of a sequence of L tokens.

    .. math:: F(L) = a L + b L^2

    Projections and feed-forward layers make up the linear part, attention the quadratic one. With balancing
    by tokens alone (``SequenceCost()``), a rank with a few long sequences has more work than a rank with many
    short ones.

    Attributes:
      linear: a, per token.
      quadratic: b, per pair of tokens.

    Raises:
      ConfigError: A number is below 0, or both are 0.

    Example:
      >>> SequenceCost.of_hstu(dim=512).of([100, 200])
      array([2.72384e+08, 5.65248e+08])

    References:
      MTGenRec, section 3.4 and appendix B.5.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if min(self.linear, self.quadratic) < 0 or max(self.linear, self.quadratic) == 0:
            raise ConfigError(
                f"SequenceCost: linear={self.linear} and quadratic={self.quadratic} must be at least 0, and "
                "one of them above"
            )

    @classmethod
    def of_hstu(cls, dim: int, blocks: int = 1, *, causal: bool = True) -> SequenceCost:
        r"""Count the floating-point operations of HSTU's blocks in the forward pass, for one sequence.

        .. math:: F(L) = B \left(10 d^2 L + \{4, 2\} \, d L^2\right)

        A multiplication and its addition are two operations. The projections to U, V, Q and K and the output
        projection take :math:`10 d^2` per token; the two products of attention take :math:`4 d` per pair of
        tokens, :math:`4 d L^2` over all pairs. The number of heads doesn't matter: d is their joint width.
        The backward pass takes twice as many.

        A causal mask leaves :math:`L (L + 1) / 2` pairs, of which :math:`L^2 / 2` are counted: half of the
        full square, as in publications. The part not counted, half of each token's pair with itself, would
        add :math:`2 d L`, which is :math:`1 / (5 d)` of the projections, 0.04 % at d = 512. A kernel that
        skips masked pairs computes half of the square; a kernel that multiplies the whole square and masks
        the result computes all of it.

        Args:
          dim: The width d of the tokens.
          blocks: The number of blocks B; a factor, which changes no balance.
          causal: False counts the full square.

        Raises:
          ConfigError: A number is below 1.

        Example:
          >>> f"{SequenceCost.of_hstu(dim=1024, blocks=22, causal=False).of(410):.3g}"
          '1.1e+11'

        References:
          Zhai et al., "Actions Speak Louder than Words" (ICML 2024), section 3; MTGenRec, appendix B.5.
        """
        dim, blocks = whole_number("of_hstu: dim", dim, 1), whole_number("of_hstu: blocks", blocks, 1)
        return cls(linear=10.0 * dim * dim * blocks, quadratic=(2.0 if causal else 4.0) * dim * blocks)

    @classmethod
    def of_steps(cls, batches: Sequence[npt.ArrayLike], seconds: npt.ArrayLike) -> SequenceCost:
        r"""Fit the cost of a sequence to the measured seconds of steps.

        .. math::
           \min_{a, b, c \ge 0} \sum_i \Big|t_i - c - a \sum_{L \in B_i} L - b \sum_{L \in B_i} L^2\Big|

        A device runs attention at a different rate than large matrix products, so counted operations
        (`of_hstu`) and time can imply different b / a, and batches with equal operations then take unequal
        time. Here F is in seconds: a per token, b per pair of tokens. So is the target of a
        `gmeta.io.Balance`. The constant c of every step isn't kept: it is the same on all ranks, so it
        doesn't affect the balance.

        A fit is as good as its batches: vary tokens and squared lengths independently, by adding batches of
        short and of long sequences to those drawn from data, and some of half the size. Time each batch
        several times, after one untimed run, and pass the median. A few late steps among the times then have
        little effect, since the fit sums distances, not their squares. Times must cover only the ranks' own
        computation, without waiting for other ranks or for data.

        Args:
          batches: The lengths of each batch's sequences, in tokens.
          seconds: (batches,), the time of the step on each batch.

        Raises:
          ConfigError: There are fewer than 3 batches, or a different number of times; a time isn't finite or
            above 0; a length isn't finite or is below 0; tokens and squared lengths don't vary independently,
            as in equal batches; or steps don't take longer with either of them.

        Example:
          >>> batches = [[100] * 80, [200] * 40, [400] * 20, [100] * 40]
          >>> cost = SequenceCost.of_steps(batches, [0.026, 0.034, 0.05, 0.018])
          >>> f"{cost.linear:.1e} s a token, {cost.quadratic:.1e} s a pair"
          '1.0e-06 s a token, 1.0e-08 s a pair'

        References:
          MTGenRec, section 3.4 (the cost that it balances); Bloomfield and Steiger, "Least Absolute
          Deviations" (1983), chapter 1 (why late steps count little).
        """
        linear, quadratic = fit_steps(batches, seconds)
        return cls(linear, quadratic)

    def of(self, lengths: npt.ArrayLike) -> Costs:
        """Compute the costs of sequences of these lengths, as float64 of the same shape."""
        length = np.asarray(lengths, np.float64)
        return self.linear * length + self.quadratic * length * length

    def length(self, cost: float) -> float:
        r"""Compute the length, a real number, of a sequence with this cost: the inverse of `of`.

        .. math:: L = \frac{2 F}{a + \sqrt{a^2 + 4 b F}}

        Args:
          cost: F, at least 0.

        Raises:
          ConfigError: The cost is below 0, or isn't a number.

        Example:
          >>> SequenceCost(2.0, 0.5).length(16.0)
          4.0
        """
        if not cost >= 0:
            raise ConfigError(f"SequenceCost: the cost of a sequence is at least 0, got {cost}")
        root = float(np.sqrt(self.linear**2 + 4 * self.quadratic * cost))
        return 2 * cost / (self.linear + root) if root else 0.0


# Refuses a group or a batch with more tokens than fit into memory.


def group_tokens(
    element: dict[str, Any], schema: Schema, column: str | None, longest: int | None
) -> tf.Tensor:
    """Count the tokens of an element's groups, (G,) int64, as the native reader does when it cuts.

    Args:
      element: An element of `gmeta.io.groups`.
      schema: The schema of its columns.
      column: `gmeta.io.Balance.tokens`.
      longest: `gmeta.io.Balance.longest`.
    """
    splits = element["row_splits"]
    rows = splits[1:] - splits[:-1]
    most = tf.int64.max if longest is None else longest
    if column is None:
        return tf.minimum(rows, most)
    if column not in element["columns"] or not (schema[column].is_list or schema[column].dtype == "int64"):
        return tf.zeros_like(rows)  # the native reader refuses it
    values = element["columns"][column]
    if schema[column].is_list:
        ends = tf.gather(values.row_splits, splits)
        return tf.minimum(ends[1:] - ends[:-1], most)
    last = tf.gather(tf.concat([[0], values], axis=0), splits[1:])  # the value of a group's last row
    return tf.where(rows > 0, tf.clip_by_value(last, 0, most) + rows, 0)


def bound_groups(element: dict[str, Any], tokens: tf.Tensor, max_tokens: int, path: str) -> dict[str, Any]:
    """Return the element, if each of its groups has at most ``max_tokens``.

    Args:
      element: An element of `gmeta.io.groups`.
      tokens: The tokens of its groups, (G,) int64.
      max_tokens: `gmeta.io.Balance.max_tokens`.
      path: Of the split, for the message.

    Raises:
      tf.errors.InvalidArgumentError: While iterating, as `gmeta.io.reader_stats.as_data_error` reads it.
    """
    first = tf.argmax(tf.concat([tokens, [0]], axis=0))  # an element may have no groups
    sentence = tf.strings.join(
        [
            f"gmeta: {path}: the group of task ",
            tf.strings.as_string(tf.concat([element["task"], [0]], axis=0)[first]),
            " has ",
            tf.strings.as_string(tf.concat([tokens, [0]], axis=0)[first]),
            f" tokens, and a batch may have max_tokens={max_tokens}; let longest= cut long sequences, of the "
            "reader and of Balance, or leave them out when preparing the data\n",
        ]
    )
    return assert_first(element, tokens <= max_tokens, [sentence])


def bound_batch(batch: dict[str, Any], max_tokens: int, path: str) -> dict[str, Any]:
    """Return a batch of `gmeta.io.sequences`, if it has at most ``max_tokens`` events and exposures.

    A batch can have more than the reader counted, if `longest` limits the counted tokens of a user who has
    exposures in addition to the history.

    Args:
      batch: The batch.
      max_tokens: The maximum number of events and exposures.
      path: Of the split, for the message.

    Raises:
      tf.errors.InvalidArgumentError: While iterating, as `gmeta.io.reader_stats.as_data_error` reads it.
    """
    counted = tf.constant(0, tf.int64)
    for parts in (batch["history"], {**batch["targets"], **batch["labels"]}):
        for column in list(parts.values())[:1]:
            counted += column.row_splits[-1]
    sentence = tf.strings.join(
        [
            f"gmeta: {path}: a batch has ",
            tf.strings.as_string(counted),
            f" events and exposures, and may have max_tokens={max_tokens}; set longest= of Balance to "
            "the reader's plus the most exposures of a user, so that exposures count\n",
        ]
    )
    return assert_first(batch, counted <= max_tokens, [sentence])


@dataclass(frozen=True)
class Balance:
    """Elements with enough groups to reach a target cost (MTGenRec, algorithm 1).

    A group is a sequence. Its tokens are its rows, or the values of a list column in all its rows, or its
    rows and the events of a separate history (`gmeta.io.late`).

    Attributes:
      target: The cost that an element should have.
      cost: The cost of a sequence; by default its number of tokens.
      max_tokens: The maximum number of tokens of an element, to limit memory (`gmeta.models.max_tokens`
        measures how many fit into a GPU). No element has more: reading a single group with more raises an
        error. If a rank reads for several in an elastic job, it bounds the part for each.
      tokens: The list column whose values are counted; or the int64 column whose value in the group's last
        row is the number of events of its history, which are counted in addition to its rows. None: rows.
      longest: The maximum number of counted tokens of a sequence, for a model that reads no more; None: all.
        For a separate history, it limits the events, and all rows count.

    Raises:
      ConfigError: ``target`` isn't above 0, or ``max_tokens`` or ``longest`` is below 1.

    Example:
      >>> cost = SequenceCost.of_hstu(dim=512, blocks=3)
      >>> balance = Balance.of("data/train", sequences=480, cost=cost, longest=3000)  # doctest: +SKIP
      >>> batches = sequences("data/train", history=["item"], balance=balance)  # doctest: +SKIP
    """

    target: float
    cost: SequenceCost = field(default_factory=SequenceCost)
    max_tokens: int | None = None
    tokens: str | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        if not self.target > 0 or any(
            most is not None and most < 1 for most in (self.max_tokens, self.longest)
        ):
            raise ConfigError(
                f"Balance: target={self.target} must be above 0, max_tokens={self.max_tokens} and "
                f"longest={self.longest} at least 1"
            )

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        sequences: int,
        cost: SequenceCost | None = None,
        max_tokens: int | None = None,
        longest: int | None = None,
    ) -> Balance:
        r"""Derive the target from a split, so that an element has ``sequences`` sequences on average.

        .. math:: target = n \, \frac{1}{G} \sum_g F(\min(L_g, longest))

        for the split's G groups of :math:`L_g` rows. The lengths are read from the indexes beside the shards;
        no shard is read. A sequence's tokens are its rows.

        Args:
          path: As for `gmeta.io.groups`.
          sequences: n, the average number of sequences of an element.
          cost: F; by default the number of tokens.
          max_tokens: As the attribute.
          longest: As the attribute.

        Raises:
          ConfigError: A number is below 1, there is no such split, or it has groups of more than
            ``max_tokens`` tokens.
          DataError: An index can't be read.
        """
        whole_number("Balance.of: sequences", sequences, 1)
        cost, split = cost or SequenceCost(), open_split(path)
        total, most, longer = 0.0, 0, 0
        for rows in split.rows_of_groups():
            counted = np.minimum(rows, longest or rows.max())
            total += float(cost.of(counted).sum())
            most = max(most, int(counted.max()))
            longer += 0 if max_tokens is None else int((counted > max_tokens).sum())
        if longer:
            raise ConfigError(
                f"Balance.of: {longer} of {split.groups} groups of {os.fspath(path)} have more than "
                f"max_tokens={max_tokens} tokens, up to {most}: give longest={max_tokens} or less to "
                "Balance.of, and to the reader, which cuts histories to it"
            )
        return cls(sequences * total / split.groups, cost, max_tokens, longest=longest)
