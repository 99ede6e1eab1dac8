"""Shared by the forms in PyTorch: embeddings, network, optimizers.

Fields with one id share one `nn.Embedding`, their ids offset; one with several has an `nn.EmbeddingBag`.
They are looked up once a step, for all samples, and Adam updates everything: tables of up to 100,000 rows as
a whole, by the fused Adam, larger ones by `SparseAdam`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from parts.meta.batches import Batch, Lists
from parts.meta.case import OUTER_RATE, Case, Outer, Start, values
from torch import nn

DENSE_ROWS = 100_000


class Embeddings(nn.Module):
    """All fields' vectors side by side."""

    def __init__(self, case: Case, start: Start) -> None:
        super().__init__()
        self.fields = case.fields
        one = [field.name for field in case.fields if not field.several]
        self.sparse = sum(field.vocabulary for field in case.fields) > DENSE_ROWS
        rows = torch.from_numpy(np.concatenate([start.tables[name] for name in one]))
        self.one = nn.Embedding.from_pretrained(rows, freeze=False, sparse=self.sparse)
        sizes = [len(start.tables[name]) for name in one]
        self.first = dict(zip(one, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        self.bags = nn.ModuleDict()
        for field in case.fields:
            if field.several:
                rows = torch.from_numpy(start.tables[field.name].copy())
                self.bags[field.name] = nn.EmbeddingBag.from_pretrained(
                    rows, freeze=False, mode="mean", sparse=self.sparse
                )

    def prepare(self, batch: Batch) -> dict[str, Any]:
        """A batch's ids in the form of `forward`'s argument."""
        one = np.stack([batch.columns[name] + first for name, first in self.first.items()], axis=1)
        made: dict[str, Any] = {"one": torch.from_numpy(one)}
        for name in self.bags:
            column = batch.columns[name]
            assert isinstance(column, Lists)
            offsets = np.cumsum(column.lengths) - column.lengths
            made[name] = (torch.from_numpy(column.values), torch.from_numpy(offsets))
        return made

    def forward(self, ids: dict[str, Any]) -> torch.Tensor:
        """(samples, sum of dims), in the fields' order."""
        one = dict(zip(self.first, self.one(ids["one"]).unbind(1), strict=True))
        parts = one | {name: bag(*ids[name]) for name, bag in self.bags.items()}
        return torch.cat([parts[field.name] for field in self.fields], dim=1)

    def gradient(self, name: str, ids: np.ndarray) -> np.ndarray:
        """The gradients of the rows of some ids of a field."""
        weight = self.bags[name].weight if name in self.bags else self.one.weight
        assert weight.grad is not None
        whole = weight.grad.to_dense() if self.sparse else weight.grad
        return whole[ids + self.first.get(name, 0)].numpy()


def network_of(case: Case, start: Start) -> nn.Sequential:
    """Linear layers with ReLU between them, layer ``i`` at place ``2 i``."""
    layers: list[nn.Module] = []
    for name in case.units:
        kernel, bias = start.weights[f"{name}/kernel"], start.weights[f"{name}/bias"]
        linear = nn.Linear(*kernel.shape)
        linear.weight.data, linear.bias.data = torch.tensor(kernel.T), torch.tensor(bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def sample_losses(case: Case) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Outputs and labels (..., labels) -> (...)."""
    if case.loss == "mse":
        return lambda out, labels: (out - labels).square().mean(-1)
    entropy = nn.functional.binary_cross_entropy_with_logits
    return lambda out, labels: entropy(out, labels, reduction="none").mean(-1)


class TorchForm:
    """Embeddings, a network, their optimizers, and the batches; subclasses define `loss`."""

    def __init__(self, case: Case, start: Start) -> None:
        self.case = case
        self.embeddings, self.network = Embeddings(case, start), network_of(case, start)
        self.losses = sample_losses(case)
        dense, tables = list(self.network.parameters()), list(self.embeddings.parameters())
        if self.embeddings.sparse:
            sparse = torch.optim.SparseAdam(tables, lr=OUTER_RATE)
            self.optimizers = [torch.optim.Adam(dense, lr=OUTER_RATE, fused=True), sparse]
        else:
            self.optimizers = [torch.optim.Adam([*dense, *tables], lr=OUTER_RATE, fused=True)]
        self.batches = [self.prepare(batch) for batch in case.batches]

    def prepare(self, batch: Batch) -> dict[str, Any]:
        """A batch in the form of `loss`'s argument."""
        raise NotImplementedError

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """The outer loss."""
        raise NotImplementedError

    def outer(self, number: int) -> Outer:
        """See `Form`."""
        place = self.case.batch(number)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.loss(self.batches[place])
        loss.backward()
        weights = {}
        for layer, name in enumerate(self.case.units):
            linear = self.network[2 * layer]
            weights[f"{name}/kernel"], weights[f"{name}/bias"] = (
                linear.weight.grad.T.numpy(),
                linear.bias.grad.numpy(),
            )
        of_field = {
            f.name: self.embeddings.gradient(f.name, values(self.case.batches[place], f.name))
            for f in self.case.fields
        }
        return Outer(float(loss.detach()), weights, of_field)

    def step(self, number: int) -> None:
        """See `Form`."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.loss(self.batches[self.case.batch(number)]).backward()
        for optimizer in self.optimizers:
            optimizer.step()
