"""Simulated users: the law is as stated, states move, and a life is a function of the seed and the user."""

import numpy as np
import pytest
from scipy.stats import kstest

from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess.synthetic import user_simulator
from gmeta.preprocess.synthetic.exposures import ExposureConfig
from gmeta.preprocess.synthetic.user_law import SimulatorConfig, uniform
from gmeta.preprocess.synthetic.user_simulator import UserSimulator

WORLD = ExposureConfig(items=300, categories=8, styles=4, own=0.7)
USERS = np.arange(400)


@pytest.fixture(scope="module")
def simulator():
    return UserSimulator(SimulatorConfig(WORLD))


@pytest.fixture(scope="module")
def past(simulator):
    return simulator.histories(USERS, events=40, pages=5)


def arrays(states):
    return vars(states).values()


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(arrays(one), arrays(other), strict=True))


def test_draws_are_uniform_and_do_not_depend_on_each_other():
    drawn = uniform(3, 1, np.arange(200)[:, None], np.arange(200))
    assert kstest(drawn.ravel(), "uniform").pvalue > 1e-3
    for one, other in ((drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:]), (drawn, uniform(4, 1))):
        if one.size == other.size:
            assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02
    assert np.array_equal(uniform(3, 1, 7, np.arange(200)), drawn[7])


def test_users_live_the_same_lives_in_any_company_and_order(simulator, past):
    some = np.array([250, 3, 17])
    alone = UserSimulator(SimulatorConfig(WORLD)).histories(some, events=40, pages=5)
    for name in ("items", "actions", "times", "shown", "clicks", "p_click", "before"):
        assert np.array_equal(getattr(alone, name), getattr(past, name)[some]), name
    assert same(alone.states, past.states.of(some))
    page = simulator.oracle(past.states, 6).items
    everyone = simulator.step(past.states, page)
    few = simulator.step(alone.states, page[some])
    assert np.array_equal(few.clicks, everyone.clicks[some])
    assert same(few.states, everyone.states.take(some))


def test_another_seed_is_another_world():
    other = UserSimulator(SimulatorConfig(ExposureConfig(items=300, categories=8, seed=1)))
    found = other.histories(USERS, 40, 5).items
    assert (found != UserSimulator(SimulatorConfig(WORLD)).histories(USERS, 40, 5).items).mean() > 0.9


def test_probabilities_are_those_of_the_law(simulator, past):
    """Written out for one user and item at a time."""
    config, world, states = simulator.config, simulator.world, past.states
    items = (np.arange(len(states))[:, None] * 7 + np.arange(5)) % WORLD.items
    items[:, 0] = states.shown[:, 0]
    found = simulator.click_probability(states, items)
    styles = simulator.of_styles(states)
    for user in range(0, len(states), 40):
        city = int(12 * uniform(WORLD.seed, 1, user))
        for place, item in enumerate(items[user]):
            c, s = world.category[item], states.interest[user]
            logit = WORLD.click + WORLD.now * (c == s) + WORLD.next * (c == world.follows[s])
            logit += WORLD.taste * states.taste[user, c] + world.quality[0, item] + world.home[city, c]
            logit += styles[user, world.style[item]]
            seen = states.shown[user] == item
            logit -= config.tired * (states.tired[user] * seen).sum() + config.worn * states.worn[user, c]
            age = states.steps[user] - simulator.born[item]
            if simulator.born[item]:
                logit += config.novelty * 0.5 ** (age / config.fades)
            expected = 1 / (1 + np.exp(-logit)) if age >= 0 else 0.0
            assert found[user, place] == pytest.approx(expected, rel=1e-12)


def test_liking_of_styles_is_normal(simulator):
    liked = simulator.of_styles(simulator.begin(np.arange(2000)))
    assert liked.std() == pytest.approx(WORLD.own, rel=0.03)
    assert abs(liked.mean()) < 0.03


def test_clicks_are_drawn_with_the_true_probabilities(past):
    for part in (past.p_click > 0, past.p_click > np.median(past.p_click)):
        p, y = past.p_click[part], past.clicks[part]
        assert abs((y - p).sum()) < 4 * np.sqrt((p * (1 - p)).sum())


def test_all_probabilities_are_those_of_single_items(simulator, past):
    every = np.broadcast_to(np.arange(WORLD.items), (len(USERS), WORLD.items))
    found = simulator.all_probabilities(past.states)
    np.testing.assert_allclose(found, simulator.click_probability(past.states, every), rtol=1e-12)


def test_nothing_is_better_than_the_oracle(simulator, past, monkeypatch):
    best = simulator.oracle(past.states, 10)
    every = simulator.all_probabilities(past.states)
    assert np.array_equal(best.probabilities, -np.sort(-every, axis=1)[:, :10])
    np.testing.assert_allclose(
        simulator.click_probability(past.states, best.items), best.probabilities, rtol=1e-12
    )
    monkeypatch.setattr(user_simulator, "_BLOCK", 7 * WORLD.items)
    assert np.array_equal(simulator.oracle(past.states, 10).items, best.items)
    assert simulator.oracle(past.states.take(USERS[:0]), 10).items.shape == (0, 10)


def test_exposure_tires_and_time_heals():
    simulator = UserSimulator(SimulatorConfig(WORLD, moves=0, learns=0, later=0))
    before = simulator.begin(USERS)
    item = np.full((len(USERS), 1), 9)
    kin = np.flatnonzero(simulator.world.category == simulator.world.category[9])[-1:].repeat(400)[:, None]
    shown = [before]
    for _ in range(3):
        shown.append(simulator.step(shown[-1], item).states)
    for own in (item, kin):
        falls = np.stack([simulator.click_probability(states, own) for states in shown])
        assert (np.diff(falls, axis=0) < 0).all()
    rest = shown[-1]
    for _ in range(80):
        rest = simulator.live(rest).states
    rest = rest.put(USERS, rest.take(USERS))
    assert (rest.tired < 1e-3).all()
    assert (rest.worn < 1e-3).all()
    assert same(before, simulator.begin(USERS))  # a state is a value


def test_items_appear(simulator, past):
    late = np.flatnonzero(simulator.born)
    assert len(late) / WORLD.items == pytest.approx(0.1, abs=0.05)
    steps = np.arange(1, 41) + (past.before[:, None, :] <= np.arange(40)[:, None]).sum(axis=2)
    assert (simulator.born[past.items] <= steps).all()
    begun, item = simulator.begin(USERS), np.full((len(USERS), 1), late[0])
    assert not simulator.available(0)[late].any()
    assert not simulator.click_probability(begun, item).any()
    assert simulator.available(int(simulator.born.max())).all()
    assert (
        simulator.born[simulator.oracle(past.states, 300).items[:, :5]] <= past.states.steps[:, None]
    ).all()
    there = simulator.born.max() + 1
    old = past.states.take(USERS)
    moved = type(old)(**{**vars(old), "steps": np.full_like(old.steps, there)})
    assert simulator.click_probability(moved, item).all()


def test_a_click_moves_interest_and_taste():
    simulator = UserSimulator(SimulatorConfig(WORLD, moves=1.0, learns=0.1))
    before = simulator.begin(USERS)
    page = simulator.oracle(before, 3).items
    clicks, after = simulator.step(before, page)
    categories = simulator.world.category[page]
    for user in range(len(USERS)):
        clicked = categories[user][clicks[user]]
        expected = before.taste[user].copy()
        if len(clicked):
            assert after.interest[user] == clicked[0]
            share = 1 - 0.9 ** len(clicked)
            counts = np.bincount(clicked, minlength=WORLD.categories) / len(clicked)
            expected = (1 - share) * expected + share * counts
        else:
            assert after.interest[user] == before.interest[user]
        np.testing.assert_allclose(after.taste[user], expected, rtol=1e-12)
    assert 50 < clicks.any(axis=1).sum() < 400


def test_histories_tell_the_interest(simulator, past):
    """It is hidden, but most events are of it."""
    last = simulator.world.category[past.items[:, -8:]]
    commonest = np.array([np.bincount(row).argmax() for row in last])
    assert (commonest == past.states.interest).mean() > 0.6


def test_a_log_has_events_and_pages_in_order(simulator, past):
    log = past.log(simulator.world.category)
    assert {len(column) for column in log.values()} == {400 * (40 + 5 * 10)}
    assert (np.diff(log["timestamp"])[np.diff(log["user"]) == 0] >= 0).all()
    own = log["user"] == 7
    shown = log["exposed"][own] == 1
    assert np.array_equal(log["item"][own][~shown], past.items[7])
    assert np.array_equal(log["item"][own][shown], past.shown[7].ravel())
    assert np.array_equal(log["click"][own][shown], past.clicks[7].ravel().astype(np.float32))
    before = np.cumsum(~shown)[shown].reshape(5, 10)
    assert np.array_equal(before, past.before[7][:, None].repeat(10, axis=1))


@pytest.mark.parametrize("pages", [0, 1, 20])
def test_pages_come_in_the_later_half(simulator, pages):
    before = simulator.histories(USERS[:50], events=40, pages=pages).before
    assert before.shape == (50, pages)
    assert (np.diff(before, axis=1) > 0).all()
    assert ((before > 20) & (before <= 40)).all()


def test_what_cannot_be(simulator, past):
    with pytest.raises(ConfigError, match="pages=30 must be at most half of events=40"):
        simulator.histories(USERS, events=40, pages=30)
    with pytest.raises(DataError, match=r"user 2 is shown \[0, 300\]: items are places .* 0 to 299"):
        simulator.click_probability(past.states.take(USERS[2:4]), [[0, 300], [0, 1]])
    with pytest.raises(DataError, match=r"integers \(400, group\).*got int64 \(3,\)"):
        simulator.click_probability(past.states, np.zeros(3, np.int64))
    with pytest.raises(DataError, match="user 900 has no state; there are 400 users, from 0 to 399"):
        past.states.of([5, 900])
    with pytest.raises(DataError, match="65 items is longer than recent=64"):
        simulator.step(past.states, np.zeros((400, 65), np.int64))
    with pytest.raises(ConfigError, match="k must be at most 300"):
        simulator.oracle(past.states, 301)
    with pytest.raises(ConfigError, match="moves is a share from 0 to 1, got 2"):
        SimulatorConfig(moves=2)
    with pytest.raises(ConfigError, match="recent must be a whole number from 10 on"):
        SimulatorConfig(recent=3)
