"""Arguments of `compile` that a model can't use are refused, by every class of models alike."""

import inspect

import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.metrics import GAUC
from gmeta.models import Model
from support.timed_fits import FAMILIES, make_family

VALUES = {
    "jit_compile": True,
    "loss": "mse",
    "metrics": [GAUC(0.5)],
    "loss_weights": [2.0],
    "weighted_metrics": ["mae"],
    "pipeline": 2,
}
REFUSED = {
    "ctr": {"jit_compile"},
    "maml": {"jit_compile", "loss_weights"},
    "meta grm": {"jit_compile", "loss", "metrics", "loss_weights", "weighted_metrics"},
    "grm": {"jit_compile", "loss", "loss_weights", "weighted_metrics"},
    "next item": {"jit_compile", "loss", "metrics", "loss_weights", "weighted_metrics"},
    "generative": {"jit_compile", "loss", "metrics", "loss_weights", "weighted_metrics"},
    "flat": {"jit_compile", "loss", "metrics", "loss_weights", "weighted_metrics"},
    "policy": {"jit_compile", "loss", "metrics", "loss_weights", "weighted_metrics", "pipeline"},
}
PLACES = list(inspect.signature(tf.keras.Model.compile).parameters)[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_refused_argument_is_named_with_what_to_do_instead(family):
    model, _ = make_family(family)
    assert set(model.refused_settings) == REFUSED[family]
    for name, instead in model.refused_settings.items():
        with pytest.raises(ConfigError) as error:
            model.compile("adam", **{name: VALUES[name]})
        assert str(error.value) == f"{model.name}: compile takes no {name}, got {VALUES[name]!r}: {instead}"
        assert not model._is_compiled
    model.compile("adam", **{"loss": "mse"} if "loss" not in REFUSED[family] else {}, jit_compile=False)
    assert model._is_compiled


@pytest.mark.parametrize("family", ["ctr", "grm", "next item", "policy"])
def test_an_argument_is_refused_by_its_place_too(family):
    model, _ = make_family(family)
    for name in REFUSED[family] & set(PLACES):
        before = {"optimizer": "adam"}
        with pytest.raises(ConfigError, match=f"compile takes no {name}"):
            model.compile(*(before.get(each) for each in PLACES[: PLACES.index(name)]), VALUES[name])


def test_a_class_refuses_what_its_base_refuses():
    def below(cls):
        return [cls, *(each for sub in cls.__subclasses__() for each in below(sub))]

    classes = [cls for cls in below(Model) if cls.__module__.startswith("gmeta.")]
    assert {"MetaGRM", "CBML", "GenerativeRetriever", "PolicyTraining"} <= {cls.__name__ for cls in classes}
    for cls in classes:
        for base in cls.__bases__:
            assert set(getattr(base, "refused_settings", ())) <= set(cls.refused_settings), (cls, base)
