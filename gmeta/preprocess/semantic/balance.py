"""Assigns vectors to centers so that all centers get as many."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.codebooks import Vectors, places_in_groups, squared_distances


def assign_evenly(vectors: Vectors, centers: Vectors) -> NDArray[np.int32]:
    """Assign each vector to a near center, of which none gets more than one vector more than another.

    Vectors ask for their nearest center that has room; a center takes the nearest of those that ask, and the
    others ask again. With n vectors and k centers, n mod k centers, those that fill first, take one more.

    Args:
      vectors: float32 (n, dim), n >= k.
      centers: float32 (k, dim).

    Returns:
      The numbers of the centers, int32 (n,).
    """
    share, larger = divmod(len(vectors), len(centers))
    found = np.full(len(vectors), -1, np.int32)
    counts = np.zeros(len(centers), np.int64)
    distances = squared_distances(vectors, centers)
    waiting = np.arange(len(vectors))
    while len(waiting):
        most = share + (larger > 0)
        wished = distances[waiting].argmin(axis=1)
        far = distances[waiting, wished]
        order = np.lexsort((waiting, far, wished))
        group = wished[order]
        takes = places_in_groups(group) < most - counts[group]
        found[waiting[order[takes]]] = group[takes]
        counts += np.bincount(group[takes], minlength=len(centers))
        # Once as many centers as may have taken one vector more, the others are full with their share.
        beyond = np.flatnonzero(counts > share)
        if larger and len(beyond) >= larger:
            for center in beyond[larger:]:  # that took one more in the same round: give back the farthest
                mine = np.flatnonzero(found == center)
                found[mine[distances[mine, center].argmax()]] = -1
                counts[center] -= 1
            distances[:, counts >= share] = np.inf
            larger = 0
        distances[:, counts >= share + (larger > 0)] = np.inf
        waiting = np.flatnonzero(found < 0)
    return found
