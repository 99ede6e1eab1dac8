"""Runs the examples in the docstrings of gmeta.metrics."""

import doctest
import importlib
import pkgutil

import pytest
import tensorflow as tf

from gmeta import metrics

MODULES = sorted(module.name for module in pkgutil.walk_packages(metrics.__path__, "gmeta.metrics."))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), extraglobs={**vars(metrics), "tf": tf})
    assert result.failed == 0
