"""Makes vectors of items out of histories and attributes, and semantic ids out of vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, finite_number, whole_number
from gmeta.core.keras import select_legacy_keras
from gmeta.core.semantic_ids import (
    Codebooks,
    SemanticIds,
    Vectors,
    apply_layers,
    check_vectors,
    item_numbers,
    nearest,
    number_alike,
    places_in_groups,
    squared_distances,
)

if TYPE_CHECKING:
    import tensorflow as tf


def cooccurrence_vectors(
    histories: Sequence[Sequence[int] | NDArray[np.int64]],
    items: int,
    dim: int = 64,
    *,
    window: int = 5,
    attributes: Mapping[int, Sequence[int]] | None = None,
    seed: int = 0,
) -> Vectors:
    """Embed items by a truncated SVD of their neighbours in histories and of their attributes.

    Two matrices are placed side by side, each scaled to a Frobenius norm of 1: the positive pointwise
    mutual information max(0, log(p(i, j) / (p(i) p(j)))) of items at most ``window`` places apart, and
    attributes by inverse frequency, log(items / items with it). With the SVD U S Vᵀ, the vectors are U √S,
    each divided by its length.

    Args:
      histories: Items of each user in the order of time, numbers from 0. Leave out the items to predict.
      items: The number of items.
      dim: The width of the vectors, 1 <= dim < items.
      window: The largest distance in places, >= 1.
      attributes: The attributes of items, as any numbers: categories, brands.
      seed: Seeds the SVD's random start.

    Returns:
      float32 (items, dim). An item without neighbours and attributes has zeros.

    Raises:
      ConfigError: A number is out of range, or histories or attributes name an item that doesn't exist.

    Example:
      >>> cooccurrence_vectors([[0, 1, 2], [1, 0, 3], [2, 3]], items=4, dim=2).shape
      (4, 2)

    Reference: Levy and Goldberg, Neural word embedding as implicit matrix factorization, NeurIPS 2014.
    """
    from scipy.sparse import hstack
    from sklearn.decomposition import TruncatedSVD

    whole_number("cooccurrence_vectors: window", window, 1)
    whole_number("cooccurrence_vectors: dim", dim, 1)
    if dim >= items:
        raise ConfigError(f"cooccurrence_vectors: dim must be below the number of items, {items}, got {dim}")
    parts = [_mutual_information(histories, items, window)]
    if attributes:
        parts.append(_weighted_attributes(attributes, items))
    whole = hstack([part / max(np.sqrt(part.power(2).sum()), 1e-30) for part in parts]).tocsr()
    svd = TruncatedSVD(min(dim, whole.shape[1] - 1), random_state=seed)
    vectors = svd.fit_transform(whole) / np.sqrt(np.maximum(svd.singular_values_, 1e-30))
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 1e-12, lengths, np.inf)).astype(np.float32)


def _mutual_information(
    histories: Sequence[Sequence[int] | NDArray[np.int64]], items: int, window: int
) -> Any:
    from scipy.sparse import coo_matrix

    lengths = np.fromiter((len(history) for history in histories), np.int64, len(histories))
    flat = np.concatenate([np.asarray(history, np.int64) for history in histories] or [np.empty(0, np.int64)])
    _check_items(flat, items, "a history")
    user = np.repeat(np.arange(len(lengths)), lengths)
    counts = coo_matrix((items, items))
    for apart in range(1, window + 1):
        beside = user[apart:] == user[:-apart]
        left, right = flat[:-apart][beside], flat[apart:][beside]
        counts = counts + coo_matrix((np.ones(len(left)), (left, right)), (items, items))
    counts = (counts + counts.T).tocoo()
    of_item = np.asarray(counts.sum(axis=1)).ravel()
    expected = of_item[counts.row] * of_item[counts.col] / max(of_item.sum(), 1)
    values = np.maximum(0, np.log(counts.data / expected))
    return coo_matrix((values, (counts.row, counts.col)), (items, items)).tocsr()


def _weighted_attributes(attributes: Mapping[int, Sequence[int]], items: int) -> Any:
    from scipy.sparse import coo_matrix

    item = np.repeat(list(attributes), [len(each) for each in attributes.values()]).astype(np.int64)
    _check_items(item, items, "an attribute's item")
    names, column = np.unique(np.concatenate(list(map(np.asarray, attributes.values()))), return_inverse=True)
    whole = coo_matrix((np.ones(len(item)), (item, column)), (items, len(names))).tocsr()
    whole.data[:] = 1  # an attribute that is named twice counts once
    return whole.multiply(np.log(items / np.asarray(whole.sum(axis=0)))).tocsr()


def _check_items(found: NDArray[np.int64], items: int, where: str) -> None:
    wrong = (found < 0) | (found >= items)
    if wrong.any():
        raise ConfigError(
            f"cooccurrence_vectors: {where} is {found[np.argmax(wrong)]}, but items are 0 to {items - 1}: "
            "number them from 0"
        )


# Assigns vectors to centers so that all centers get the same number, up to one.


def assign_evenly(vectors: Vectors, centers: Vectors) -> NDArray[np.int32]:
    """Assign each vector to a near center; the centers' numbers of vectors differ by at most one.

    Vectors request their nearest center that has room; a center takes the nearest of these vectors, and the
    others ask again. With n vectors and k centers, n mod k centers, those that fill first, take one more.

    Args:
      vectors: float32 (n, dim), n >= k.
      centers: float32 (k, dim).

    Returns:
      The numbers of the centers, int32 (n,).
    """
    share, larger = divmod(len(vectors), len(centers))
    found = np.full(len(vectors), -1, np.int32)
    counts = np.zeros(len(centers), np.int64)
    distances = squared_distances(vectors, centers)
    waiting = np.arange(len(vectors))
    while len(waiting):
        most = share + (larger > 0)
        wished = distances[waiting].argmin(axis=1)
        far = distances[waiting, wished]
        order = np.lexsort((waiting, far, wished))
        group = wished[order]
        takes = places_in_groups(group) < most - counts[group]
        found[waiting[order[takes]]] = group[takes]
        counts += np.bincount(group[takes], minlength=len(centers))
        # Once n mod k centers have taken one more vector, the others are full with their share.
        beyond = np.flatnonzero(counts > share)
        if larger and len(beyond) >= larger:
            for center in beyond[larger:]:  # they took one more in the same round: give back the farthest
                mine = np.flatnonzero(found == center)
                found[mine[distances[mine, center].argmax()]] = -1
                counts[center] -= 1
            distances[:, counts >= share] = np.inf
            larger = 0
        distances[:, counts >= share + (larger > 0)] = np.inf
        waiting = np.flatnonzero(found < 0)
    return found


# Codebooks by residual k-means.

_WHOLE = 200_000  # number of vectors above which k-means runs on batches
_BATCH = 16_384
_EVEN_ROUNDS = 5


def fit_residual_kmeans(
    vectors: Vectors, levels: int, codes: int, *, balanced: bool, seed: int
) -> tuple[tuple[Vectors, ...], NDArray[np.int32]]:
    """Cluster vectors, then their residuals, level by level.

    Args:
      vectors: float32 (n, dim).
      levels: The number of levels.
      codes: The largest number of codes of a level; if fewer distinct vectors are left, the level has one
        code for each.
      balanced: Whether all codes of a level get the same number of vectors, up to one.
      seed: Seeds the first centers.

    Returns:
      The levels, each float32 (codes, dim), and the codes of the vectors, int32 (n, levels).
    """
    books, digits, left = [], [], vectors
    for level in range(levels):
        size = min(codes, len(np.unique(left, axis=0)))
        centers = _centers(left, size, seed + level)
        if balanced:
            centers, digit = _even_out(left, centers)
        else:
            digit = nearest(left, centers)
        books.append(centers)
        digits.append(digit)
        left = left - centers[digit]
    return tuple(books), np.column_stack(digits)


def _centers(vectors: Vectors, size: int, seed: int) -> Vectors:
    from sklearn.cluster import KMeans, MiniBatchKMeans

    if len(vectors) <= _WHOLE:
        fit = KMeans(size, n_init=1, random_state=seed).fit(vectors)
    else:
        fit = MiniBatchKMeans(size, n_init=1, random_state=seed, batch_size=_BATCH).fit(vectors)
    centers: Vectors = fit.cluster_centers_.astype(np.float32)
    return centers


def _even_out(vectors: Vectors, centers: Vectors) -> tuple[Vectors, NDArray[np.int32]]:
    """Move the centers to the means of evenly assigned vectors, several times."""
    digit = assign_evenly(vectors, centers)
    for _ in range(_EVEN_ROUNDS):
        sums = np.zeros(centers.shape, np.float64)
        np.add.at(sums, digit, vectors)
        centers = (sums / np.bincount(digit, minlength=len(centers))[:, None]).astype(np.float32)
        digit = assign_evenly(vectors, centers)
    return centers, digit


# Codebooks by RQ-VAE: an autoencoder whose latent vectors are quantized level by level.


@dataclass(frozen=True)
class RqVae:
    """Settings of an RQ-VAE, with which `semantic_ids` can make codebooks instead of k-means.

    An encoder f and a decoder g of dense layers with ReLU between them, and codebooks e_l, are trained by
    Adam to minimize the mean over items of::

      |x - g(q)|² + Σ_l |sg[r_l] - e_l(c_l)|² + commitment · |r_l - sg[e_l(c_l)]|²

    Here x is the item's vector, shifted and scaled so that the vectors have mean 0 and variance 1 overall; q
    is the sum of the codes' vectors; r_l and c_l are as in `Codebooks`; and sg stops gradients. The gradient
    of q goes to f(x) unchanged. The codebooks begin as a residual k-means of f(x). After each epoch except
    those of the last fifth, codes that no item uses are moved to an item's r_l.

    Args:
      width: The width of the latent vectors.
      hidden: The widths of the encoder's layers before the latent ones; the decoder reverses them.
      epochs: Passes over the items.
      batch: Items per step.
      rate: Adam's learning rate.
      commitment: The weight above, >= 0.

    Raises:
      ConfigError: A number is out of range.

    Reference: Rajput et al., Recommender systems with generative retrieval, NeurIPS 2023, section 3.1;
    Zeghidour et al., SoundStream, 2021, for unused codes.
    """

    width: int = 32
    hidden: tuple[int, ...] = (512, 256, 128)
    epochs: int = 200
    batch: int = 1024
    rate: float = 1e-3
    commitment: float = 0.25

    def __post_init__(self) -> None:
        for name in ("width", "epochs", "batch"):
            whole_number(f"RqVae: {name}", getattr(self, name), 1)
        for width in self.hidden:
            whole_number("RqVae: a width in hidden", width, 1)
        if finite_number("RqVae: rate", self.rate) <= 0:
            raise ConfigError(f"RqVae: rate must be above 0, got {self.rate}")
        if finite_number("RqVae: commitment", self.commitment) < 0:
            raise ConfigError(f"RqVae: commitment must be 0 or more, got {self.commitment}")


def fit_rq_vae(vectors: Vectors, levels: int, codes: int, settings: RqVae, seed: int) -> Codebooks:
    """Train an RQ-VAE.

    Args:
      vectors: float32 (n, dim).
      levels: The number of levels.
      codes: The largest number of codes of a level.
      settings: The `RqVae`.
      seed: Seeds the first weights, the order of items and the moves of unused codes.

    Returns:
      The codebooks, with the encoder.
    """
    mean = vectors.mean(axis=0)
    scale = float(np.sqrt(np.mean((vectors - mean) ** 2))) or 1.0
    inputs = ((vectors - mean) / scale).astype(np.float32)
    model = _Autoencoder(inputs, levels, codes, settings, seed)
    for epoch in range(settings.epochs):
        model.train()
        if epoch < settings.epochs * 4 // 5:
            model.replace_unused()
    (kernel, bias), *rest = model.encoder()
    first = (kernel / scale).astype(np.float32), (bias - mean / scale @ kernel).astype(np.float32)
    return Codebooks(tuple(book.numpy() for book in model.books), (first, *rest))


class _Autoencoder:
    def __init__(self, inputs: Vectors, levels: int, codes: int, settings: RqVae, seed: int) -> None:
        select_legacy_keras()
        import tensorflow as tf

        self._inputs, self._settings = inputs, settings
        self._random = np.random.default_rng(seed)
        widths = (inputs.shape[1], *settings.hidden, settings.width)
        self._down = self._layers(widths)
        self._up = self._layers(widths[::-1])
        latent = apply_layers(self.encoder(), inputs)
        books, _ = fit_residual_kmeans(latent, levels, codes, balanced=False, seed=seed)
        self.books = [tf.Variable(book) for book in books]
        self._adam = tf.keras.optimizers.legacy.Adam(settings.rate)
        self._step = tf.function(
            self._train_on, input_signature=[tf.TensorSpec([None, widths[0]], tf.float32)]
        )

    def encoder(self) -> tuple[tuple[Vectors, Vectors], ...]:
        """Return the encoder's layers."""
        return tuple((kernel.numpy(), bias.numpy()) for kernel, bias in self._down)

    def train(self) -> None:
        """Take a step for each batch of the items, in a new order."""
        order = self._random.permutation(len(self._inputs))
        for first in range(0, len(order), self._settings.batch):
            self._step(self._inputs[order[first : first + self._settings.batch]])

    def replace_unused(self) -> None:
        """Move codes that no item uses to an item's residual."""
        left = apply_layers(self.encoder(), self._inputs)
        for book in self.books:
            level = book.numpy()
            unused = np.flatnonzero(np.bincount(nearest(left, level), minlength=len(level)) == 0)
            if len(unused):
                level[unused] = left[self._random.integers(0, len(left), len(unused))]
                book.assign(level)
            left = left - level[nearest(left, level)]

    def _layers(self, widths: tuple[int, ...]) -> list[tuple[tf.Variable, tf.Variable]]:
        import tensorflow as tf

        layers = []
        for inner, outer in pairwise(widths):
            most = np.sqrt(6 / (inner + outer))  # Glorot and Bengio
            kernel = self._random.uniform(-most, most, (inner, outer)).astype(np.float32)
            layers.append((tf.Variable(kernel), tf.Variable(tf.zeros([outer]))))
        return layers

    def _train_on(self, x: tf.Tensor) -> None:
        import tensorflow as tf

        def mean_square(difference: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(tf.reduce_sum(difference**2, axis=1))

        stop = tf.stop_gradient
        with tf.GradientTape() as tape:
            latent = _apply(self._down, x)
            left, loss = latent, tf.zeros([])
            for book in self.books:
                distances = tf.reduce_sum(book**2, axis=1) - 2 * tf.matmul(left, book, transpose_b=True)
                code = tf.gather(book, tf.argmin(distances, axis=1))
                loss += mean_square(stop(left) - code)
                loss += self._settings.commitment * mean_square(left - stop(code))
                left -= stop(code)
            loss += mean_square(x - _apply(self._up, latent - stop(left)))
        weights = [*self.books, *(weight for layer in (*self._down, *self._up) for weight in layer)]
        self._adam.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


def _apply(layers: list[tuple[Any, Any]], x: tf.Tensor) -> tf.Tensor:
    import tensorflow as tf

    for number, (kernel, bias) in enumerate(layers):
        x = tf.matmul(x, kernel) + bias
        if number + 1 < len(layers):
            x = tf.nn.relu(x)
    return x


Method = Literal["kmeans"] | RqVae


def semantic_ids(
    vectors: Vectors,
    levels: int = 3,
    codes: int = 256,
    *,
    items: NDArray[np.int64] | None = None,
    method: Method = "kmeans",
    balanced: bool = False,
    seed: int = 0,
) -> SemanticIds:
    """Give each item ``levels`` digits by residual quantization of the items' vectors, and one more digit.

    Level 1 clusters the vectors, or the outputs of an `RqVae`'s encoder for them; level l + 1 clusters the
    residuals after subtracting the nearest centers of level l (`Codebooks`). So similar items share their
    first digits. The last digit distinguishes items that share all codes.

    Args:
      vectors: float (n, dim), one row an item: embeddings of texts or pictures, rows of a trained model
        (`gmeta tables export`), `cooccurrence_vectors`. k-means weighs all columns alike: scale them first if
        they should have other weights.
      levels: Digits, without the last one; >= 1.
      codes: Values of a digit, >= 2. A level at which fewer distinct vectors are left has fewer.
      items: The items' ids, int64 (n,), each once; None: 0 to n - 1.
      method: ``"kmeans"``, or the `RqVae` to train, for which TensorFlow is loaded.
      balanced: With k-means, whether all codes of a level get the same number of items, up to one.
      seed: Seeds the first centers and the RQ-VAE's training.

    Returns:
      `SemanticIds`, whose ``write`` and ``read`` store them in files.

    Raises:
      ConfigError: An argument is out of range or for the other method, the vectors aren't finite numbers
        (n, dim), or the number of items differs from n.
      DataError: An item occurs twice.

    Example:
      >>> ids = semantic_ids(np.eye(6), levels=2, codes=3, items=np.arange(10, 16))
      >>> ids.items[0], len(ids.digits[0])
      (10, 3)

    Reference: Rajput et al., Recommender systems with generative retrieval, NeurIPS 2023, section 3.1; Luo et
    al., QARM, 2024, section 3.2, for k-means.
    """
    whole_number("semantic_ids: levels", levels, 1)
    whole_number("semantic_ids: codes", codes, 2)
    vectors = np.asarray(vectors)
    check_vectors(vectors)
    numbers = np.arange(len(vectors), dtype=np.int64) if items is None else item_numbers(items)
    if numbers.shape != (len(vectors),):
        raise ConfigError(
            f"semantic_ids: items must be ({len(vectors)},), one id a vector, got shape {numbers.shape}"
        )
    vectors = vectors.astype(np.float32)
    if isinstance(method, RqVae):
        if balanced:
            raise ConfigError(
                "semantic_ids: balanced=True is for k-means, and an RqVae is given: leave one out"
            )
        books = fit_rq_vae(vectors, levels, codes, method, seed)
        digits = books.encode(vectors)
    elif method == "kmeans":
        centers, digits = fit_residual_kmeans(vectors, levels, codes, balanced=balanced, seed=seed)
        books = Codebooks(centers)
    else:
        raise ConfigError(f"semantic_ids: method must be 'kmeans' or an RqVae, got {method!r}")
    last = number_alike(digits, numbers, np.empty(0, np.int32))
    made = "rq-vae" if isinstance(method, RqVae) else method
    return SemanticIds(numbers, np.column_stack([digits, last]).astype(np.int32), books, made)
