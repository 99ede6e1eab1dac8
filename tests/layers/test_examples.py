"""Runs the examples in the docstrings of gmeta.layers."""

import doctest
import importlib
import pkgutil

import pytest
import tensorflow as tf

from gmeta import initializers, layers, ops, optimizers, policies

MODULES = sorted(module.name for module in pkgutil.walk_packages(layers.__path__, "gmeta.layers."))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    rooms = (initializers, optimizers, policies, ops, layers)
    names = {name: value for room in rooms for name, value in vars(room).items()}
    names |= {"jagged": ops.jagged, "tf": tf}
    result = doctest.testmod(importlib.import_module(name), extraglobs=names)
    assert result.failed == 0
