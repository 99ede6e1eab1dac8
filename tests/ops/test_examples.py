"""Runs the examples in the docstrings of gmeta.ops, and of what its tables are configured with."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import numpy as np
import pytest
import tensorflow as tf

from gmeta import initializers, ops, optimizers, policies

MODULES = sorted(
    module.name
    for room in (ops, policies)
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    if "._gmeta" not in module.name  # the native library
)
MODULES += ["gmeta.initializers", "gmeta.optimizers"]
NAMES = {**vars(initializers), **vars(policies), **vars(optimizers), **vars(ops), "np": np, "tf": tf}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(
        importlib.import_module(name), extraglobs=NAMES, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    examples = [t for name in MODULES for t in finder.find(importlib.import_module(name)) if t.examples]
    assert len(examples) >= 6
