"""HR, recall and NDCG of several right items are those of RecBole's definitions."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.metrics.next_item import Retrieval

RANKS = st.lists(st.lists(st.integers(1, 12), max_size=6, unique=True), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(st.lists(RANKS, min_size=1, max_size=2), st.sampled_from([(1,), (3, 10)]))
def test_results_are_those_of_loops_whatever_the_batches(batches, ks):
    metric = Retrieval(ks)
    users = [ranks for batch in batches for ranks in batch if ranks]
    for batch in batches:
        metric.update_state(tf.ragged.constant(batch, tf.int64, ragged_rank=1))
    found = metric.result()
    for k in ks:
        expected = {"hr": [], "recall": [], "ndcg": []}
        for ranks in users:
            shown = np.zeros(k)
            shown[[rank - 1 for rank in ranks if rank <= k]] = 1
            discounts = 1 / np.log2(np.arange(2, k + 2))
            expected["hr"].append(shown.any())
            expected["recall"].append(shown.sum() / len(ranks))
            expected["ndcg"].append(shown @ discounts / discounts[: len(ranks)].sum())
        for name, values in expected.items():
            assert float(found[f"{name}@{k}"]) == pytest.approx(
                np.mean(values) if users else np.nan, nan_ok=True
            )


def test_what_is_not_finite_is_seen_until_the_next_reset_and_settings_are_kept():
    metric = Retrieval.from_config(Retrieval([2]).get_config())
    metric.update_state(tf.ragged.constant([[1], [0]]))
    assert np.isnan(metric.result()["ndcg@2"])
    metric.reset_state()
    metric.update_state(tf.ragged.constant([[1]]))
    assert float(metric.result()["ndcg@2"]) == 1.0
    with pytest.raises(ConfigError, match="each once"):
        Retrieval([3, 3])
