"""Losses of recommendation models: the next item among many, and several labels of one shown item.

`softmax` and `multi_task` hold them. They take tensors and return a value for each sample;
`mean_loss` computes the mean, optionally over the samples of all ranks.
"""

from gmeta.core.imports import load_lazily
from gmeta.losses.multi_task import MultiTaskBCE
from gmeta.losses.softmax import SampledSoftmax

_MOVED = {
    "mean_loss": "gmeta.losses.multi_task",
    "product_cross_entropy": "gmeta.losses.multi_task",
    "uniform_negatives": "gmeta.losses.softmax",
}
"""Old name -> the module that has it now, for one release."""

__all__ = ["MultiTaskBCE", "SampledSoftmax"]

__getattr__, __dir__ = load_lazily(__name__, {}, _MOVED)
