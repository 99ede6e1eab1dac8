"""Losses of recommendation models: the next item among many, and several labels of one shown item.

`sampled_softmax` and `multi_task` hold them. They take tensors and return a value for each sample;
`mean_loss` computes the mean, optionally over the samples of all ranks.
"""

from gmeta.losses.multi_task import MultiTaskBCE, mean_loss, product_cross_entropy
from gmeta.losses.sampled_softmax import SampledSoftmax, uniform_negatives

__all__ = ["MultiTaskBCE", "SampledSoftmax", "mean_loss", "product_cross_entropy", "uniform_negatives"]
