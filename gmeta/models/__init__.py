"""Keras models over dynamic tables.

- `meta` trains by meta-learning (`MetaModel`), and `zoo` holds published models built on it.
- `sequence` predicts next items and ranks exposures from histories.
- `generative` predicts the next item's semantic id digit by digit.

`Model`, the base class of all, is in `gmeta.training.model`.
"""

from gmeta.models.generative.flat_retriever import FlatRetriever
from gmeta.models.generative.generative_retriever import GenerativeRetriever
from gmeta.models.meta.adapter import Adapter
from gmeta.models.meta.fast_weights import FastWeights
from gmeta.models.meta.meta_model import MetaModel
from gmeta.models.meta.task_learner import OuterLoss, TaskLearner
from gmeta.models.sequence.grm_model import GRM, grm
from gmeta.models.sequence.meta_grm import MetaGRM
from gmeta.models.sequence.next_item_model import NextItemModel
from gmeta.models.zoo.cbml_model import CBML, cbml
from gmeta.models.zoo.dlrm_model import dlrm
from gmeta.models.zoo.factor_model import FactorSettings, factor_ridge
from gmeta.models.zoo.melu_model import melu, melu_features
from gmeta.models.zoo.meta_emb import MetaEmb
from gmeta.training.joint_optimizer import JointOptimizer
from gmeta.training.model import Model
from gmeta.training.token_limit import max_tokens

__all__ = [
    "CBML",
    "GRM",
    "Adapter",
    "FactorSettings",
    "FastWeights",
    "FlatRetriever",
    "GenerativeRetriever",
    "JointOptimizer",
    "MetaEmb",
    "MetaGRM",
    "MetaModel",
    "Model",
    "NextItemModel",
    "OuterLoss",
    "TaskLearner",
    "cbml",
    "dlrm",
    "factor_ridge",
    "grm",
    "max_tokens",
    "melu",
    "melu_features",
]
