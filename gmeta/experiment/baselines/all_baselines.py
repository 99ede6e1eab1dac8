"""All baselines, tuned on warm tasks by cross-validation and fitted to their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from gmeta.experiment.baselines import ATTRIBUTES
from gmeta.experiment.baselines.attribute_levels import ItemAttributes
from gmeta.experiment.baselines.attributes import FittedAttributes
from gmeta.experiment.baselines.item_vectors import ItemVectors
from gmeta.experiment.baselines.pseudo_cold import FOLDS, Predictor, cut_folds
from gmeta.experiment.baselines.task_rows import Floats, Tasks
from gmeta.experiment.baselines.tuning import Tuned, tune


@dataclass(frozen=True)
class Baselines:
    """The baselines, fitted to warm tasks.

    Attributes:
      tuned: The settings that cross-validation has chosen.
      predictors: Name -> the fitted baseline, from the simplest on.
      items: How many items the warm rows have. Unknown items have numbers from this one on, which only the
        baseline by attributes tells apart.

    Example:
      >>> rng = np.random.default_rng(0)
      >>> rows = Rows(rng.integers(0, 9, 80), rng.normal(size=80), np.arange(0, 81, 4))
      >>> list(Baselines.of(Tasks(rows, rows), items=9).predictors)
      ['item_mean', 'biases', 'neighbours', 'kriging', 'factors']
    """

    tuned: Tuned
    predictors: Mapping[str, Predictor]
    items: int

    @classmethod
    def of(
        cls, warm: Tasks, items: int, *, by_item: bool = True, attributes: ItemAttributes | None = None
    ) -> Baselines:
        """Tune all baselines on pseudo-cold tasks, and fit them to all rows of the warm tasks.

        Args:
          warm: The warm tasks; those that play new tasks are cut into support and query as the test tasks
            are. Their items are numbered from 0 to ``items`` - 1.
          items: How many items there are.
          by_item: Whether rows have an item. If not, only the item mean and the biases make sense.
          attributes: The attributes of all items that tasks will have; None: items have none, and the
            baseline by attributes is left out.
        """
        with one_thread():
            tuned = tune(cut_folds(warm), items, by_item, attributes)
            return cls(tuned, tuned.fit(warm.whole(), items), items)

    def predict(self, tasks: Tasks) -> dict[str, Floats]:
        """Predict the query rows of new tasks: name -> (rows,)."""
        with one_thread():
            return {name: one.predict(self._seen(name, tasks)) for name, one in self.predictors.items()}

    def predict_warm(self, warm: Tasks, asked: Tasks) -> dict[str, Floats]:
        """Predict the query rows of warm tasks, each by baselines that were fitted to other tasks.

        Args:
          warm: The tasks that the baselines were fitted to. Those fitted to a task's own query rows would
            know what they are asked.
          asked: Those of them that have query rows, perhaps with fewer of their support rows.

        Returns:
          Name -> (rows,).
        """
        order = np.random.default_rng(0).permutation(len(warm))
        found = {name: np.zeros(len(asked.query.items)) for name in self.predictors}
        with one_thread():
            for part in np.array_split(order, min(FOLDS, len(order))):
                others = np.setdiff1d(order, part)
                if not len(others):
                    return self.predict(asked)
                fitted = self.tuned.fit(warm.choose(others).whole(), self.items)
                own = np.flatnonzero(np.isin(warm.asked, part))
                rows = np.isin(asked.query.task, own)
                for name, one in fitted.items():
                    found[name][rows] = one.predict(self._seen(name, asked.choose(own)))
        return found

    def variances(self, tasks: Tasks) -> dict[str, Floats]:
        """Compute the variance of the query rows' labels: name -> (rows,), of baselines that know one."""
        with one_thread():
            return {
                name: one.variance(self._seen(name, tasks))
                for name, one in self.predictors.items()
                if isinstance(one, ItemVectors | FittedAttributes)
            }

    def _seen(self, name: str, tasks: Tasks) -> Tasks:
        """Return the tasks as a baseline sees them: to those without attributes, unknown items are one."""
        return tasks if name == ATTRIBUTES else tasks.merge_unknown(self.items)


def one_thread() -> threadpool_limits:
    """Keep matrix libraries to one thread: of many small matrices, threads make no product faster.

    Where other processes have work as well, threads that wait for each other make it ten times slower.
    """
    return threadpool_limits(1, user_api="blas")
