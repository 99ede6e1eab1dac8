"""Losses of recommendation models: the next item among many, and several labels of one shown item.

They take tensors and give a value for each sample; `multi_task.mean_loss` makes the mean of them, over
the samples of all ranks if it is asked to.
"""

from gmeta.core.lazy import load_lazily
from gmeta.losses.multi_task import MultiTaskBCE
from gmeta.losses.sampled_softmax import SampledSoftmax

_MOVED = {
    "mean_loss": "gmeta.losses.multi_task",
    "product_cross_entropy": "gmeta.losses.multi_task",
    "uniform_negatives": "gmeta.losses.sampled_softmax",
}
"""Old name -> the module that has it now, for one release."""

__all__ = ["MultiTaskBCE", "SampledSoftmax"]

__getattr__, __dir__ = load_lazily(__name__, {}, _MOVED)
