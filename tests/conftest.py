"""For all tests: Keras 2 is selected before any of them imports TensorFlow, and Hypothesis is given time."""

import hypothesis

import gmeta  # noqa: F401

# A TensorFlow op's first call may take seconds, and a shared machine may stall: no deadline. The same
# examples every time, so that a red run is red again.
hypothesis.settings.register_profile("gmeta", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("gmeta")
