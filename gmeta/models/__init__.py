"""Models: a Keras model that trains tables, one with an inner and an outer loop, and published ones made of it."""

from gmeta.models.dlrm import dlrm as dlrm
from gmeta.models.melu import melu as melu
from gmeta.models.melu import melu_features as melu_features
from gmeta.models.meta_model import MetaModel as MetaModel
from gmeta.models.model import Model as Model
