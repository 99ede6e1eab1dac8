"""The vectorised form in PyTorch: `torch.func` over padded tasks, as in its own MAML tutorial."""

from __future__ import annotations

from typing import Any

import torch
from parts.meta.batches import Batch
from parts.meta.case import INNER_RATE, Case, Start
from parts.meta.torch_form import TorchForm
from torch.func import functional_call, grad, vmap


class VmapForm(TorchForm):
    """One lookup for all samples, `vmap` over the tasks, `grad` for the inner steps, one backward pass.

    Args:
      case: The case.
      start: The first weights.
      compiled: Whether `torch.compile` makes one graph from lookup to loss, for both passes.
    """

    def __init__(self, case: Case, start: Start, compiled: bool = False) -> None:
        super().__init__(case, start)
        self._tasks_losses = vmap(self._task_loss, in_dims=(None, 0, 0, 0, 0, 0, 0))
        self._outer_loss = torch.compile(self._meta_loss, dynamic=True) if compiled else self._meta_loss

    def prepare(self, batch: Batch) -> dict[str, Any]:
        """See `TorchForm`."""
        parts = {"support": batch.support, "query": batch.query}
        made: dict[str, Any] = {"ids": self.embeddings.prepare(batch)}
        labels = torch.from_numpy(batch.labels)
        for name, part in parts.items():
            index = torch.from_numpy(part.index)
            made[name] = (index, labels[index], torch.from_numpy(part.mask))
        return made

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """See `TorchForm`."""
        parameters = dict(self.network.named_parameters())
        return self._outer_loss(parameters, self.embeddings(batch["ids"]), *batch["support"], *batch["query"])

    def _meta_loss(self, parameters: Any, vectors: Any, *parts: Any) -> torch.Tensor:
        index, labels, mask, query_index, query_labels, query_mask = parts
        each = self._tasks_losses(
            parameters, vectors[index], labels, mask, vectors[query_index], query_labels, query_mask
        )
        return each.sum() / query_mask.sum()

    def _task_loss(self, parameters: Any, x: Any, labels: Any, mask: Any, *query: Any) -> torch.Tensor:
        def support_loss(weights: Any) -> torch.Tensor:
            losses = self.losses(functional_call(self.network, weights, (x,)), labels)
            return (losses * mask).sum() / mask.sum()

        weights = parameters
        for _ in range(self.case.steps):
            gradients = grad(support_loss)(weights)
            if self.case.order == 1:
                gradients = {name: value.detach() for name, value in gradients.items()}
            weights = {name: value - INNER_RATE * gradients[name] for name, value in weights.items()}
        query_x, query_labels, query_mask = query
        losses = self.losses(functional_call(self.network, weights, (query_x,)), query_labels)
        return (losses * query_mask).sum()
