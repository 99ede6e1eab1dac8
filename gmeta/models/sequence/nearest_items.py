"""An index of a catalogue's vectors that finds nearly all of the best items without scoring every item.

K-means divides the items into lists. A search chooses the lists whose centres have the greatest products with
the query. Faiss scores their items by vectors of eight bits a number, and the best of these are scored again
exactly. ``probes``, the number of lists, trades time for recall.

A folder holds the index, the vectors, which are mapped and not read, the items' ids, and a hash of all:

    manifest.json  index.faiss  vectors.npy  items.arrow  seal
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import tensorflow as tf
from pyarrow import feather

from gmeta.core.errors import ConfigError, DataError, whole_number
from gmeta.core.files import check_replaces, sha256_of, stage_folder
from gmeta.core.imports import import_for
from gmeta.layers import FeatureConfig
from gmeta.models.sequence.catalogue import Catalogue, Items, top_items
from gmeta.models.sequence.history_model import HistoryModel, Ints, QueryItems

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

_FORMAT, _SEAL = "gmeta nearest items", "seal"
_MANIFEST, _INDEX, _VECTORS, _ITEMS = "manifest.json", "index.faiss", "vectors.npy", "items.arrow"
_ROWS = 1 << 18  # how many vectors are read at once
_PER_LIST = 40  # vectors that k-means reads for each list
_ROUNDS = 8  # of k-means
_FEW_LISTS = 512  # so many are compared with each vector when lists are made
_PROBES = 8  # of the index of more
_FOR_RANGES = 65536  # vectors that determine the steps of eight bits
_FURTHER = 32  # candidates that are scored again besides half as many as the items wanted
_NUMBERS = 1 << 24  # of candidates' vectors that are gathered at once
_CLOSE = 1e-5  # of a vector's length: what processors may round differently
_ROUNDING = 1e-6  # of a score, likewise
_AGAIN = "the index is stale: build it again by NearestItems.of(model)"
_FOLLOW = "the index is stale: index.follow(model) updates it"


class NearestItems:
    r"""Finds the items whose vectors have the greatest products with queries, by an index.

    Recall is high and not 1: `recall` measures it. Scores are exact, filters as in
    `gmeta.models.NextItemModel.recommend`, and k items are found wherever k remain. It needs Faiss
    (``pip install 'gmeta[nearest]'``), which uses all cores; ``faiss.omp_set_num_threads`` changes that.

    It takes about 5 d + 8 bytes an item, of which 4 d are the vector itself, in a file if it is loaded.

    Args:
      vectors: (V, d) floats, finite.
      items: The ids of the items, as for `gmeta.models.NextItemModel`; None: numbers from 0 on.
      lists: How many lists there are. None: about :math:`4 \sqrt{V}`, at most one for 40 items.
      probes: How many lists a search reads. None: one in 32, at least 8.
      hash: Whether a text and its hash are the same item, as in a feature with ``hash=True``.
      bias: What is added to the products of the items of ``history`` in `search`.
      scale: What these sums are multiplied by.
      seed: The seed of k-means.

    Attributes:
      catalogue: The items.
      probes: As above; it may be changed.
      fingerprint: A hash of the vectors and ids, in hexadecimal digits.

    Raises:
      ConfigError: Faiss isn't installed; vectors have another form or aren't finite; or settings don't fit.

    Example:
      >>> index = NearestItems(np.random.default_rng(0).normal(size=(1000, 16)))
      >>> items, scores = index.search(np.ones((2, 16)), k=5, leave_out=[[3, -1], [4, 8]])
      >>> items.shape
      (2, 5)
    """

    def __init__(
        self,
        vectors: Any,
        items: Items | None = None,
        *,
        lists: int | None = None,
        probes: int | None = None,
        hash: bool = True,
        bias: float = 0.0,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        faiss = import_for("NearestItems", "faiss", "nearest")
        vectors = np.ascontiguousarray(vectors, np.float32)
        if vectors.ndim != 2 or not vectors.size:
            raise ConfigError(f"NearestItems: vectors must be (items, d), got the shape {vectors.shape}")
        size, feature = len(vectors), FeatureConfig("items", dim=1, hash=hash)
        catalogue = Catalogue(size if items is None else items, "NearestItems", feature)
        if catalogue.size != size:
            raise ConfigError(f"NearestItems: {size} vectors for {catalogue.size} items: give one for each")
        if len(bad := np.flatnonzero(~np.isfinite(np.einsum("ij,ij->i", vectors, vectors)))):
            raise ConfigError(f"NearestItems: the squared length of item {bad[0]}'s vector isn't finite")
        lists = max(1, min(int(4 * size**0.5), size // _PER_LIST)) if lists is None else lists
        if whole_number("NearestItems: lists", lists, least=1) > size:
            raise ConfigError(f"NearestItems: lists must be at most {size}, one for each item, got {lists}")
        index = _build(faiss, vectors, lists, whole_number("NearestItems: seed", seed, least=0))
        self._fill(faiss, index, vectors, catalogue, bias, scale, _fingerprint(vectors, catalogue))
        self.probes = min(lists, max(8, lists // 32)) if probes is None else probes

    def _fill(
        self,
        faiss: Any,
        index: Any,
        vectors: Floats,
        catalogue: Catalogue,
        bias: float,
        scale: float,
        of: str,
    ) -> None:
        self._faiss, self._index, self._vectors, self.catalogue = faiss, index, vectors, catalogue
        self.bias, self.scale, self.fingerprint = float(bias), float(scale), of

    @property
    def size(self) -> int:
        """V, the number of items."""
        return self.catalogue.size

    @property
    def lists(self) -> int:
        """How many lists there are."""
        return int(self._index.nlist)

    @property
    def probes(self) -> int:
        """How many lists a search reads at first; it reads more where filters leave too few items."""
        return self._probes

    @probes.setter
    def probes(self, probes: int) -> None:
        if whole_number("NearestItems: probes", probes, least=1) > self.lists:
            raise ConfigError(f"NearestItems: probes must be at most {self.lists}, all lists, got {probes}")
        self._probes = probes

    @classmethod
    def of(cls, model: HistoryModel, **settings: Any) -> NearestItems:
        """Build the index of a model's items, with its ids and the bias and scale of its scores.

        Args:
          model: A `gmeta.models.NextItemModel` or `gmeta.models.TwoTower`.
          **settings: ``lists``, ``probes`` and ``seed``, as above.

        Example:
          >>> index = NearestItems.of(model)  # doctest: +SKIP
          >>> items, scores = index.search(model.predict(batch), 100)  # doctest: +SKIP
        """
        if not hasattr(model, "item_vectors"):
            raise ConfigError(f"{model.name} has no item_vectors: use its own search, `retrieve`")
        settings["bias"], settings["scale"] = _bias_and_scale(model)
        vectors = model.item_vectors().numpy()
        return cls(vectors, _items(model.catalogue), hash=model.feature.hash, **settings)

    def search(
        self, queries: Any, k: int = 10, *, leave_out: Any = None, allow: Any = None, history: Any = None
    ) -> tuple[npt.NDArray[Any], Floats]:
        """Find the k items with the highest scores.

        Args:
          queries: (n, d) floats, such as the result of `predict`, or of an exported model's ``query``.
          k: The number of items.
          leave_out: Ids of the items to leave out for each query: ragged, one row per query, or a matrix
            (n, width) padded with -1 or the empty text. Ids that the index lacks have no effect.
          allow: bool (V,), which items are allowed, in the order of the catalogue. None: all.
          history: Ids of the items whose products ``bias`` is added to, as ``leave_out``: those of the
            history, for a `gmeta.models.NextItemModel` with ``repeats``.

        Returns:
          (n, k) ids, the highest score first; and (n, k) float32 scores. Among equal scores, items are in the
          order of the catalogue. If fewer than k items are left, the rest is -1 or the empty text, with the
          score -inf.

        Raises:
          ConfigError: Queries or filters have another form, or there are fewer than k items.
        """
        queries = self._queries(queries)
        named = {"leave_out": leave_out, "history": history}
        left, again = (
            None if ids is None else self.catalogue.find_each(ids, name, tf.constant(len(queries)))
            for name, ids in named.items()
        )
        numbers, scores = self._best(queries, k, left, self.catalogue.mask(allow), again, self.bias)
        return self._ids(numbers), scores * np.float32(self.scale)

    def top_items(
        self,
        queries: Any,
        k: int,
        *,
        leave_out: tf.RaggedTensor | None = None,
        allow: Any = None,
        again: tf.RaggedTensor | None = None,
        bias: Any = 0.0,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find numbers of items and products, as `gmeta.models.sequence.catalogue.top_items` does."""
        found = self._best(self._queries(queries), k, leave_out, allow, again, float(bias))
        return tf.constant(found[0]), tf.constant(found[1])

    def recall(self, queries: Any, k: int = 100, *, allow: Any = None) -> float:
        """Measure which share of the k best items `search` finds.

        All items are scored for comparison, which takes time: give a sample of queries, such as 1,000.

        Args:
          queries: (n, d) floats.
          k: The number of items.
          allow: bool (V,), which items are allowed. None: all.

        Returns:
          The mean over queries of the share of found items whose score is at least the k-th best one, up to
          the rounding of sums.

        Example:
          >>> vectors = np.random.default_rng(0).normal(size=(1000, 16))
          >>> index = NearestItems(vectors)
          >>> index.probes = index.lists
          >>> index.recall(vectors[:100], k=10)
          1.0
        """
        queries, mask = self._queries(queries), self.catalogue.mask(allow)
        if not len(queries):
            raise ConfigError("NearestItems: recall needs queries: give at least one")
        _, scores = self._best(queries, k, None, mask, None, 0.0)
        _, best = self._exact(queries, k, mask)
        there = np.isfinite(best)
        lowest = np.where(there, best, np.inf).min(axis=1, keepdims=True)
        lowest -= _ROUNDING * np.maximum(np.abs(lowest), np.abs(best[:, :1]))
        return float(np.mean((scores >= lowest)[there])) if there.any() else 1.0

    def exact(self, queries: Any, k: int = 10, *, allow: Any = None) -> tuple[npt.NDArray[Any], Floats]:
        """Find the k items with the highest scores by scoring all, for comparison with `search`."""
        numbers, scores = self._exact(self._queries(queries), k, self.catalogue.mask(allow))
        return self._ids(numbers), scores * np.float32(self.scale)

    def _exact(self, queries: Floats, k: int, allow: tf.Tensor | None) -> tuple[Ints, Floats]:
        numbers, scores = np.full((len(queries), k), -1), np.full((len(queries), k), -np.inf, np.float32)
        asked = tf.constant(queries)
        for begin in range(0, self.size, _ROWS):  # so that the vectors stay in their file
            some = slice(begin, begin + _ROWS)
            mask = None if allow is None else allow[some]
            found, best = top_items(asked, tf.constant(self._vectors[some]), k, allow=mask)
            found = np.where(found < 0, -1, found.numpy() + begin)
            every, those = np.concatenate([scores, best], 1), np.concatenate([numbers, found], 1)
            order = np.argsort(-every, axis=1, kind="stable")[:, :k]
            scores, numbers = (np.take_along_axis(each, order, axis=1) for each in (every, those))
        return numbers, scores

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the index to a folder, which appears whole; a former index is replaced.

        Raises:
          GmetaError: The folder can't be written, or holds something else than an index.
        """
        check_replaces(Path(folder), _MANIFEST, "an index")
        about = {name: getattr(self, name) for name in ("size", "probes", "bias", "scale", "fingerprint")}
        about |= {"format": _FORMAT, "hash": self.catalogue.hashes, "ids": self.catalogue.has_ids}
        with stage_folder(Path(folder)) as staged:
            np.save(staged / _VECTORS, self._vectors)
            self._faiss.write_index(self._index, str(staged / _INDEX))
            if self.catalogue.has_ids:
                feather.write_feather(pa.table({"item": _items(self.catalogue)}), str(staged / _ITEMS), "lz4")
            (staged / _MANIFEST).write_text(json.dumps(about, indent=1))
            (staged / _SEAL).write_text(_seal(staged))

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, model: HistoryModel | None = None) -> NearestItems:
        """Load an index that `save` wrote. The vectors stay in their file, which is mapped.

        Args:
          folder: The folder.
          model: The model whose items it must have (`check`). None: it isn't compared.

        Raises:
          ConfigError: Faiss isn't installed; or the index is stale: the model has other vectors.
          DataError: The folder holds no index, or a damaged one.
        """
        faiss, folder = import_for("NearestItems", "faiss", "nearest"), Path(folder)
        try:
            about = json.loads((folder / _MANIFEST).read_text())
            if about["format"] != _FORMAT or (folder / _SEAL).read_text() != _seal(folder):
                raise ValueError("its files don't belong together")
            vectors = np.asarray(np.load(folder / _VECTORS, mmap_mode="r"))
            ids = about["ids"] and feather.read_table(str(folder / _ITEMS))["item"].to_numpy()
            items = ids if about["ids"] else about["size"]
            index = faiss.read_index(str(folder / _INDEX))
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, pa.ArrowException) as error:
            raise DataError(f"no readable index ({error})", path=folder, advice="build it again") from error
        catalogue = Catalogue(items, "NearestItems", FeatureConfig("items", dim=1, hash=about["hash"]))
        found = cls.__new__(cls)
        found._fill(faiss, index, vectors, catalogue, about["bias"], about["scale"], about["fingerprint"])
        found.probes = about["probes"]
        if model is not None:
            found.check(model)
        return found

    def check(self, model: HistoryModel) -> None:
        """Check that the index is of a model's present vectors, up to the rounding of its processor.

        Raises:
          ConfigError: The model has other items, or another vector of an item.
        """
        for begin, _, far in self._differences(model):
            if far.any():
                first = self._ids(np.flatnonzero(far)[:1] + begin)[0]
                raise ConfigError(f"{model.name}: the vector of item {first!r} has changed: {_FOLLOW}")

    def follow(self, model: HistoryModel) -> int:
        """Take over the present vectors of a model that has been trained on, or that a delta has updated.

        Compares all vectors, and puts those that have changed into the nearest lists, whose centres stay. If
        most vectors have changed, measure `recall`: a new index may find more. Other threads may search
        meanwhile. While it runs, it holds a second copy of the vectors and lists.

        Returns:
          The number of items whose vectors have changed.

        Raises:
          ConfigError: The model has other items, or vectors of another width or that aren't finite.

        Example:
          >>> index.follow(model)  # doctest: +SKIP
          1374
        """
        changed = [(np.flatnonzero(far) + begin, new[far]) for begin, new, far in self._differences(model)]
        numbers, new = map(np.concatenate, zip(*changed, strict=True))
        if len(bad := numbers[~np.isfinite(new).all(axis=1)]):
            raise ConfigError(f"{model.name}: the vector of item {self._ids(bad[:1])[0]!r} isn't finite")
        faiss, index, vectors = self._faiss, self._index, self._vectors
        if len(numbers):
            index, vectors = faiss.clone_index(index), np.array(vectors)
            vectors[numbers] = new
            index.remove_ids(numbers)
            nearest = faiss.IndexFlatL2(index.d)
            nearest.add(index.quantizer.reconstruct_n(0, index.nlist))
            _put(faiss, index, nearest, new, numbers)
        of = _fingerprint(vectors, self.catalogue)
        self._fill(faiss, index, vectors, self.catalogue, *_bias_and_scale(model), of)
        return len(numbers)

    def _differences(self, model: HistoryModel) -> Iterator[tuple[int, Floats, Bools]]:
        """Yield the number of each part's first item, the model's vectors, and which of them are others."""
        own = _items(model.catalogue)
        if np.ndim(own) != np.ndim(_items(self.catalogue)) or not np.array_equal(own, _items(self.catalogue)):
            raise ConfigError(f"{model.name}: its items are others than those of the index: {_AGAIN}")
        for begin in range(0, self.size, _ROWS):
            numbers = tf.range(begin, min(begin + _ROWS, self.size), dtype=tf.int64)
            vectors, kept = model.item_vectors(numbers).numpy(), self._vectors[begin : begin + _ROWS]
            if vectors.shape != kept.shape:
                had, has = kept.shape[1], vectors.shape[1]
                raise ConfigError(f"{model.name}: its vectors have {has} numbers, and not {had}: {_AGAIN}")
            near = np.linalg.norm(vectors - kept, axis=1) <= _CLOSE * np.linalg.norm(kept, axis=1)
            yield begin, vectors, ~near

    def _queries(self, queries: Any) -> Floats:
        found, width = np.ascontiguousarray(queries, np.float32), self._vectors.shape[1]
        if found.ndim != 2 or found.shape[1] != width:
            raise ConfigError(f"NearestItems: queries must be (n, {width}), got the shape {found.shape}")
        if not np.isfinite(found).all():
            raise ConfigError("NearestItems: queries must be finite, got NaN or infinity")
        return found

    def _ids(self, numbers: Ints) -> npt.NDArray[Any]:
        found = self.catalogue.ids(tf.constant(np.maximum(numbers, 0))).numpy()
        return np.where(numbers < 0, self.catalogue.nothing.numpy(), found)

    def _best(
        self,
        queries: Floats,
        k: int,
        leave_out: tf.RaggedTensor | None,
        allow: tf.Tensor | None,
        again: tf.RaggedTensor | None,
        bias: float,
    ) -> tuple[Ints, Floats]:
        if whole_number("NearestItems: k", k, least=1) > self.size:
            raise ConfigError(f"NearestItems: k must be at most {self.size}, the items, got {k}")
        count, mask = len(queries), None if allow is None else np.asarray(allow)
        numbers, scores = np.full((count, k), -1, np.int64), np.full((count, k), -np.inf, np.float32)
        remain = self.size if mask is None else int(mask.sum())
        left, more = QueryItems.of(leave_out, self.size, count), QueryItems.of(again, self.size, count)
        # Of rare items, as many are scored as of all items without a mask.
        probes = min(self.lists, -(-self._probes * self.size // max(remain, 1)))
        rows = np.arange(count if remain else 0)
        while len(rows):
            fetch = min(remain, k + k // 2 + _FURTHER + left.longest(rows) + more.longest(rows))
            for begin in range(0, len(rows), at_once := max(1, _NUMBERS // (fetch * queries.shape[1]))):
                some = rows[begin : begin + at_once]
                found = self._candidates(queries[some], fetch, probes, mask)
                found = np.concatenate([found, more.padded(some, mask)], axis=1)
                numbers[some], scores[some] = self._score(queries, some, found, k, left, more, bias)
            rows = rows[numbers[rows, -1] < 0] if probes < self.lists else rows[:0]
            probes = min(self.lists, 4 * probes)
        return numbers, scores

    def _candidates(self, queries: Floats, fetch: int, probes: int, mask: Bools | None) -> Ints:
        """Return numbers of items, (n, fetch), -1 where there are fewer."""
        settings = {"nprobe": probes}
        if mask is not None:
            settings["sel"] = self._faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
        how = self._faiss.SearchParametersIVF(**settings)
        return np.asarray(self._index.search(queries, fetch, params=how)[1])

    def _score(
        self,
        queries: Floats,
        rows: Ints,
        found: Ints,
        k: int,
        left: QueryItems,
        more: QueryItems,
        bias: float,
    ) -> tuple[Ints, Floats]:
        """Score candidates exactly; return the k best that aren't left out, and their scores."""
        found = np.sort(found, axis=1)  # of equal scores, the smaller number comes first
        scores = np.matmul(self._vectors[np.maximum(found, 0)], queries[rows, :, np.newaxis])[:, :, 0]
        scores[more.hold(rows, found)] += np.float32(bias)
        twice = np.zeros(found.shape, bool)
        twice[:, 1:] = found[:, 1:] == found[:, :-1]
        scores[twice | (found < 0) | left.hold(rows, found)] = -np.inf
        rest = [(0, 0), (0, max(0, k - found.shape[1]))]
        found, scores = np.pad(found, rest, constant_values=-1), np.pad(scores, rest, constant_values=-np.inf)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        best = np.take_along_axis(scores, order, axis=1)
        return np.where(np.isneginf(best), -1, np.take_along_axis(found, order, axis=1)), best


def _build(faiss: Any, vectors: Floats, lists: int, seed: int) -> Any:
    """Return an index of lists by distance, which a search chooses by the product with their centres."""
    size, dim = vectors.shape
    sample = vectors
    if size > lists * _PER_LIST:
        chosen = np.random.default_rng(seed).choice(size, lists * _PER_LIST, replace=False)
        sample = vectors[np.sort(chosen)]
    means = faiss.Clustering(dim, lists)
    means.niter, means.seed, means.min_points_per_centroid = _ROUNDS, seed + 1, 1
    means.max_points_per_centroid = _PER_LIST
    nearest = faiss.IndexFlatL2(dim)
    if lists > _FEW_LISTS:  # a search of this index takes a tenth of the time
        nearest = faiss.IndexIVFFlat(nearest, dim, int(lists**0.5))
        nearest.nprobe = _PROBES
    means.train(sample, nearest)
    centres = faiss.vector_to_array(means.centroids).reshape(lists, dim)
    by_distance, by_product = faiss.IndexFlatL2(dim), faiss.IndexFlatIP(dim)
    by_distance.add(centres)
    by_product.add(centres)
    index = faiss.IndexIVFScalarQuantizer(
        by_distance, dim, lists, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT, True
    )
    index.train(sample[:: max(1, len(sample) // _FOR_RANGES)])
    by_product.this.disown()  # it now belongs to the index
    index.quantizer, index.own_fields = by_product, True
    _put(faiss, index, nearest, vectors, np.arange(size))
    return index


def _put(faiss: Any, index: Any, nearest: Any, vectors: Floats, numbers: Ints) -> None:
    """Put vectors into the lists that ``nearest`` finds."""
    for begin in range(0, len(vectors), _ROWS):
        rows, own = (np.ascontiguousarray(each[begin : begin + _ROWS]) for each in (vectors, numbers))
        places = np.maximum(nearest.search(rows, 1)[1][:, 0], 0)
        index.add_core(len(rows), *map(faiss.swig_ptr, (rows, own, places)))


def _bias_and_scale(model: HistoryModel) -> tuple[float, float]:
    return float(getattr(model, "scaled_bias", 0.0)), 1 / getattr(model, "temperature", 1.0)


def _items(catalogue: Catalogue) -> Any:
    """Return the ids of a catalogue as it was given; their number if they are numbers from 0 on."""
    if not catalogue.has_ids:
        return catalogue.size
    return catalogue.ids(tf.range(catalogue.size, dtype=tf.int64)).numpy()


def _seal(folder: Path) -> str:
    """Return a hash of an index's files."""
    files = [folder / name for name in (_MANIFEST, _INDEX, _VECTORS, _ITEMS)]
    return sha256_of([path for path in files if path.exists()])


def _fingerprint(vectors: Floats, catalogue: Catalogue) -> str:
    """Return a hash of vectors and ids."""
    found = hashlib.sha256(f"{vectors.shape} {catalogue.dtype.name}".encode())
    found.update(np.ascontiguousarray(vectors).data)
    found.update(np.ascontiguousarray(catalogue.all_keys.numpy()).data)
    return found.hexdigest()
