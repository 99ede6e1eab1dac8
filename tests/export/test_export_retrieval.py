"""An exported generative retriever answers, in a process without gmeta, what the trained one does here."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.export import export_model
from gmeta.export.sequence_models import retrieval_signatures
from gmeta.export.signature import PADDING
from gmeta.initializers import Constant
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import GenerativeRetriever
from gmeta.optimizers import SGD
from gmeta.preprocess import semantic_ids
from support.serving import ask_all

ITEMS = 30


@pytest.fixture(scope="module")
def model():
    random = np.random.default_rng(0)
    collection = EmbeddingCollection(
        [FeatureConfig("item", TableConfig("item", 8, initializer=Constant(0.1)))], optimizer=SGD(0.5)
    )
    backbone = HSTU(blocks=1, heads=2, attention_dim=4, value_dim=4, max_length=6, bias_by_time=False)
    ids = semantic_ids(random.normal(size=(ITEMS, 3)), levels=2, codes=4)
    made = GenerativeRetriever(collection, backbone, ids, max_length=6, width=8, beam=12, ks=(5,))
    for weight in made.trainable_variables:
        weight.assign_add(random.normal(0, 0.3, weight.shape))
    lookup = collection.lookup({"item": made.catalogue.all_keys})
    rows = [tf.constant(random.normal(size=each.shape), tf.float32) for each in lookup.rows]
    collection.apply_gradients(lookup, rows, 0.5)
    return made


# Quick: tests/models/generative/test_flat_retriever.py, test_an_exported_model_answers_as_here.
@pytest.mark.slow
def test_it_answers_as_here(model, tmp_path):
    batch = {"item": tf.ragged.constant([[3, 8, 99], [], [99, 4, 98, 99, 7, 20, 21, 22]], tf.int64)}
    sent = {"item": np.asarray(batch["item"].to_tensor(PADDING))}
    exported = export_model(model, tmp_path / "1")
    assert list(exported.signatures) == ["retrieve"]
    allow = np.arange(ITEMS) % 2 == 0
    masked = retrieval_signatures(model, k=4, beam=6, allow=allow, leave_out_seen=True)
    export_model(model, tmp_path / "2", signatures=masked)
    plain, own = ask_all([(tmp_path / number, "retrieve", sent) for number in "12"])
    settings = {"beam": 6, "allow": allow, "leave_out_seen": True}
    for answer, (items, scores) in (
        (plain, model.retrieve(batch, 10)),
        (own, model.retrieve(batch, 4, **settings)),
    ):
        np.testing.assert_array_equal(answer["items"], items)
        np.testing.assert_allclose(answer["scores"], scores, rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(answer["unknown_history"], [1, 0, 2])


def test_what_makes_no_sense_is_named(model):
    with pytest.raises(ConfigError, match="k must be at most 30, the catalogue's size, got 31"):
        retrieval_signatures(model, k=31)
    with pytest.raises(ConfigError, match="beam must be at least 10, the items wanted, got 3"):
        retrieval_signatures(model, beam=3)
