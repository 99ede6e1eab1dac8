"""Traces Keras models in tests without rewriting Keras first.

AutoGraph rewrites functions so that Python's ``if`` and ``for`` work on tensors. Keras needs none of it, and
TensorFlow leaves out the package ``keras``, but not ``tf_keras``, which is the same under a newer name: the
first train step of a process rewrites hundreds of Keras' functions, 10 CPU seconds, and each further model
takes twice as long to trace.
"""

from __future__ import annotations

from tensorflow.python.autograph.core import config


def leave_keras_as_it_is() -> None:
    """From now on, in this process, AutoGraph takes ``tf_keras`` for what ``keras`` is to it.

    Layers' ``call`` is rewritten as before, as Keras itself asks for it. What AutoGraph has rewritten stays:
    a test of what users have must come before.
    """
    rule = config.DoNotConvert("tf_keras")
    if str(rule) not in map(str, config.CONVERSION_RULES):
        config.CONVERSION_RULES = (rule, *config.CONVERSION_RULES)


def rewrite_keras_too() -> None:
    """From now on as users have it, for the test of that; in a process that has traced nothing yet."""
    rule = str(config.DoNotConvert("tf_keras"))
    config.CONVERSION_RULES = tuple(each for each in config.CONVERSION_RULES if str(each) != rule)
