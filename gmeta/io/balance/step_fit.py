"""Fits the cost of sequences to measured steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError

_SAME = 1e-9
"""Columns that differ by less than this part of their size are one column: sums of lengths are exact."""


def fit_steps(batches: Sequence[npt.ArrayLike], seconds: npt.ArrayLike) -> tuple[float, float]:
    """Fit seconds a token and seconds a pair of tokens, as `SequenceCost.of_steps` describes.

    Args:
      batches: The lengths of each batch's sequences.
      seconds: What each batch's step took.

    Returns:
      a and b.

    Raises:
      ConfigError: As `SequenceCost.of_steps` raises it.
    """
    took = _times(seconds, len(batches))
    sums = np.array([_sums(number, lengths) for number, lengths in enumerate(batches)])
    largest = np.maximum(sums.max(axis=0), 1.0)
    columns = np.column_stack([np.ones(len(sums)), sums / largest])  # of one size, or a product would drown
    if np.linalg.matrix_rank(columns, tol=_SAME) < 3:
        raise ConfigError(
            f"of_steps: the {len(batches)} batches are too alike: their tokens ({_range(sums[:, 0])}) and "
            f"squared lengths ({_range(sums[:, 1])}) don't vary apart from each other, so nothing tells what "
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
    """Return the x >= 0 of least sum |columns @ x - values|, by a program whose terms are distances."""
    from scipy.optimize import linprog  # SciPy takes a while to import

    count, terms = columns.shape[1], np.eye(len(values))
    solved = linprog(
        np.repeat([0.0, 1.0], [count, len(values)]),
        A_ub=np.block([[columns, -terms], [-columns, -terms]]),  # a term is at least the distance, up or down
        b_ub=np.concatenate([values, -values]),
        bounds=(0, None),
        # HiGHS takes no smaller ones. Where c is most of a step, its usual ones leave a and b a few digits.
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    return np.asarray(solved.x[:count])


def _times(seconds: npt.ArrayLike, batches: int) -> npt.NDArray[np.float64]:
    """Return the times as float64, if there is one for each of enough batches."""
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
    """Return the sum of a batch's lengths and that of their squares."""
    length = np.asarray(lengths, np.float64)
    if length.ndim != 1 or not (np.isfinite(length) & (length >= 0)).all():
        raise ConfigError(
            f"of_steps: batch {number} must be a list of lengths, finite and at least 0, got {lengths!r}"
        )
    return float(length.sum()), float(np.square(length).sum())


def _range(values: npt.NDArray[np.float64]) -> str:
    return f"{values.min():.4g} to {values.max():.4g}"
