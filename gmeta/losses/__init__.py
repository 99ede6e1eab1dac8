"""Losses of recommendation models: the next item among many, and several labels of one shown item.

They take tensors and give a value for each sample; `mean_loss` makes the mean of them, over the samples of
all ranks if it is asked to.
"""

from gmeta.losses.means import mean_loss as mean_loss
from gmeta.losses.multi_task import MultiTaskBCE as MultiTaskBCE
from gmeta.losses.multi_task import product_cross_entropy as product_cross_entropy
from gmeta.losses.negatives import uniform_negatives as uniform_negatives
from gmeta.losses.sampled_softmax import SampledSoftmax as SampledSoftmax
