"""Models: a Keras model with an inner and an outer loop, and MeLU as one instance of it."""

from gmeta.models.melu import melu as melu
from gmeta.models.melu import melu_features as melu_features
from gmeta.models.meta_model import MetaModel as MetaModel
