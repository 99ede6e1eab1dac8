"""The user's settings for a categorical feature, and the conversion of settings to Keras' configs.

Settings are frozen dataclasses. `to_config` makes JSON-compatible configs of them, and `from_config` makes
settings of those.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from gmeta import initializers, optimizers, policies
from gmeta.core.errors import ConfigError
from gmeta.core.graph import refuse_unless
from gmeta.core.keras import refuse_keras_3
from gmeta.layers.embedding.table_config import TableConfig
from gmeta.ops import attention_inputs
from gmeta.ops.device import VARIABLE, asked_place, integers_of
from gmeta.ops.id_hash import hash_text
from gmeta.policies import row_lifetimes, storage

Combiner = Literal["sum", "mean", "sqrtn"]
Join = Literal["concat", "sum"]


@dataclass(frozen=True)
class FeatureConfig:
    """A categorical feature, and how its ids become vectors.

    Attributes:
      name: The feature's name in the input.
      table: The embedding table that it reads: a `TableConfig`, or the name of a table of width ``dim``.
        Features that name the same table share its rows. None: the feature gets its own table, with the
        feature's name and width ``dim``. A tuple: the feature's ids are read once and looked up in each of
        these tables, and ``join`` makes one vector of the tables' vectors.
      combiner: How the rows of a sample's ids become one vector: their ``"sum"``, their ``"mean"``, or their
        sum divided by the square root of their number (``"sqrtn"``). A sample without ids has the zero
        vector. None: a vector for each id. See `gmeta.layers.EmbeddingCollection` for the shapes. A feature
        of several tables pools the rows of each table, then joins.
      max_length: Use only the last ``max_length`` ids of a sample (the latest, if ids are in order of time).
        None: use all.
      hash: Accept strings and any 64-bit integers as ids, int64 or uint64. `gmeta.ops.hash_ids` hashes them
        to 56 bits. A text reads the same row as the number that ``gmeta prepare`` stores for it, in exported
        models too. Whole numbers below 2^56 read the same row with and without ``hash``.
      dim: Width of the table; give it unless the table is a `TableConfig`. Of several tables: a tuple with
        the width of each, or one number for all; the attribute is the tuple.
      join: How the vectors of several tables become one: ``"concat"`` puts them side by side in the order of
        the tables, (samples, sum of dims); ``"sum"`` adds vectors of one width, (samples, dim). A feature may
        have a ``combiner`` besides, which pools a sample's ids. None: ``"concat"`` for several tables.

    Raises:
      ConfigError: A table has neither a `TableConfig` nor a ``dim``, or their widths differ; ``max_length``
        is below 1; the combiner is unknown; ``hash`` isn't True or False; or ``join`` is given without a
        tuple of tables. Or the tuple is empty or names a table twice; there are more or fewer widths than
        tables; or ``join="sum"`` is to add vectors of several widths.

    Example:
      >>> genres = FeatureConfig("genre", dim=32, combiner="mean")
      >>> genres.table.name
      'genre'

      Two features that share a table:

      >>> items = TableConfig("items", dim=32)
      >>> features = [FeatureConfig("clicked", items, combiner="sum"), FeatureConfig("shown", items)]
      >>> features[1].dim
      32

      A feature that reads two tables. Another feature may share one of them:

      >>> item = FeatureConfig("item", table=("item", "item_by_city"), dim=(64, 16))
      >>> item.join, item.width
      ('concat', 80)
    """

    name: str
    table: TableConfig | str | Sequence[TableConfig | str] = field(default=None)  # type: ignore[assignment]
    combiner: Combiner | None = None
    max_length: int | None = None
    hash: bool = False
    dim: int | Sequence[int] = field(default=0, kw_only=True)
    join: Join | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        where = f"feature {self.name!r}"
        if isinstance(self.table, list | tuple):
            self._take_several(where, tuple(self.table))
        else:
            made = _table(where, self.name if self.table is None else self.table, self.dim)
            object.__setattr__(self, "table", made)
            object.__setattr__(self, "dim", made.dim)
            if self.join is not None:
                raise ConfigError(
                    f"{where}: join={self.join!r} is for several tables, and the feature reads one: leave it "
                    "out, or give a tuple of tables"
                )
        if not isinstance(self.hash, bool):
            raise ConfigError(f"{where}: hash must be True or False, got {self.hash!r}")
        if self.combiner not in (None, "sum", "mean", "sqrtn"):
            raise ConfigError(
                f"{where}: combiner must be None, 'sum', 'mean' or 'sqrtn', got {self.combiner!r}; "
                "join='concat' or join='sum' puts vectors of several tables together"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"{where}: max_length must be at least 1, or None, got {self.max_length}")

    def _take_several(self, where: str, given: tuple[TableConfig | str, ...]) -> None:
        if not given:
            raise ConfigError(f"{where}: table=() has no tables: name at least one, or leave it out")
        dims = tuple(self.dim) if isinstance(self.dim, list | tuple) else (self.dim,) * len(given)
        if len(dims) != len(given):
            raise ConfigError(
                f"{where} reads {len(given)} tables, but dim={self.dim!r} has {len(dims)} widths: give one "
                "for each table, or one number for all"
            )
        tables = tuple(_table(where, each, dim) for each, dim in zip(given, dims, strict=True))
        names = [table.name for table in tables]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{where} names the table {', '.join(twice)} twice: name each table once")
        dims = tuple(table.dim for table in tables)
        if self.join not in (None, "concat", "sum"):
            raise ConfigError(f"{where}: join must be 'concat' or 'sum', got {self.join!r}")
        if self.join == "sum" and len(set(dims)) > 1:
            raise ConfigError(
                f"{where}: join='sum' adds vectors of one width, but the tables {', '.join(names)} are "
                f"{', '.join(map(str, dims))} wide: make them alike, or choose join='concat'"
            )
        object.__setattr__(self, "table", tables)
        object.__setattr__(self, "dim", dims)
        object.__setattr__(self, "join", self.join or "concat")

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        """The tables that the feature reads."""
        return self.table if isinstance(self.table, tuple) else (self.table,)

    @property
    def width(self) -> int:
        """Width of the feature's vectors: the sum of the tables' widths, or of one if they are added."""
        dims = [table.dim for table in self.tables]
        return dims[0] if self.join == "sum" else sum(dims)

    @property
    def parts(self) -> tuple[FeatureConfig, ...]:
        """The feature as features of one table each, named ``feature/table``; without a tuple, itself."""
        if not isinstance(self.table, tuple):
            return (self,)
        return tuple(
            FeatureConfig(f"{self.name}/{table.name}", table, self.combiner, self.max_length, self.hash)
            for table in self.tables
        )


def _table(where: str, given: object, dim: object) -> TableConfig:
    """Return a table as it is given, or of its name and width."""
    if isinstance(given, str):
        if dim == 0:
            raise ConfigError(
                f"{where}: nothing gives the width of the table {given!r}: give dim=16, or "
                f"table=TableConfig({given!r}, ...)"
            )
        return TableConfig(given, dim)  # type: ignore[arg-type]  # it checks the width
    if not isinstance(given, TableConfig):
        raise ConfigError(
            f"{where}: table must be a gmeta.layers.TableConfig, a name, or a tuple of these, got {given!r}; "
            "for a table of the feature's own give dim=16 instead"
        )
    if dim not in (0, given.dim):
        raise ConfigError(
            f"{where}: dim={dim}, but its table {given.name!r} is {given.dim} wide: leave dim out"
        )
    return given


# Converts a feature's ids, as users pass them, to one of two forms: a Tensor or a RaggedTensor.

Ids: TypeAlias = "tf.Tensor | tf.RaggedTensor"
"""A feature's ids: a Tensor of any shape, or ragged."""

PADDING = -1
"""The value that stands for "no id" in a dense matrix of ids to pool."""

TEXT_PADDING = b""
"""The value that stands for "no id" if ids are text."""


def feature_ids(inputs: Mapping[str, Any], feature: FeatureConfig) -> Ids:
    """Return one feature's ids, in a shape that fits its combiner, cut to its ``max_length``.

    If the feature has a combiner, a dense matrix of ids becomes ragged ids without the padding. uint64
    becomes int64 of the same bits.

    Args:
      inputs: Feature name -> Tensor, RaggedTensor, SparseTensor (its columns give the order of a sample's
        ids), or anything that converts to a Tensor.
      feature: The feature.

    Raises:
      ConfigError: The feature is missing, or the shape or dtype of its ids doesn't fit it.
      KerasError: The ids are a tensor of Keras 3's ``Input``.
    """
    if feature.name not in inputs:
        raise ConfigError(f"feature {feature.name!r} is missing from the input; it has {', '.join(inputs)}")
    ids = inputs[feature.name]
    refuse_keras_3(f"feature {feature.name!r}", type(ids))
    if isinstance(ids, tf.SparseTensor):
        ids = _ragged_of_sparse(ids, feature)
    if isinstance(ids, tf.RaggedTensor):
        ids = ids.with_flat_values(integers_of(ids.flat_values))
    else:
        ids = integers_of(ids)
    _check_shape(ids, feature)
    _check_dtype(ids, feature)
    if isinstance(ids, tf.Tensor) and ids.shape.rank > 1:
        ids = _without_padding(ids, feature)
    return ids if feature.max_length is None else ids[:, -feature.max_length :]


def numbers_of_texts(ids: Mapping[str, Ids]) -> dict[str, Ids]:
    """Replace each text by its number, `gmeta.ops.hash_text`. One op hashes all texts.

    Args:
      ids: Feature -> its ids.
    """
    texts = {name: flat_ids(each) for name, each in ids.items() if each.dtype == tf.string}
    if not texts:
        return dict(ids)
    sizes = [tf.size(each) for each in texts.values()]
    numbers = tf.split(hash_text(tf.concat(list(texts.values()), axis=0)), sizes, num=len(sizes))
    return {**ids, **{name: like_ids(ids[name], part) for name, part in zip(texts, numbers, strict=True)}}


def flat_ids(ids: Ids) -> tf.Tensor:
    """Return all ids as a vector."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.flat_values
    return ids if ids.shape.rank == 1 else tf.reshape(ids, [-1])


def like_ids(ids: Ids, flat: tf.Tensor) -> Ids:
    """Give a vector with one value per `flat_ids` entry the shape of ``ids``."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(flat)
    return flat if ids.shape.rank == 1 else tf.reshape(flat, tf.shape(ids))


def _ragged_of_sparse(ids: tf.SparseTensor, feature: FeatureConfig) -> tf.RaggedTensor:
    if ids.shape.rank != 2:
        raise ConfigError(
            f"feature {feature.name!r} takes a SparseTensor of shape (samples, length), got {ids.shape}"
        )
    return tf.RaggedTensor.from_value_rowids(ids.values, ids.indices[:, 0], nrows=ids.dense_shape[0])


def _without_padding(ids: tf.Tensor, feature: FeatureConfig) -> Ids:
    padding = TEXT_PADDING if ids.dtype == tf.string else PADDING
    present = tf.not_equal(ids, tf.constant(padding, ids.dtype)) if not ids.dtype.is_unsigned else None
    if feature.combiner is not None:
        present = tf.ones_like(ids, tf.bool) if present is None else present
        lengths = tf.math.count_nonzero(present, axis=1)
        return tf.RaggedTensor.from_row_lengths(tf.boolean_mask(ids, present), lengths, validate=False)
    if not feature.hash or present is None:  # without hash, the lookup itself refuses negative ids
        return ids
    return refuse_unless(
        ids,
        present,
        f"feature {feature.name!r}: {padding!r} stands for no id where ids are pooled, and this feature has "
        "no combiner: give ragged ids, or the feature a combiner",
    )


def _check_dtype(ids: Ids, feature: FeatureConfig) -> None:
    if ids.dtype == tf.string and not feature.hash:
        raise ConfigError(
            f"feature {feature.name!r} got strings: FeatureConfig({feature.name!r}, ..., hash=True) takes"
            " them"
        )
    if ids.dtype != tf.string and not ids.dtype.is_integer:
        raise ConfigError(
            f"feature {feature.name!r}: ids must be integers (int64){' or strings' * feature.hash}, got "
            f"{ids.dtype.name}: cast them, or give such numbers to the network beside the embeddings"
        )


def _check_shape(ids: Ids, feature: FeatureConfig) -> None:
    ragged = isinstance(ids, tf.RaggedTensor)
    rank = ids.shape.rank
    if rank is None or rank == 0:
        wanted = "ids of at least one dimension, of known rank"
    elif ragged and ids.flat_values.shape.rank != 1:
        wanted = "ragged ids without inner dimensions of one size"
    elif feature.combiner is not None and rank != 2:
        wanted = "a RaggedTensor, a SparseTensor or a Tensor, of shape (samples, length)"
    elif feature.max_length is not None and rank < 2:
        wanted = f"ids of shape (samples, length), of which it keeps the last {feature.max_length}"
    else:
        return
    joins = feature.join is not None and feature.combiner is not None
    raise ConfigError(
        f"feature {feature.name!r} has combiner={feature.combiner!r} and takes {wanted}; "
        f"got a {'RaggedTensor' if ragged else 'Tensor'} of shape {ids.shape}"
        + ("; a combiner pools a sample's ids, and join puts the tables' vectors together" if joins else "")
    )


def is_single(feature: FeatureConfig, positions: Ids) -> bool:
    """Return whether each sample has exactly one id."""
    return feature.combiner is None and isinstance(positions, tf.Tensor) and positions.shape.rank == 1


_KIND = "kind"
_SCHEDULE = "keras_schedule"


def to_config(value: Any) -> Any:
    """Convert a setting to a dict of its class's name and fields; numbers, strings and None stay as they are.

    Raises:
      ConfigError: The setting holds something that JSON can't, such as a function.
    """
    if is_dataclass(value) and not isinstance(value, type):
        written = {f.name: to_config(getattr(value, f.name)) for f in fields(value)}
        return {_KIND: type(value).__name__, **written}
    if isinstance(value, tf.keras.optimizers.schedules.LearningRateSchedule):
        return {_SCHEDULE: tf.keras.optimizers.schedules.serialize(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [to_config(each) for each in value]
    raise ConfigError(
        f"{value!r} can't be written into a layer's config; for a learning rate use a number, None, or a "
        "tf.keras.optimizers.schedules.LearningRateSchedule"
    )


def from_config(config: Any) -> Any:
    """Recreate the setting from what `to_config` returned.

    Raises:
      ConfigError: The config names a class that isn't one of gmeta's settings.
    """
    if isinstance(config, list):
        return [from_config(each) for each in config]
    if not isinstance(config, dict):
        return config
    if _SCHEDULE in config:
        return tf.keras.optimizers.schedules.deserialize(config[_SCHEDULE])
    kind = config.get(_KIND)
    given = {name: from_config(value) for name, value in config.items() if name != _KIND}
    if kind == FeatureConfig.__name__ and "pooling" in given:
        return _feature_of_old(given)
    modules = (optimizers, row_lifetimes, storage, initializers, attention_inputs)
    found = [getattr(module, str(kind)) for module in modules if hasattr(module, str(kind))]
    own = {each.__name__: each for each in (FeatureConfig, TableConfig)}
    made = own[kind] if kind in own else found[0] if found else None
    if not (isinstance(made, type) and is_dataclass(made)):
        raise ConfigError(f"a layer's config names {kind!r}, which isn't a setting that gmeta knows")
    return made(**given)


def tiers_of(config: Mapping[str, Any]) -> policies.Tiers | None:
    """Read the tiers of a collection's config; earlier versions wrote ``device_rows`` in their place."""
    tiers: policies.Tiers | None = from_config(config.get("tiers"))
    rows = config.get("device_rows")
    if tiers is None and rows is not None and config.get("device") != "cpu":
        return policies.Tiers(hbm_rows=rows)
    return tiers


def tiers_here(config: Mapping[str, Any]) -> policies.Tiers | None:
    """Return the tiers that a collection's tables can have in this process.

    Those of a GPU can't be where the config's device is host memory here, which a warning says.
    """
    tiers, name = tiers_of(config), config.get("name", "embeddings")
    if tiers is None or tiers.hbm_rows is None:
        return tiers
    if asked_place(config.get("device", "auto"), f"{name!r}") == "gpu":
        return tiers
    here = tiers.without_gpu()
    warnings.warn(
        f"{name!r} was saved with {tiers}, for tables on a GPU. Its tables are in host memory now, with "
        f"{'all rows' if here is None else here}; {VARIABLE}=gpu puts them on a GPU",
        stacklevel=3,
    )
    return here


def _feature_of_old(given: dict[str, Any]) -> FeatureConfig:
    """Read a feature's config from before tables had configs of their own."""
    of_table = ("dim", "initializer", "admission", "eviction", "precision")
    name = given["table"] or given["name"]
    table = TableConfig(name, **{key: given[key] for key in of_table if key in given})
    kept = {key: given[key] for key in ("max_length", "hash") if key in given}
    return FeatureConfig(given["name"], table, given["pooling"], **kept)
