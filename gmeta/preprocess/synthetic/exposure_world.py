"""The items of the synthetic log of exposures, and what is the same for all of its users."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gmeta.preprocess.synthetic.exposure_config import ExposureConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHOWN, VIEW, CART, BUY = 0, 1, 2, 3
"""Actions; an exposure has `SHOWN`."""

START, SPAN = 1_700_000_000, 30 * 86_400
"""When users' first events are, in seconds."""

SESSION = 0.05
"""The probability that an event begins a session."""

FOLLOWS = 0.4
"""The probability that an interest that changes becomes the category that follows."""

ACTIONS = np.array([[0.94, 0.05, 0.01], [0.70, 0.22, 0.08]])
"""The shares of views, carts and purchases, of events off the interest and on it."""

SHOWN_OF = (0.3, 0.25, 0.25, 0.2)
"""The shares of what is shown: of the interest, of what follows, of the lasting taste, of any category."""

CITIES = 12


class ExposureWorld:
    """The parameters that are the same for all users."""

    def __init__(self, rng: np.random.Generator, config: ExposureConfig) -> None:
        self.config = config
        items, categories = config.items, config.categories
        self.category = np.concatenate(
            [np.arange(categories), rng.integers(categories, size=items - categories)]
        )
        self.style = rng.integers(config.styles, size=items)
        self.quality = config.quality * rng.standard_normal((2, items))
        ring = rng.permutation(categories)
        self.follows = np.empty(categories, np.int64)
        self.follows[ring] = np.roll(ring, -1)  # all categories form one ring, so none follows itself
        self.home = config.home * rng.standard_normal((CITIES, categories))
        # Items by category, with cumulative popularities from 0 to 1 in each: one search draws an item.
        self.order = np.argsort(self.category, kind="stable")
        popularity = 1 / (rng.permutation(items) + 10.0)
        total = np.bincount(self.category, popularity)
        share = np.cumsum((popularity / total[self.category])[self.order])
        self.shares = np.minimum(share, self.category[self.order] + 1.0)

    def items(self, categories: Ints, uniform: Floats) -> Ints:
        """Return an item of each of the categories, by its popularity, for a number from 0 to 1 each."""
        found = np.searchsorted(self.shares, categories + uniform, side="right")
        return self.order[np.minimum(found, len(self.order) - 1)]

    def logits(self, interest: Ints, taste: Floats, city: Ints) -> Floats:
        """Compute what each category adds to the logit of a click, b with it.

        Args:
          interest: s, (n,).
          taste: τ_u, (n, categories), or (1, categories) for one user.
          city: (n,).

        Returns:
          (n, categories).
        """
        config, shown = self.config, np.arange(self.config.categories)
        follows = self.follows[interest][:, None]
        logit = config.click + config.now * (shown == interest[:, None]) + config.next * (shown == follows)
        logit += config.taste * taste + self.home[city]
        return logit
