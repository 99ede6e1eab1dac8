"""Runs the examples in the docstrings of gmeta.losses."""

import doctest
import importlib
import pkgutil

import pytest
import tensorflow as tf

from gmeta import losses

MODULES = sorted(module.name for module in pkgutil.walk_packages(losses.__path__, "gmeta.losses."))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), extraglobs={**vars(losses), "tf": tf})
    assert result.failed == 0
