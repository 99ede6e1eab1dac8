"""The version of gmeta, and the versions of TensorFlow and Python that it runs on.

setup.py runs this file by its path, before gmeta is installed: it imports nothing of gmeta.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gmeta.core.errors import KerasError

__version__ = "0.1.0.dev0"

PYTHONS = ((3, 10), (3, 13))
"""The first and the last Python. TensorFlow 2.16 to 2.21 have no wheels for others."""

TENSORFLOWS = ((2, 16, 2), (2, 21))
"""The first and the last TensorFlow, of which the last stands for all its patch releases.

The native libraries are compiled against TensorFlow's C++ classes, which change with each minor version.
"""

WANTED = ("tensorflow>=2.16.2,<2.22", "tf-keras>=2.16,<2.22")
"""The requirements for these, as pip takes them."""

DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tensorflow-cpu-aws")
"""The names under which TensorFlow is published for Linux."""


def check_python() -> None:
    """Refuse a Python that TensorFlow isn't published for, before its syntax errors do.

    Raises:
      ImportError: This process runs such a Python.
    """
    first, last = PYTHONS
    if not first <= sys.version_info[:2] <= last:
        found, here = sys.version_info[:2], f"{_text(first)} to {_text(last)}"
        raise ImportError(
            f"gmeta runs on Python {here}, and this is {_text(found)} ({sys.executable}): install one of "
            "these, and gmeta with its pip"
        )


def find_tensorflow(folders: Iterable[str] | None = None) -> tuple[str, str, str] | None:
    """Find the installed TensorFlow without importing it.

    Args:
      folders: Where to look for it; None: where Python looks for modules.

    Returns:
      The name of its distribution, its version and the folder that holds the package, or None.
    """
    from importlib import metadata

    where = sys.path if folders is None else list(folders)
    for name in DISTRIBUTIONS:
        for found in metadata.distributions(name=name, path=where):
            return name, found.version, str(found.locate_file(""))
    return None


def describe_misfit(version: str) -> str | None:
    """Return why gmeta doesn't run on a TensorFlow and what to do about it, or None if it runs.

    Args:
      version: TensorFlow's version, such as ``"2.21.0"`` or ``"2.22.0-rc1"``.

    Example:
      >>> describe_misfit("2.15.1").partition(":")[0]
      'TensorFlow 2.15.1 is installed, but gmeta runs on 2.16.2 to 2.21'
    """
    first, last = TENSORFLOWS
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if first <= numbers and numbers[:2] <= last:
        return None
    install = " ".join(f"'{line}'" for line in WANTED)
    return (
        f"TensorFlow {version} is installed, but gmeta runs on {_text(first)} to {_text(last)}: "
        f"pip install {install}"
    )


def _text(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


# Selects Keras 2 (tf-keras) before TensorFlow can choose Keras 3, refuses objects of Keras 3, walks models.
#
# Horovod 0.28 and custom train steps need Keras 2. TensorFlow reads ``TF_USE_LEGACY_KERAS`` once, during
# its import. If the variable isn't set by then, ``tensorflow.keras`` is Keras 3 for the rest of the process.

_VARIABLE = "TF_USE_LEGACY_KERAS"
_KERAS_3 = "keras"  # the package; that of Keras 2 is tf_keras
_TRUE = ("1", "true", "True")  # the spellings that TensorFlow accepts


def select_legacy_keras() -> None:
    """Make ``tf.keras`` be ``tf_keras`` and keep TensorFlow's start-up messages quiet.

    ``TF_CPP_MIN_LOG_LEVEL`` is set to 3 unless it is set already: the wheel prints three CUDA
    registration lines at level "error" on every machine. Set it to 0 to see everything.

    Raises:
      KerasError: TensorFlow was imported first, without the variable, so Keras 3 is already chosen; or
        tf-keras isn't installed.
    """
    if importlib.util.find_spec("tf_keras") is None:
        raise KerasError(_lack_of_keras_2())
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


def _lack_of_keras_2() -> str:
    """Return which tf-keras to install: each minor version is made for TensorFlow's of the same number."""
    found = find_tensorflow()
    if found is None:
        install = " ".join(f"'{line}'" for line in WANTED)
        return f"neither TensorFlow nor tf-keras, which is Keras 2, is installed: pip install {install}"
    name, version, _ = found
    misfit = describe_misfit(version)
    if misfit is not None:
        return misfit
    minor = ".".join(version.split(".")[:2])
    # tf-keras requires the distribution `tensorflow`, which would overwrite another one's files.
    alone = "" if name == "tensorflow" else "--no-deps "
    return (
        f"tf-keras isn't installed, and gmeta needs Keras 2, which it is: TensorFlow {version} goes with "
        f"pip install {alone}'tf-keras=={minor}.*'"
    )


def refuse_keras_3(receiver: str, *given: Any) -> None:
    """Refuse objects of Keras 3, which TensorFlow installs beside Keras 2 as the package ``keras``.

    Keras 2 would fail later, where it takes them for its own: "'Variable' object has no attribute
    '_unique_id'".

    Args:
      receiver: What they were given to, for the message.
      *given: Anything; lists, tuples and mappings are searched.

    Raises:
      KerasError: An object's class, or the class that it derives from, is one of Keras 3; or such a class
        itself was given. The message names its counterpart in ``tf.keras``.
    """
    for value in _leaves(given):
        kind = value if isinstance(value, type) else type(value)
        base = next((cls for cls in kind.__mro__ if cls.__module__.split(".")[0] == _KERAS_3), None)
        if base is None:
            continue
        name, counterpart = _names(base)
        what, remedy = name, f"use {counterpart}"
        if kind is not base:
            what, remedy = f"{kind.__qualname__}, a {name},", f"derive it from {counterpart}"
        raise KerasError(f"{receiver}: {what} is of Keras 3, but gmeta needs Keras 2: {remedy}")


def submodules(module: Any) -> list[Any]:
    """Find the modules in the attributes of a ``tf.Module``, and in theirs, each once.

    They are those of ``module.submodules``, which fails with wrapt 1.16 to 2.1 on Python 3.12 or newer if a
    layer has a tuple of layers: ``tf.nest`` asks whether a value has the methods of a protocol, and Python
    looks for them in a ``__dict__`` that the wrapper around the tuple doesn't give.
    """
    import tensorflow as tf

    seen = {id(module)}

    def inside(part: Any) -> Iterator[Any]:
        own = []
        for name in sorted(vars(part)):
            if name in part._TF_MODULE_IGNORED_PROPERTIES:
                continue
            for leaf in _leaves(vars(part)[name]):
                if isinstance(leaf, tf.Module) and id(leaf) not in seen:
                    seen.add(id(leaf))
                    own.append(leaf)
        yield from own
        for each in own:
            yield from inside(each)

    return list(inside(module))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        yield value
        return
    for each in value:
        yield from _leaves(each)


def _names(cls: type) -> tuple[str, str]:
    """Return the public name of a class of Keras 3, and that of its counterpart in Keras 2."""
    import tf_keras

    if cls.__name__ == "KerasTensor":
        return "a tensor of keras.Input", "tf.keras.Input and tf.keras.layers"
    path = cls.__module__.split(".")
    rooms = path[2:-1] if path[1:2] == ["src"] else path[1:]
    for depth in range(len(rooms), 0, -1):
        found: Any = tf_keras
        for name in (*rooms[:depth], cls.__name__):
            found = getattr(found, name, None)
        if found is not None:
            public = ".".join((*rooms[:depth], cls.__name__))
            return f"keras.{public}", f"tf.keras.{public}"
    return f"{cls.__module__}.{cls.__name__}", "its counterpart in tf.keras"
