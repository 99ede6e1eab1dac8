"""Semantic ids: codes that similar items share, digits that tell items apart, and files that keep them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.semantic_ids import CODEBOOKS, IDS, Codebooks, SemanticIds
from gmeta.preprocess import cooccurrence_vectors, semantic_ids
from gmeta.preprocess.item_codes import RqVae, assign_evenly


def groups(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of 4 distant groups with 3 distant subgroups each, and the numbers of both."""
    rng = np.random.default_rng(seed)
    group, part = rng.integers(0, 4, 300), rng.integers(0, 3, 300)
    centers, parts = 100 * np.eye(8)[:4], 10 * np.eye(8)[4:7]
    return centers[group] + parts[part] + 0.01 * rng.normal(size=(300, 8)), np.column_stack([group, part])


def same_partition(a: np.ndarray, b: np.ndarray) -> bool:
    pairs = np.unique(np.column_stack([a, b]), axis=0)
    return len(pairs) == len(np.unique(a)) == len(np.unique(b))


def test_similar_items_share_their_first_digits() -> None:
    vectors, known = groups()
    ids = semantic_ids(vectors, levels=2, codes=4, seed=3)
    assert same_partition(ids.digits[:, 0], known[:, 0])
    # Of three subgroups, four codes may cut one in two, but none has items of two.
    for code in np.unique(ids.digits[:, 1]):
        assert len(np.unique(known[ids.digits[:, 1] == code, 1])) == 1
    assert len(np.unique(ids.digits, axis=0)) == 300


@given(st.integers(1, 60), st.integers(1, 4), st.integers(2, 9), st.booleans(), st.integers(0, 2**31 - 1))
def test_codes_are_those_of_the_nearest_centers(
    n: int, levels: int, codes: int, balanced: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-3, 4, (n, 3)).astype(np.float32)  # some are alike
    items = rng.permutation(1000)[:n] - 500
    ids = semantic_ids(vectors, levels, codes, items=items, balanced=balanced, seed=seed)
    np.testing.assert_array_equal(ids.items, items)
    assert ids.digits.shape == (n, levels + 1)
    left = vectors
    for number, level in enumerate(ids.codebooks.levels):
        assert 1 <= len(level) <= codes
        if balanced:
            counts = np.bincount(ids.digits[:, number], minlength=len(level))
            assert counts.max() - counts.min() <= 1
        else:
            distances = ((left[:, None] - level) ** 2).sum(-1)
            mine = distances[np.arange(n), ids.digits[:, number]]
            np.testing.assert_allclose(mine, distances.min(axis=1), atol=1e-3)
        left = left - level[ids.digits[:, number]]
    if not balanced:
        np.testing.assert_array_equal(ids.codebooks.encode(vectors), ids.digits[:, :-1])
    _, group = np.unique(ids.digits[:, :-1], axis=0, return_inverse=True)
    for each in range(group.max() + 1):
        last = np.sort(ids.digits[group == each, -1])
        np.testing.assert_array_equal(last, np.arange(len(last)))


@given(st.integers(1, 80), st.integers(1, 12), st.integers(0, 2**31 - 1))
def test_even_centers_have_as_many_and_the_nearest_that_ask(n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = min(n, k)
    vectors, centers = rng.normal(size=(n, 2)), rng.normal(size=(k, 2))
    found = assign_evenly(vectors.astype(np.float32), centers.astype(np.float32))
    counts = np.bincount(found, minlength=k)
    assert counts.min() >= n // k
    assert counts.max() <= -(-n // k)


def test_an_rq_vae_finds_the_groups_again_and_again() -> None:
    vectors, known = groups(4)
    settings = RqVae(width=6, hidden=(32,), epochs=40, batch=64, rate=5e-3)
    ids = semantic_ids(vectors, 2, 4, method=settings, seed=1)
    assert ids.method == "rq-vae"
    assert same_partition(ids.digits[:, 0], known[:, 0])
    np.testing.assert_array_equal(ids.codebooks.encode(vectors), ids.digits[:, :-1])
    latent = ids.codebooks.latent(vectors)
    left = latent - ids.codebooks.decode(ids.digits[:, :-1])
    assert (left**2).sum() < 0.1 * ((latent - latent.mean(axis=0)) ** 2).sum()
    again = semantic_ids(vectors, 2, 4, method=settings, seed=1)
    np.testing.assert_array_equal(again.digits, ids.digits)


def test_the_last_digit_depends_on_no_order() -> None:
    vectors = np.zeros((20, 2), np.float32)
    items = np.arange(40, 60)
    order = np.random.default_rng(1).permutation(20)
    one, other = semantic_ids(vectors, 1, 2, items=items), semantic_ids(vectors, 1, 2, items=items[order])
    np.testing.assert_array_equal(one.digits[order], other.digits)
    assert one.digits[:, -1].tolist() != sorted(one.digits[:, -1])  # nor is it the order of ids
    assert one.report()["alike"] == 1.0
    assert one.report()["most_alike"] == 20


def test_new_items_change_no_digit() -> None:
    vectors, _ = groups()
    ids = semantic_ids(vectors[:250], levels=2, codes=4)
    more = ids.add(np.arange(1000, 1050), vectors[250:])
    np.testing.assert_array_equal(more.digits[:250], ids.digits)
    np.testing.assert_array_equal(more.digits[250:, :-1], ids.codebooks.encode(vectors[250:]))
    assert more.codebooks is ids.codebooks
    assert more.digest != ids.digest
    with pytest.raises(DataError, match="item 3 came more than once"):
        ids.add(np.array([3]), vectors[:1])
    with pytest.raises(ConfigError, match="2 new items have 1 vectors"):
        ids.add(np.array([900, 901]), vectors[:1])


def test_files_keep_everything(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    layers = ((rng.normal(size=(6, 5)), rng.normal(size=5)), (rng.normal(size=(5, 4)), rng.normal(size=4)))
    encoder = tuple((kernel.astype(np.float32), bias.astype(np.float32)) for kernel, bias in layers)
    books = Codebooks((rng.normal(size=(7, 4)).astype(np.float32),), encoder)
    vectors = rng.normal(size=(9, 6)).astype(np.float32)
    hidden = np.maximum(vectors @ encoder[0][0] + encoder[0][1], 0) @ encoder[1][0] + encoder[1][1]
    np.testing.assert_allclose(books.latent(vectors), hidden, rtol=1e-5)
    codes = books.encode(vectors)
    ids = SemanticIds(np.arange(9), np.column_stack([codes, np.arange(9)]).astype(np.int32), books, "rq-vae")
    ids.write(tmp_path)
    again = SemanticIds.read(tmp_path)
    assert again.digest == ids.digest
    assert again.sizes == (7, 9)
    np.testing.assert_array_equal(again.codebooks.encode(vectors), codes)
    np.testing.assert_array_equal(again.digits, ids.digits)


def test_files_that_are_not_whole_are_named(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for seed, folder in enumerate((one, other)):
        folder.mkdir()
        semantic_ids(np.random.default_rng(seed).normal(size=(40, 4)), 2, 4).write(folder)
    with pytest.raises(DataError, match=f"{tmp_path / IDS}: can't read semantic ids: no such file"):
        SemanticIds.read(tmp_path)
    whole = (one / CODEBOOKS).read_bytes()
    (one / CODEBOOKS).write_bytes((other / CODEBOOKS).read_bytes())
    with pytest.raises(DataError, match="are of different semantic ids"):
        SemanticIds.read(one)
    (one / CODEBOOKS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=f"{CODEBOOKS}: can't read semantic ids: it is damaged"):
        SemanticIds.read(one)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"vectors": np.zeros(5)}, r"numbers \(items, dim\), got float64 of shape \(5,\)"),
        ({"vectors": np.zeros((0, 5))}, r"got float64 of shape \(0, 5\)"),
        ({"vectors": np.full((3, 2), np.nan)}, "row 0 of the vectors holds NaN"),
        ({"levels": 0}, "levels must be a whole number from 1 on, got 0"),
        ({"codes": 1}, "codes must be a whole number from 2 on, got 1"),
        ({"method": "rqvae"}, "method must be 'kmeans' or an RqVae, got 'rqvae'"),
        ({"method": RqVae(), "balanced": True}, "balanced=True is for k-means, and an RqVae is given"),
        ({"items": np.arange(4)}, r"items must be \(3,\), one id a vector, got shape \(4,\)"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        semantic_ids(**{"vectors": np.eye(3), "levels": 1, "codes": 2, **arguments})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"width": 0}, "width must be a whole number from 1 on, got 0"),
        ({"hidden": (4, 0)}, "a width in hidden must be a whole number from 1 on, got 0"),
        ({"rate": 0.0}, "rate must be above 0, got 0.0"),
        ({"commitment": -1.0}, "commitment must be 0 or more, got -1.0"),
    ],
)
def test_wrong_settings_of_an_rq_vae_are_named(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=f"RqVae: {said}"):
        RqVae(**settings)


def test_codes_out_of_range_and_other_widths_are_named() -> None:
    books = Codebooks((np.zeros((3, 2), np.float32),))
    with pytest.raises(DataError, match="item 7 has code 3 at level 0, which has codes 0 to 2"):
        SemanticIds(np.array([7]), np.array([[3, 0]], np.int32), books, "kmeans")
    with pytest.raises(ConfigError, match=r"must be 2 wide, .* got 5"):
        books.encode(np.zeros((1, 5), np.float32))
    with pytest.raises(ConfigError, match=r"shapes \(2, 3\) and \(4,\)"):
        Codebooks((np.zeros((3, 2), np.float32),), ((np.zeros((2, 3)), np.zeros(4)),))


def test_items_that_stand_together_have_near_vectors() -> None:
    rng = np.random.default_rng(2)
    histories = [list(rng.permutation(10) + 10 * rng.integers(0, 5)) for _ in range(200)]  # 5 sets of 10
    vectors = cooccurrence_vectors(histories, 50, 8)
    near = vectors @ vectors.T
    together = np.kron(np.eye(5), np.ones((10, 10))) > 0
    assert near[together].min() > near[~together].max()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_attributes_bring_together_what_no_history_does() -> None:
    attributes = {item: [item % 2] for item in range(20)}
    vectors = cooccurrence_vectors([[0, 2], [1, 3]], 21, 2, attributes=attributes)
    assert vectors[10] @ vectors[12] > 0.9 > vectors[10] @ vectors[11]
    assert not vectors[20].any()  # which has neither
    with pytest.raises(ConfigError, match="a history is 21, but items are 0 to 20"):
        cooccurrence_vectors([[21]], 21, 2)
    with pytest.raises(ConfigError, match="dim must be below the number of items, 3, got 3"):
        cooccurrence_vectors([[0, 1]], 3, 3)
