"""For all tests: Keras 2 is selected before any of them imports TensorFlow, Keras is traced as it is, and
Hypothesis is given time.
"""

import sys
from collections.abc import Iterator

import hypothesis
import pytest

import gmeta  # noqa: F401

# A TensorFlow op's first call may take seconds, and a shared machine may stall: no deadline. The same
# examples every time, so that a red run is red again.
hypothesis.settings.register_profile("gmeta", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("gmeta")


def pytest_collection_finish() -> None:
    """`tests/distributed/test_autograph.py` sees what users see."""
    if "tensorflow" in sys.modules:
        from gmeta.testing.tracing import leave_keras_as_it_is

        leave_keras_as_it_is()


@pytest.fixture(autouse=True)
def _no_seed_is_left() -> Iterator[None]:
    """A seed that a test sets for the process would shuffle the data of those that come after it."""
    yield
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(None)
