"""The settings of a model of the next item: what they build, what is refused, and how it scores."""

import math

import numpy as np
import pytest

from gmeta.core.errors import ConfigError
from gmeta.experiment.next_item.histories import Histories, cut
from gmeta.experiment.next_item.models import ModelScorer, build, validation_batches
from gmeta.experiment.next_item.ranked import rank
from gmeta.experiment.plan.next_item_config import NextItemConfig, NextItemMethod

ITEMS = 40


def cuts(users=24, length=9):
    random = np.random.default_rng(0)
    items = np.concatenate([random.permutation(ITEMS)[:length] for _ in range(users)])
    items[:ITEMS] = np.arange(ITEMS)  # each is in training
    splits = np.arange(users + 1) * length
    events = Histories(np.arange(users), splits, items, np.tile(np.arange(length) * 60, users))
    return cut(events, np.arange(ITEMS), "leave-last-out")


def built(**settings):
    method = NextItemMethod("model", **{"dim": 8, "max_length": 6, **settings})
    return build(NextItemConfig("item", ks=(3,), methods={"m": method}), "m", 0, cuts())


def in_config(*keys):
    def read(model):
        found = model.get_config()
        for key in keys:
            found = found[key]
        return found

    return read


def row_rule(name):
    return lambda model: getattr(model.collection.tables[0].optimizer, name)


def rate(step):
    def of_both(model):
        of_rows = row_rule("learning_rate")(model)
        return [round(float(each(step)), 6) for each in (model.optimizer._learning_rate, of_rows)]

    return of_both


@pytest.mark.parametrize(
    ("settings", "read", "found"),
    [
        ({"normalize": True}, in_config("loss", "normalize"), True),
        ({"temperature": 0.05}, in_config("loss", "temperature"), 0.05),
        ({"in_batch": True}, in_config("loss", "in_batch"), True),
        ({"in_batch": True}, in_config("popularity"), None),
        ({"in_batch": True, "log_q": True}, lambda model: float(sum(model.popularity)), pytest.approx(1)),
        ({"negatives": 5, "negatives_per": "user"}, in_config("negatives_per"), "user"),
        ({"repeats": False}, in_config("repeats"), False),
        ({"token_scale": 2.0}, in_config("token_scale"), 2.0),
        ({}, in_config("token_scale"), 8**0.5),
        ({"places": "from_start"}, in_config("places"), "from_start"),
        ({"norm": False}, in_config("norm"), False),
        ({"beta_2": 0.9}, lambda model: model.optimizer.beta_2, 0.9),
        ({"beta_2": 0.9}, row_rule("beta_2"), 0.9),
        ({"weight_decay": 0.1}, row_rule("weight_decay"), 0.1),
        ({"warm_up": 4}, rate(0), [0.00025] * 2),
        ({"warm_up": 4}, rate(3), [0.001] * 2),
        ({"warm_up": 4}, rate(9), [0.001] * 2),
        ({"initial_deviation": 3.0}, lambda model: np.std(model.item_vectors()), pytest.approx(3, rel=0.2)),
        ({}, lambda model: np.std(model.item_vectors()), pytest.approx((2 / 48) ** 0.5, rel=0.2)),
        ({"model": "fuxi"}, in_config("time"), "time"),
        ({"model": "hstu", "times": False}, in_config("time"), None),
        ({"model": "hstu", "horizon": 60.0}, in_config("backbone", "config", "horizon"), 60.0),
    ],
)
def test_a_setting_reaches_the_model(settings, read, found):
    assert read(built(**settings)) == found


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"heads": 3}, "dim=64 must be a multiple of heads=3"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"beta_2": 1.0}, "beta_2 must be at least 0 and below 1"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0"),
        ({"learning_rate": math.inf}, "learning_rate must be a finite number above 0"),
        ({"initial_deviation": -1.0}, "initial_deviation must be a finite number above 0"),
        ({"token_scale": math.nan}, "token_scale must be a finite number above 0"),
        ({"warm_up": -1}, "warm_up must be a finite number of at least 0"),
        ({"weight_decay": math.inf}, "weight_decay must be a finite number of at least 0"),
        ({"times": True}, "'sasrec' reads no times: leave times out, or choose hstu or fuxi"),
        ({"model": "fuxi", "horizon": 9.0}, "horizon is of HSTU's bias by time"),
        ({"model": "hstu", "times": False, "horizon": 9.0}, "horizon is of HSTU's bias by time"),
        ({"log_q": True}, "set in_batch = true, or leave log_q out"),
    ],
)
def test_a_setting_that_the_model_cannot_use_is_refused(settings, says):
    with pytest.raises(ConfigError, match=f"method 'X': .*{says}"):
        NextItemMethod("X", **settings)


@pytest.mark.shown_by(case="hstu-False")
@pytest.mark.parametrize(("kind", "seen"), [("sasrec", True), ("hstu", False)])
def test_the_scorer_ranks_as_validation_does(kind, seen):
    """Also of cosines, whose temperature the bias of repeats is added beside, and where times are read."""
    model = built(model=kind, normalize=True, temperature=0.05)
    model.repeat.assign(0.1)  # not so much that an item of the history can't be overtaken
    asked = cuts().validation
    measured = model.evaluate(validation_batches(asked), verbose=0, return_dict=True, leave_out_seen=not seen)
    ranked = rank(ModelScorer(model), asked, ITEMS, seen=seen, shown=3).of_users(3)
    for name in ("hr", "recall", "ndcg"):
        assert measured[f"{name}@3"] == pytest.approx(ranked[name].mean())
