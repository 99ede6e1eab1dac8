"""Keras models over dynamic tables.

- `meta` trains by meta-learning (`MetaModel`), and `zoo` holds published models built on it.
- `sequence` predicts next items, retrieves items, and ranks exposures from histories; `UserStates` keeps what
  was read of these.
- `generative` predicts the next item's semantic id digit by digit.

`Model`, the base class of all, is in `gmeta.training.model`.
"""

from gmeta.core.imports import load_lazily
from gmeta.models.generative.flat_retriever import FlatRetriever
from gmeta.models.generative.generative_retriever import GenerativeRetriever
from gmeta.models.meta.meta_model import MetaModel, melu
from gmeta.models.meta.task_learner import TaskLearner
from gmeta.models.sequence.grm_model import GRM
from gmeta.models.sequence.meta_grm import MetaGRM
from gmeta.models.sequence.next_item_model import NextItemModel
from gmeta.models.sequence.two_tower import TwoTower
from gmeta.models.sequence.user_states import UserStates
from gmeta.models.zoo.cbml_model import CBML
from gmeta.models.zoo.dcn_model import DCN
from gmeta.models.zoo.dlrm_model import dlrm
from gmeta.models.zoo.factor_model import factor_ridge
from gmeta.training.joint_optimizer import JointOptimizer
from gmeta.training.model import Model
from gmeta.training.token_limit import max_tokens

_MOVED = {
    "Adapter": "gmeta.models.meta.adapter",
    "FactorSettings": "gmeta.models.zoo.factor_model",
    "FastWeights": "gmeta.models.meta.fast_weights",
    "MetaEmb": "gmeta.models.zoo.meta_emb",
    "OuterLoss": "gmeta.models.meta.task_learner",
    "cbml": "gmeta.models:CBML.of",
    "grm": "gmeta.models:GRM.of",
    "melu_features": "gmeta.models.meta.meta_model",
}
"""Old name -> the module that has it now, for one release."""

__all__ = [
    "CBML",
    "DCN",
    "GRM",
    "FlatRetriever",
    "GenerativeRetriever",
    "JointOptimizer",
    "MetaGRM",
    "MetaModel",
    "Model",
    "NextItemModel",
    "TaskLearner",
    "TwoTower",
    "UserStates",
    "dlrm",
    "factor_ridge",
    "max_tokens",
    "melu",
]

__getattr__, __dir__ = load_lazily(__name__, {}, _MOVED)
