"""Base class of models of the next item, whatever a token is: histories, a catalogue, metrics of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.layers.embedding.table_weights import Weights
from gmeta.layers.sequence.reading import Reading
from gmeta.metrics import NextItem
from gmeta.metrics.next_item import Retrieval
from gmeta.models.sequence.catalogue import Catalogue, top_items, top_of_ranking
from gmeta.ops import Jagged, jagged
from gmeta.training.model import Model

Ints = npt.NDArray[np.int64]

_ITEMS = "items_"  # before the names of what a file of Keras holds of the catalogue


class ReadHistories(NamedTuple):
    """Histories that a model has read.

    Attributes:
      items: Numbers of items, -1 if unknown.
      vector: (users, d), what a call of the model computes of each history.
      reading: What the backbone keeps of them; None: it isn't known.
    """

    items: Jagged
    vector: tf.Tensor
    reading: Reading | None = None


class HistoryModel(Model):
    """A model that predicts the next item of a history among those of a catalogue, with its own loss.

    Attributes:
      feature: The feature of items, which defines whether ids are hashed.
      catalogue: The items.
      max_length: The longest history that is read.
      item: The column of items.
      time: The column of times; None: no times are read.
      ranking: The metrics of evaluation by the last item of each history.
      retrieval: The metrics of evaluation by labels.
      mean: The mean of the loss.
    """

    refused_settings: ClassVar[Mapping[str, str]] = {
        **Model.refused_settings,
        "loss": "the loss is that of the model",
        "metrics": "hit rate, NDCG and MRR are measured in evaluate, at the ks= that the model was made with",
        "loss_weights": "there is one loss",
        "weighted_metrics": "histories have no weights",
    }
    feature: FeatureConfig
    catalogue: Catalogue
    max_length: int
    item: str
    time: str | None
    ranking: NextItem
    retrieval: Retrieval
    mean: tf.keras.metrics.Mean
    answers_popular: ClassVar[bool] = True
    """Whether a history without items is answered by the items that occurred most often."""
    leave_out_seen: bool = False
    """Whether `evaluate`, and validation in `fit`, leave out the items of the history by default."""
    _leaves_out_seen: bool = False  # what `test_step` was traced with

    @tf.__internal__.tracking.no_automatic_dependency_tracking  # checkpoints of earlier versions lack it
    def _measure_labels(self, ks: Sequence[int]) -> None:
        self.retrieval = Retrieval(ks)

    def evaluate(self, *args: Any, leave_out_seen: bool | None = None, **kwargs: Any) -> Any:
        """Measure how high the items that were taken rank in the whole catalogue.

        Args:
          *args: As for `tf.keras.Model.evaluate`. A batch of columns asks for the last item of each history,
            given those before it, and gives the metrics of `gmeta.metrics.NextItem`. Labels, ``(x, y)`` with
            y ragged, (users, None) items, ask for all items of y, given the history x, and give HR, recall
            and NDCG of users (`gmeta.metrics.next_item`).
          leave_out_seen: Whether to leave out the items of the history. An item that is asked for, and that
            the history has, is ranked nevertheless. None: as the attribute ``leave_out_seen`` says.
          **kwargs: As there.

        Example:
          >>> cut = functools.partial(gmeta.io.sequences, "data/train", history=["item"], targets=["item"])
          >>> test = cut(exposed="test").map(lambda batch: (batch["history"], batch["targets"]["item"]))
          >>> model.evaluate(test, leave_out_seen=True, return_dict=True)  # doctest: +SKIP
          {'hr@10': 0.21, 'recall@10': 0.21, 'ndcg@10': 0.11, ...}
        """
        wanted = bool(self.leave_out_seen if leave_out_seen is None else leave_out_seen)
        if wanted != self._leaves_out_seen:
            self._leaves_out_seen, self.test_function = wanted, None  # it has to be traced again
        return super().evaluate(*args, **kwargs)

    def _asked(self, data: Any) -> tuple[Mapping[str, Any], Jagged | None]:
        """Return the columns of a batch, and its labels if it has any."""
        x, y, weights = tf.keras.utils.unpack_x_y_sample_weight(data)
        if weights is not None:
            raise ConfigError(f"{self.name}: sample weights have no use: leave them out")
        return x, None if y is None else self._column(self.item, y, "labels")

    def gather_ranks(self) -> None:
        """Add up the ranks' counts of items; all must call this together, between two steps."""
        self.catalogue.gather_ranks()

    def merge_moving_averages(self) -> None:
        """Give all ranks the same moving averages, and the same counts of items."""
        super().merge_moving_averages()
        if collectives.world().size > 1:
            self.gather_ranks()

    def get_weights(self) -> Weights:
        """Return the weights as `gmeta.models.Model.get_weights` does, together with the counts of items."""
        found = super().get_weights()
        return Weights(
            found, getattr(found, "tables", ()), self.catalogue.noted(), getattr(found, "plans", ())
        )

    def set_weights(self, weights: Any) -> None:
        """Restore weights as `gmeta.models.Model.set_weights` does, and the counts of items.

        Args:
          weights: As there. The other model may have more items or fewer.

        Raises:
          ConfigError: As there; or the weights are those of a model with other semantic ids.
        """
        items = getattr(weights, "items", None)
        if items is not None:
            self.catalogue.compare(items)
        super().set_weights(weights)
        if items is not None:
            self.catalogue.load(items)

    def save_own_variables(self, store: Any) -> None:
        """Write the weights that are in no layer, and the counts of items, for a file of Keras."""
        super().save_own_variables(store)
        for name, values in self.catalogue.noted().items():
            store[f"{_ITEMS}{name}"] = values

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` wrote; earlier files have no counts."""
        names = list(store.keys())
        super().load_own_variables({name: store[name] for name in names if not name.startswith(_ITEMS)})
        noted = {
            name.removeprefix(_ITEMS): np.asarray(store[name]) for name in names if name.startswith(_ITEMS)
        }
        if noted:
            self.catalogue.load(noted)

    # What states of users need (`gmeta.models.sequence.user_states.HistoryStates`), if there is a backbone.

    @property
    def tokens_per_item(self) -> int:
        """How many tokens an item has."""
        return 1

    @property
    def first_tokens(self) -> int:
        """How many tokens come before those of the first item."""
        return 0

    @property
    def moves_tokens(self) -> bool:
        """Whether the tokens of a history change when items follow it."""
        return False

    def tokens_of(
        self, keys: Jagged, times: Jagged | None, before: tf.Tensor | None = None
    ) -> tuple[Jagged, Jagged | None]:
        """Make the tokens that the backbone reads, without dropout.

        Args:
          keys: int64 keys of items (`Catalogue.keys`), also of unknown ones.
          times: The items' times; None without times.
          before: (users,) int64, how many items were read before these. None: 0.

        Returns:
          Tokens, and their times.
        """
        raise NotImplementedError

    def leave(self, values: tf.Tensor) -> tf.Tensor:
        """Make of the backbone's output what answers are computed from, (n, d) -> (n, d)."""
        raise NotImplementedError

    def reading_weights(self) -> list[tf.Variable]:
        """Return the dense weights that read a history."""
        raise NotImplementedError

    def reading_settings(self) -> list[Any]:
        """Return the settings, besides the backbone's, that the meaning of what is kept depends on."""
        raise NotImplementedError

    def _blocked(self, histories: Jagged, leave_out: Any) -> tf.RaggedTensor | None:
        """Return the numbers of the items to leave out for each user besides those of histories."""
        users = tf.size(histories.offsets) - 1
        return None if leave_out is None else self.catalogue.find_each(leave_out, "leave_out", users)

    def _by_popularity(
        self,
        histories: Jagged,
        numbers: tf.Tensor,
        scores: tf.Tensor,
        popular: Any,
        leave_out: tf.RaggedTensor | None,
        allow: Any,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Answer histories without an item of the catalogue by the most popular items.

        Args:
          histories: Numbers of items, -1 if unknown.
          numbers: (users, k), the answers to all histories.
          scores: (users, k).
          popular: The result of `Catalogue.most_popular`: of k items, or with ``leave_out`` of all. None: it
            is computed.
          leave_out: Numbers of the items to leave out for each user; histories have none of these to add,
            as they are without an item of the catalogue.
          allow: bool (V,), which items are allowed. None: all.

        Returns:
          (users, k) ids, -1 or the empty text for none; and (users, k) scores.
        """
        k = numbers.shape[1]
        if popular is None:
            popular = self.catalogue.most_popular(k if leave_out is None else self.items, allow)
        if leave_out is not None:
            if popular[0].shape[0] not in (None, self.items):
                raise ConfigError(
                    f"{self.name}: popular= has {popular[0].shape[0]} items; with leave_out= it must rank "
                    f"all {self.items}: catalogue.most_popular({self.items}, allow)"
                )
            popular = top_of_ranking(popular, k, leave_out)
        users = tf.shape(numbers)[0]
        known = tf.cast(histories.values >= 0, tf.int32)
        some = tf.math.unsorted_segment_sum(known, jagged.row_ids(histories), users)[:, tf.newaxis] > 0
        numbers = tf.where(some, numbers, popular[0])
        return self._ids(numbers), tf.where(some, scores, popular[1])

    def _best(
        self, queries: tf.Tensor, k: int, *, vectors: Any = None, nearest: Any = None, **filters: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the numbers of the best items, exactly or by an index; see `top_items` for the filters."""
        if whole_number(f"{self.name}: k", k, least=1) > self.items:
            raise ConfigError(f"{self.name}: k must be at most {self.items}, the catalogue's size, got {k}")
        if nearest is None:
            vectors = self.item_vectors() if vectors is None else vectors
            return top_items(queries, vectors, k, **filters)
        if vectors is not None or not tf.executing_eagerly():
            other = "vectors=" if vectors is not None else "a graph"
            raise ConfigError(f"{self.name}: nearest= searches an index outside of graphs: leave out {other}")
        if nearest.size != self.items:
            raise ConfigError(
                f"{self.name}: the index has {nearest.size} items, not {self.items}: build it anew"
            )
        return nearest.top_items(queries, k, **filters)

    def _ids(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return the ids of items; -1 or the empty text for the number -1."""
        found = self.catalogue.ids(tf.maximum(numbers, 0))
        return tf.where(numbers < 0, self.catalogue.nothing, found)

    @property
    def items(self) -> int:
        """V, the size of the catalogue."""
        return self.catalogue.size

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The training loss and the ranking metrics of evaluation, reset at each epoch."""
        return [self.mean, self.ranking, self.retrieval]

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the metrics of what was asked for: labels, or else the last items of histories."""
        found = super().get_metrics_result()
        if getattr(self, "retrieval", None) is not None and not float(self.retrieval.users):
            found = {name: value for name, value in found.items() if name not in self.retrieval.result()}
            found |= self.ranking.result()
        return found

    def unknown_history(self, x: Mapping[str, Any]) -> tf.Tensor:
        """Count the items of each history that aren't in the catalogue, (users,) int64.

        Args:
          x: A batch. Of a history that is longer than ``max_length``, only the items that are read count.
        """
        ids = self._sequences(x, self.max_length)[0]
        unknown = ids._replace(values=tf.cast(self.catalogue.find(ids.values) < 0, tf.int64))
        return jagged.sums(unknown)

    def _numbers(self, x: Mapping[str, Any], longest: int | None) -> Jagged:
        """Return the numbers of histories' last items; items that the catalogue lacks are left out."""
        ids = self._sequences(x, longest)[0]
        found = self.catalogue.find(ids.values)
        return jagged.mask(ids._replace(values=found), found >= 0)

    def _sequences(self, x: Mapping[str, Any], longest: int | None) -> tuple[Jagged, Jagged | None]:
        """Return ids and times, cut to the last ``longest`` of each user; None: all."""
        columns = [self.item] if self.time is None else [self.item, self.time]
        missing = [name for name in columns if name not in x]
        if missing:
            raise ConfigError(f"{self.name}: the batch lacks {', '.join(missing)}; it has {', '.join(x)}")
        found = []
        for name in columns:
            column = self._column(name, x[name])
            if column.values.dtype.is_integer:
                column = column._replace(values=tf.cast(column.values, tf.int64))
            if longest is not None:
                # Offsets are on the host (`gmeta.ops.jagged`), and so are ids, of which keys are made there.
                with tf.device("CPU:0"):
                    begin = tf.maximum(jagged.lengths(column) - longest, 0)
                with tf.device("CPU:0" if name == self.item else None):
                    column = jagged.slice_(column, begin)
            found.append(column)
        return found[0], found[1] if self.time is not None else None

    def _column(self, name: str, column: Any, what: str | None = None) -> Jagged:
        sequences, what = jagged.as_jagged(column), what or name
        if sequences is None:
            raise ConfigError(
                f"{self.name}: {what} must be ragged, one row per user, or a gmeta.ops.Jagged, got "
                f"{type(column).__name__}; tf.ragged.boolean_mask(x, x != -1) makes it of a matrix padded "
                "with -1"
            )
        dtype = sequences.values.dtype
        if not dtype.is_integer and (name != self.item or dtype != tf.string):
            wanted = "integers or texts" if name == self.item else "integers, such as seconds"
            raise ConfigError(f"{self.name}: {what} must be {wanted}, got {dtype.name}")
        return sequences


def check_times(name: str, backbone: Any, time: str | None) -> None:
    """Check that there is a column of times if the backbone needs one.

    Raises:
      ConfigError: The backbone needs times, and no column is named.
    """
    if time is None and backbone.needs_times:
        raise ConfigError(
            f"{name}: {backbone.name} needs times: name their column by time=, or make it with "
            "bias_by_time=False and a mask that isn't by_time"
        )


# Histories without their first or their last item: the targets, and the inputs that predict them.


def but_first(sequences: Jagged) -> Jagged:
    """Leave out the first token of each sequence that has one."""
    with tf.device("CPU:0"):
        begin = tf.minimum(jagged.lengths(sequences), 1)
    return jagged.slice_(sequences, begin)


def but_last(sequences: Jagged) -> Jagged:
    """Leave out the last token of each sequence that has one."""
    with tf.device("CPU:0"):
        heads = tf.maximum(jagged.lengths(sequences) - 1, 0)
    return jagged.split(sequences, heads)[0]


class QueryItems:
    """The numbers of the items of queries' histories or filters, to compare with candidates in NumPy."""

    def __init__(self, size: int, splits: Ints, values: Ints) -> None:
        self._size, self._splits, self._values = size, splits, values
        owners = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
        self._keys = np.unique((owners * size + values)[values >= 0])

    @classmethod
    def of(cls, numbers: tf.RaggedTensor | None, size: int, count: int) -> QueryItems:
        """Return the numbers of ``count`` queries, -1 if unknown, of a catalogue of ``size`` items."""
        if numbers is None:
            return cls(size, np.zeros(count + 1, np.int64), np.zeros(0, np.int64))
        return cls(size, numbers.row_splits.numpy().astype(np.int64), numbers.values.numpy().astype(np.int64))

    def longest(self, rows: Ints) -> int:
        """Return how many numbers one of these queries has at most."""
        return int((self._splits[rows + 1] - self._splits[rows]).max(initial=0))

    def hold(self, rows: Ints, numbers: Ints) -> npt.NDArray[np.bool_]:
        """Return which numbers (n, m) these queries have."""
        if not len(self._keys):
            return np.zeros(numbers.shape, bool)
        keys = rows[:, np.newaxis] * self._size + numbers
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return (self._keys[places] == keys) & (numbers >= 0)

    def padded(self, rows: Ints, mask: npt.NDArray[np.bool_] | None) -> Ints:
        """Return the numbers of these queries that the mask allows, (n, width), -1 elsewhere."""
        found = np.full((len(rows), self.longest(rows)), -1, np.int64)
        for place, row in enumerate(rows if found.shape[1] else []):
            values = self._values[self._splits[row] : self._splits[row + 1]]
            found[place, : len(values)] = values if mask is None else np.where(mask[values], values, -1)
        return found


def item_feature(name: str, collection: EmbeddingCollection, item: str) -> FeatureConfig:
    """Return the feature of items, the only one of a collection of a model of next items.

    Raises:
      ConfigError: The collection lacks it, has others, or pools it.
    """
    features = {feature.name: feature for feature in collection.features}
    if item not in features:
        raise ConfigError(f"{name}: item={item!r} isn't a feature of the collection: {', '.join(features)}")
    others = [each for each in features if each != item]
    if others:
        raise ConfigError(
            f"{name}: the collection embeds {', '.join(others)} besides {item!r}, which nothing would read: "
            "leave them out"
        )
    if features[item].combiner is not None:
        raise ConfigError(f"{name}: feature {item!r} has a combiner, and every item is a token: leave it out")
    return features[item]
