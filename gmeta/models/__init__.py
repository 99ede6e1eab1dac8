"""Models: a Keras model that trains tables, one with inner and outer loop, and published ones made of it."""

from gmeta.models.meta.adapter.fast_weights import FastWeights as FastWeights
from gmeta.models.meta.meta_model import MetaModel as MetaModel
from gmeta.models.sequence.grm_model import GRM as GRM
from gmeta.models.sequence.grm_model import grm as grm
from gmeta.models.sequence.meta_grm import MetaGRM as MetaGRM
from gmeta.models.sequence.next_item_model import NextItemModel as NextItemModel
from gmeta.models.training.model import Model as Model
from gmeta.models.zoo.cbml_model import CBML as CBML
from gmeta.models.zoo.cbml_model import cbml as cbml
from gmeta.models.zoo.dlrm_model import dlrm as dlrm
from gmeta.models.zoo.melu_model import melu as melu
from gmeta.models.zoo.melu_model import melu_features as melu_features
from gmeta.models.zoo.meta_emb import MetaEmb as MetaEmb
