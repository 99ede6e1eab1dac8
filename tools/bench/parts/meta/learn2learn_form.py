"""learn2learn's MAML: a clone of the network for each task, one lookup and one backward pass for all.

Only the package's MAML is loaded. Its top level imports data sets of images and environments for
reinforcement learning, and with them gym, and torchvision, which must match PyTorch's exact build.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from parts.meta.batches import Batch
from parts.meta.case import INNER_RATE, Case, Start
from parts.meta.torch_form import TorchForm


@functools.cache
def load_maml() -> Any:
    """learn2learn's MAML class; None if it isn't installed."""
    found = importlib.util.find_spec("learn2learn")
    if found is None or found.submodule_search_locations is None:
        return None
    folder = found.submodule_search_locations[0]
    for name, path in (("learn2learn", folder), ("learn2learn.algorithms", f"{folder}/algorithms")):
        package = ModuleType(name)
        package.__path__ = [path]
        sys.modules.setdefault(name, package)
    return importlib.import_module("learn2learn.algorithms.maml").MAML


class Learn2Learn(TorchForm):
    """Tasks one after another, none padded."""

    def __init__(self, case: Case, start: Start) -> None:
        super().__init__(case, start)
        self._maml = load_maml()(self.network, lr=INNER_RATE, first_order=case.order == 1)

    def prepare(self, batch: Batch) -> dict[str, Any]:
        """See `TorchForm`."""
        labels = torch.from_numpy(batch.labels)
        rows = [
            [torch.from_numpy(part.rows(task)) for part in (batch.support, batch.query)]
            for task in range(batch.tasks)
        ]
        tasks = [(support, labels[support], query, labels[query]) for support, query in rows]
        return {"ids": self.embeddings.prepare(batch), "tasks": tasks}

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """See `TorchForm`."""
        vectors = self.embeddings(batch["ids"])
        total, count = torch.zeros(()), 0
        for support, labels, query, query_labels in batch["tasks"]:
            learner, x = self._maml.clone(), vectors[support]
            for _ in range(self.case.steps):
                learner.adapt(self.losses(learner(x), labels).mean())
            total = total + self.losses(learner(vectors[query]), query_labels).sum()
            count += len(query)
        return total / count
