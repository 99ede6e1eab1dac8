"""Makes semantic ids: codes of items out of their vectors."""

from gmeta.preprocess.semantic.cooccurrence import cooccurrence_vectors
from gmeta.preprocess.semantic.fit import semantic_ids
from gmeta.preprocess.semantic.rq_vae import RqVae

__all__ = ["RqVae", "cooccurrence_vectors", "semantic_ids"]
