"""Losses of recommendation models: the next item among many, and several labels of one shown item.

They take tensors and give a value for each sample; `mean_loss` makes the mean of them, over the samples of
all ranks if it is asked to.
"""

from gmeta.losses.multi_task import MultiTaskBCE, mean_loss, product_cross_entropy
from gmeta.losses.sampled_softmax import SampledSoftmax, uniform_negatives

__all__ = ["MultiTaskBCE", "SampledSoftmax", "mean_loss", "product_cross_entropy", "uniform_negatives"]
