"""Selects Keras 2 (tf-keras) before TensorFlow can choose Keras 3.

Horovod 0.28 and custom train steps need Keras 2. TensorFlow 2.16 reads ``TF_USE_LEGACY_KERAS`` once, during
its import. If the variable isn't set by then, ``tensorflow.keras`` is Keras 3 for the rest of the process.
"""

from __future__ import annotations

import os
import sys

from gmeta.core.errors import KerasError

_VARIABLE = "TF_USE_LEGACY_KERAS"
_TRUE = ("1", "true", "True")  # the spellings that TensorFlow accepts


def select_legacy_keras() -> None:
    """Make ``tf.keras`` be ``tf_keras`` and keep TensorFlow's start-up messages quiet.

    ``TF_CPP_MIN_LOG_LEVEL`` is set to 3 unless it is set already: the wheel prints three CUDA
    registration lines at level "error" on every machine. Set it to 0 to see everything.

    Raises:
      KerasError: TensorFlow was imported first, without the variable, so Keras 3 is already chosen.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    value = os.environ.get(_VARIABLE)
    if value in _TRUE:
        return
    if value is not None:
        raise KerasError(
            f"{_VARIABLE}={value} selects Keras 3, but gmeta needs Keras 2: export {_VARIABLE}=1"
        )
    if "tensorflow" in sys.modules:
        raise KerasError(
            "TensorFlow was imported before gmeta and has chosen Keras 3: "
            f"put `import gmeta` above `import tensorflow`, or export {_VARIABLE}=1"
        )
    os.environ[_VARIABLE] = "1"
