"""Models: a Keras model that trains tables, one with inner and outer loop, and published ones made of it."""

from gmeta.models.cbml import CBML as CBML
from gmeta.models.cbml import cbml as cbml
from gmeta.models.dlrm import dlrm as dlrm
from gmeta.models.fast_weights import FastWeights as FastWeights
from gmeta.models.grm import GRM as GRM
from gmeta.models.grm import grm as grm
from gmeta.models.melu import melu as melu
from gmeta.models.melu import melu_features as melu_features
from gmeta.models.meta_emb import MetaEmb as MetaEmb
from gmeta.models.meta_grm import MetaGRM as MetaGRM
from gmeta.models.meta_model import MetaModel as MetaModel
from gmeta.models.model import Model as Model
from gmeta.models.next_item import NextItemModel as NextItemModel
