"""Calibration of predicted variances: whether errors are as large as they were said to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVELS, BINS = (50, 80, 95), 10


@dataclass(frozen=True)
class Calibration:
    """How predicted variances of labels compare with squared errors on the query rows.

    Attributes:
      ratio: One value per seed: the mean of squared error / predicted variance; 1 is ideal, above 1 the
        method is too sure.
      coverage: Level in percent -> one value per seed: the share of labels within the normal distribution's
        central interval of that level.
      deviations: The rows of all seeds, in ascending order of predicted variance, in parts of equal size: the
        root of each part's mean predicted variance.
      errors: Each part's root mean squared error; ideally the same numbers.
    """

    ratio: Sequence[float]
    coverage: Mapping[int, Sequence[float]]
    deviations: Sequence[float]
    errors: Sequence[float]

    @classmethod
    def of(
        cls,
        labels: NDArray[np.float64],
        predictions: Sequence[NDArray[np.float64]],
        variances: Sequence[NDArray[np.float64]],
    ) -> Calibration:
        """Compare variances with errors.

        Args:
          labels: (rows,).
          predictions: For each seed (rows,).
          variances: For each seed (rows,), above 0, the noise of labels included.

        Example:
          >>> found = Calibration.of(np.array([1.0, -3.0]), [np.zeros(2)], [np.array([1.0, 4.0])])
          >>> found.ratio, found.coverage, found.deviations, found.errors
          ([1.625], {50: [0.0], 80: [0.5], 95: [1.0]}, [1.0, 2.0], [1.0, 3.0])
        """
        from scipy.stats import norm

        wrong = np.square(np.asarray(predictions) - labels)
        said = np.asarray(variances)
        scaled = wrong / said
        order = np.argsort(said, axis=None, kind="stable")
        parts = np.array_split(order, min(BINS, order.size))
        return cls(
            ratio=scaled.mean(axis=1).tolist(),
            coverage={
                level: (scaled <= norm.ppf(0.5 + level / 200) ** 2).mean(axis=1).tolist() for level in LEVELS
            },
            deviations=[float(np.sqrt(said.ravel()[part].mean())) for part in parts],
            errors=[float(np.sqrt(wrong.ravel()[part].mean())) for part in parts],
        )
