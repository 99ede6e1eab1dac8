"""What a policy can do that is trained by rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import tensorflow as tf

Batch = Mapping[str, Any]
Sampling = Literal["sample", "without_replacement", "beam"]


@runtime_checkable
class Policy(Protocol):
    """A model that draws items and knows their probabilities, such as `gmeta.models.GenerativeRetriever`.

    It is a `tf.keras.Model`. A batch is a dict of columns, a row a user. ``allow`` is bool (V,), which items
    of the policy's catalogue may come out, in its order; probabilities are among those items. None: all. A
    policy that is trained without masks needs no such argument.
    """

    name: str

    def sample(
        self,
        x: Batch,
        group: int,
        *,
        seed: Any,
        step: Any,
        method: Sampling = "sample",
        keys: Any = None,
        allow: Any = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Draw ids of items, (users, group), as a function of the seed, the step and the users' keys.

        Returns the logs of their probabilities too, (users, group).
        """

    def digit_log_probs(
        self, x: Batch, items: tf.Tensor, training: bool = False, *, allow: Any = None
    ) -> tf.Tensor:
        """Compute the logs of the probabilities of the digits of items, (users, group, L).

        Those of an item that isn't allowed sum to -inf, without gradient.
        """

    def retrieve(
        self, x: Batch, k: int, *, beam: int | None = None, allow: Any = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the k likeliest items, (users, k) ids, and the logs of their probabilities."""

    def copy_dense(self, name: str) -> Policy:
        """Make a policy of the same tables, not copied, and of copies of the other weights."""
