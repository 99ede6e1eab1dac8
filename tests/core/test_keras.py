"""Which Keras a process gets: decided once, so each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gmeta.core import keras
from gmeta.core.errors import KerasError
from gmeta.core.version import find_tensorflow
from support.process_ranks import own_lines


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter whose environment names no Keras but by `variables`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_gmeta_selects_keras_2_without_chatter() -> None:
    done = run("import gmeta, tensorflow as tf; print(tf.keras.Model.__module__.split('.')[0])")
    assert (done.returncode, done.stdout.strip(), own_lines(done.stderr)) == (0, "tf_keras", "")
    if (find_tensorflow() or ("", "", ""))[1].startswith("2.16."):
        assert done.stderr == ""


def test_importing_gmeta_imports_neither_tensorflow_nor_horovod() -> None:
    done = run("import gmeta, sys; print([m for m in ('tensorflow', 'horovod') if m in sys.modules])")
    assert done.stdout.strip() == "[]"


def test_gmeta_after_tensorflow_says_the_line_that_mends_it() -> None:
    done = run("import tensorflow\nimport gmeta")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("gmeta.core.errors.KerasError: ")
    assert "put `import gmeta` above `import tensorflow`, or export TF_USE_LEGACY_KERAS=1" in last


# Quick: import gmeta, and test_gmeta_after_tensorflow_says_the_line_that_mends_it.
@pytest.mark.parametrize(
    "order", ["import gmeta", pytest.param("import tensorflow; import gmeta", marks=pytest.mark.slow)]
)
def test_keras_3_on_purpose_is_refused(order: str) -> None:
    done = run(order, TF_USE_LEGACY_KERAS="0")
    assert "TF_USE_LEGACY_KERAS=0 selects Keras 3, but gmeta needs Keras 2" in done.stderr.splitlines()[-1]


def test_without_keras_2_the_one_for_this_tensorflow_is_named() -> None:
    done = run("import sys; sys.modules['tf_keras'] = None\nimport gmeta")
    name, version, _ = find_tensorflow() or ("", "", "")
    minor = version.rpartition(".")[0]
    alone = "" if name == "tensorflow" else "--no-deps "
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "gmeta.core.errors.KerasError: tf-keras isn't installed, and gmeta needs Keras 2, which it is: "
        f"TensorFlow {version} goes with pip install {alone}'tf-keras=={minor}.*'"
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (("tensorflow-cpu", "2.18.1", ""), "goes with pip install --no-deps 'tf-keras==2.18.*'"),
        (
            ("tensorflow", "2.15.1", ""),
            "TensorFlow 2.15.1 is installed, but gmeta runs on 2.16.2 to 2.21: "
            "pip install 'tensorflow>=2.16.2,<2.22' 'tf-keras>=2.16,<2.22'",
        ),
        (None, "is installed: pip install 'tensorflow>=2.16.2,<2.22' 'tf-keras>=2.16,<2.22'"),
    ],
)
def test_without_keras_2_it_depends_on_the_tensorflow_that_is_there(
    found: tuple[str, str, str] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tf_keras", None)
    monkeypatch.setattr(keras, "find_tensorflow", lambda: found)
    with pytest.raises(KerasError) as raised:
        keras.select_legacy_keras()
    assert str(raised.value).endswith(said)
    assert "\n" not in str(raised.value)


@pytest.mark.shown_by("test_gmeta_after_tensorflow_says_the_line_that_mends_it")
def test_the_variable_makes_any_order_right() -> None:
    done = run("import tensorflow; import gmeta; print('fine')", TF_USE_LEGACY_KERAS="1")
    assert done.stdout.strip() == "fine"


def test_a_chosen_log_level_stays() -> None:
    done = run("import gmeta, os; print(os.environ['TF_CPP_MIN_LOG_LEVEL'])", TF_CPP_MIN_LOG_LEVEL="0")
    assert done.stdout.strip() == "0"


def test_submodules_are_those_that_tensorflow_finds() -> None:
    import tensorflow as tf

    shared, outer, inner = (tf.keras.layers.Dense(1, name=name) for name in ("shared", "outer", "inner"))
    circle = tf.Module()
    circle.next = tf.Module()
    circle.next.next = circle
    outer.parts = {"a": [inner, shared], "b": circle}
    whole = tf.keras.Sequential([outer, shared])
    whole.metric = tf.keras.metrics.Mean()
    assert keras.submodules(whole) == list(whole.submodules)
    assert {shared, inner, circle, circle.next, whole.metric} <= set(keras.submodules(whole))


def test_a_tuple_of_layers_is_walked_with_every_wrapt() -> None:
    import tensorflow as tf
    import wrapt

    class Closed(wrapt.ObjectProxy):  # as Keras wraps tuples with wrapt 1.16 to 2.1, for Python from 3.12 on
        @property
        def __dict__(self) -> None:  # type: ignore[override]
            raise TypeError("this __dict__ descriptor does not support '_TupleWrapper' objects")

    pair = tf.Module(), tf.Module()
    layer, module = tf.keras.layers.Layer(), tf.Module()
    layer.pair, module.pair = pair, Closed(pair)
    assert keras.submodules(layer) == keras.submodules(module) == list(pair)
