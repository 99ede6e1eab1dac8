"""Metrics of clicks and of numbers, against scikit-learn and gmeta's own Keras metric."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from gmeta.core.errors import DataError
from gmeta.experiment.measurement.split import click_metrics, number_metrics
from gmeta.metrics import GAUC


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=8), seed=st.integers(0, 2**32 - 1))
def test_clicks_are_measured_as_elsewhere(sizes, seed):
    rng = np.random.default_rng(seed)
    splits = np.concatenate([[0], np.cumsum(sizes)])
    labels = rng.integers(0, 2, splits[-1]).astype(np.float64)
    logits = rng.integers(-3, 4, splits[-1]) / 2  # ties
    found = click_metrics(labels, logits, splits, 0.5)
    if not len(labels):
        assert all(np.isnan(value) for value in found.values())
        return
    assert found["logloss"] == pytest.approx(log_loss(labels, 1 / (1 + np.exp(-logits)), labels=[0, 1]))
    if 0 < labels.sum() < len(labels):
        assert found["auc"] == pytest.approx(roc_auc_score(labels, logits))
    longest = max(sizes)
    parts = [np.zeros([len(sizes), longest], np.float32) for _ in range(3)]
    for task, (a, b) in enumerate(itertools.pairwise(splits)):
        for part, values in zip(parts, (labels[a:b], logits[a:b], np.ones(b - a)), strict=True):
            part[task, : b - a] = values
    metric = GAUC()
    metric.update_state(*parts)
    expected = float(metric.result())
    both = any(0 < labels[a:b].sum() < b - a for a, b in itertools.pairwise(splits))
    assert found["gauc"] == pytest.approx(expected) if both else np.isnan(found["gauc"])


def test_labels_that_are_nan_are_refused():
    for measure in (
        lambda labels: click_metrics(labels, [0.5, 0.0], [0, 2], 0.5),
        lambda labels: number_metrics(labels, [0.5, 0.0]),
    ):
        with pytest.raises(DataError, match="row 1: the label is NaN"):
            measure([1.0, np.nan])


def test_a_diverged_model_has_no_metrics():
    assert all(np.isnan(value) for value in click_metrics([1, 0], [np.nan, 0.0], [0, 2], 0.5).values())
    assert all(np.isnan(value) for value in number_metrics([1.0], [np.inf]).values())
