"""Steps over a trie and logs of probabilities on the GPU against NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gmeta.core.shares import splitmix64
from gmeta.models.generative.code_tables import CodeTrie
from support.gpu.cuda_library import CudaError, DeviceArray, call
from support.gpu.gpu_trie import GpuTrieLevel

CODES = 256


def draw_trie(rng: np.random.Generator, items: int) -> CodeTrie:
    return CodeTrie.of(np.unique(rng.integers(0, CODES, (items, 3)), axis=0))


def log_probs_of(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return z - np.logaddexp.reduce(z)


def expected_step(case: dict[str, Any], user: int, k: int) -> tuple[npt.NDArray[Any], ...]:
    found: list[npt.NDArray[Any]] = []
    for beam, node in enumerate(case["nodes"][user]):
        children = np.arange(case["starts"][node], case["starts"][node + 1]) if node >= 0 else np.arange(0)
        children = children[case["allowed"][children]]
        z = case["logits"][user, beam, case["digits"][children]].astype(np.float64)
        if not np.isfinite(z).any():
            continue  # no child has a chance
        scores = case["scores"][user, beam] + log_probs_of(z)
        found.append(np.stack([-scores, np.full(len(z), beam), children], 1))
    every = np.concatenate([np.empty((0, 3)), *found])
    hashes = splitmix64(every[:, 2].astype(np.uint64))
    best = every[np.lexsort((every[:, 1], hashes, every[:, 0]))[:k]]
    absent = np.tile([np.inf, -1, -1], (k - len(best), 1))
    scores, beams, nodes = np.concatenate([best, absent]).T
    return -scores, nodes.astype(np.int64), beams.astype(np.int32)


def draw(seed: int, items: int, level: int, users: int, beams: int, alike: bool) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    trie = draw_trie(rng, items)
    starts, digits = trie.starts[level], trie.digits[level]
    shape = users, beams
    logits = rng.choice([0.0, -np.inf], (*shape, CODES)) if alike else rng.normal(0, 2, (*shape, CODES))
    scores = -rng.integers(0, 2, shape) if alike else -rng.exponential(5, shape)
    return {
        "starts": starts,
        "digits": digits,
        "allowed": rng.random(len(digits)) < 0.8,
        "logits": logits.astype(np.float32),
        "scores": scores.astype(np.float32),
        "nodes": rng.integers(-1, len(starts) - 1, shape),
    }


def run_step(case: dict[str, Any], k: int, masks: bool = True) -> list[npt.NDArray[Any]]:
    digits = case["digits"].astype(np.int64 if k % 2 else np.int32)
    level = GpuTrieLevel(case["starts"], digits, case["allowed"] if masks else None)
    return [each.numpy() for each in level.step(case["logits"], case["scores"], case["nodes"], k)]


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(("level", "beams"), [(0, 1), (1, 50), (2, 50), (2, 200)])
@pytest.mark.parametrize("k", [1, 50, 300])
def test_a_step_is_numpys(level: int, beams: int, k: int, alike: bool) -> None:
    users = 3
    case = draw(level, 20_000, level, users, beams, alike)
    scores, nodes, numbers = run_step(case, k)
    for user in range(users):
        expected = expected_step(case, user, k)
        np.testing.assert_allclose(scores[user], expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(nodes[user], expected[1])
        np.testing.assert_array_equal(numbers[user], expected[2])


def test_a_step_gives_the_same_bits_each_time() -> None:
    case = draw(9, 50_000, 1, 64, 50, False)
    first = run_step(case, 50, masks=False)
    for _ in range(5):
        for again, before in zip(run_step(case, 50, masks=False), first, strict=True):
            np.testing.assert_array_equal(again, before)


@pytest.mark.parametrize("what", ["nodes", "scores", "logits"])
def test_wrong_input_shows_in_its_users_results(what: str) -> None:
    case = draw(1, 5000, 2, 3, 10, False)
    case["nodes"] = np.maximum(case["nodes"], 0)
    whole = run_step(case, 7)
    case[what] = case[what].copy()
    case[what][1] = 10**12 if what == "nodes" else np.nan
    found = run_step(case, 7)
    for before, now in zip(whole, found, strict=True):
        np.testing.assert_array_equal(now[[0, 2]], before[[0, 2]])
    assert np.isnan(found[0][1]).all()
    assert (found[1][1] == -1).all()
    assert (found[2][1] == -1).all()


def test_too_many_beams_are_refused() -> None:
    with pytest.raises(CudaError, match="at most 1536 beams, got 10 and k 3000"):
        run_step(draw(1, 5000, 2, 3, 10, False), 3000)


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_logs_of_probabilities_and_gradients_are_numpys(n: int) -> None:
    rng = np.random.default_rng(n)
    trie = draw_trie(rng, 30_000)
    starts, digits = trie.starts[1], trie.digits[1]
    allowed = rng.random(len(digits)) < 0.7
    children = rng.choice(np.flatnonzero(allowed), n)
    nodes = np.searchsorted(starts, children, side="right") - 1
    children[rng.random(n) < 0.1] = -1
    logits, upstream = rng.normal(0, 2, (n, CODES)).astype(np.float32), rng.normal(size=n)
    level = GpuTrieLevel(starts, digits, allowed)
    y, gradient = level.log_probs(logits, nodes, children, upstream)
    expected, of_logits = np.zeros(n), np.zeros((n, CODES))
    for row in np.flatnonzero(children >= 0):
        siblings = np.arange(starts[nodes[row]], starts[nodes[row] + 1])
        siblings = siblings[allowed[siblings]]
        logs = log_probs_of(logits[row, digits[siblings]].astype(np.float64))
        expected[row] = logs[siblings == children[row]][0]
        of_logits[row, digits[siblings]] = upstream[row] * ((siblings == children[row]) - np.exp(logs))
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient.numpy(), of_logits, rtol=1e-5, atol=1e-5)


def test_a_child_that_is_not_its_nodes_gives_nan() -> None:
    level = GpuTrieLevel(np.array([0, 2, 4]), np.array([0, 1, 0, 2], np.int32), None)
    y, gradient = level.log_probs(np.zeros((2, 3)), np.array([0, 1]), np.array([1, 1]), np.ones(2))
    assert not np.isnan(y.numpy()[0])
    assert np.isnan(y.numpy()[1])
    assert np.isnan(gradient.numpy()[1]).all()


def test_sizes_below_zero_are_refused() -> None:
    level = GpuTrieLevel(np.array([0, 1]), np.array([0], np.int32), None)
    some = DeviceArray(1, np.float32).pointer
    with pytest.raises(CudaError, match="sizes must be positive"):
        call("trie_log_probs", some, some, some, -1, 3, ctypes.byref(level.struct), some, None)
