"""Users' adapted weights in a store, adapted again as events come.

`AdaptedUsers` is the writer. It keeps each user's last labelled samples and adapts those whose samples have
changed, many in one request of the signature ``adapt_many``. Readers need no gmeta: a user's weights are one
value, which a client sends to ``predict_with`` unchanged.

Redis has three kinds of keys; the braces put those of a user into one slot of a cluster::

    <prefix>:{<user>}:weights    the answer of ``adapt_many`` for the user
    <prefix>:{<user>}:samples    JSON: column -> the values of the user's samples, oldest first, ``label`` too
    <prefix>:changed             a set of the users whose samples are newer than their weights

A user is in ``changed`` before the new samples are written, and leaves it after the new weights are. So a
process that ends in between leaves users that are adapted once more, and none that isn't.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError, DataError, NotFiniteError, whole_number
from gmeta.core.json_values import items, mapping, parse_json
from gmeta.export.delta_strings import WEIGHTS
from gmeta.export.meta_models import LABEL, PER_USER
from gmeta.export.row_stores import RedisConnection
from gmeta.export.server_files import reason_of
from gmeta.layers.embedding.feature_config import PADDING, TEXT_PADDING

_SAMPLES, _WEIGHTS = "samples", "weights"
_AT_ONCE = 1000


class UserStore(ABC):
    """Values of users, and a set of those that have changed."""

    @abstractmethod
    def read(self, kind: str, users: Sequence[str]) -> list[bytes | None]:
        """Return a value of each user; None: there is none."""

    @abstractmethod
    def write(self, kind: str, values: Mapping[str, bytes]) -> None:
        """Write a value of each user."""

    @abstractmethod
    def mark(self, users: Iterable[str], changed: bool) -> None:
        """Add users to those that have changed, or remove them."""

    @abstractmethod
    def changed(self, most: int) -> list[str]:
        """Return at most so many of the users that have changed."""

    @abstractmethod
    def users(self) -> Iterator[str]:
        """Return all users that have samples; one may come twice."""

    @abstractmethod
    def drop(self, users: Sequence[str]) -> None:
        """Remove all values of users."""


class MemoryUsers(UserStore):
    """A store in the memory of this process."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, bytes]] = {_SAMPLES: {}, _WEIGHTS: {}}
        self._changed: dict[str, None] = {}  # in the order of changes

    def read(self, kind: str, users: Sequence[str]) -> list[bytes | None]:
        """See `UserStore.read`."""
        return [self._values[kind].get(user) for user in users]

    def write(self, kind: str, values: Mapping[str, bytes]) -> None:
        """See `UserStore.write`."""
        self._values[kind].update(values)

    def mark(self, users: Iterable[str], changed: bool) -> None:
        """See `UserStore.mark`."""
        for user in users:
            if changed:
                self._changed[user] = None
            else:
                self._changed.pop(user, None)

    def changed(self, most: int) -> list[str]:
        """See `UserStore.changed`."""
        return [*itertools.islice(self._changed, most)]

    def users(self) -> Iterator[str]:
        """See `UserStore.users`."""
        return iter([*self._values[_SAMPLES]])

    def drop(self, users: Sequence[str]) -> None:
        """See `UserStore.drop`."""
        self.mark(users, changed=False)
        for user in users:
            for values in self._values.values():
                values.pop(user, None)


class RedisUsers(UserStore):
    """A store in Redis, or in Redis Cluster.

    Args:
      url: ``redis://[user:password@]host[:port][,host[:port]...]/prefix``, or ``rediss://`` for TLS, as for
        `gmeta.export.row_stores.RedisRows`.

    Raises:
      ConfigError: ``redis`` isn't installed, or the address isn't one.
      StoreUnavailableError: Redis doesn't answer; of each method.
      StoreError: Redis refuses; of each method.
    """

    def __init__(self, url: str) -> None:
        self._redis = RedisConnection(url)

    def _key(self, user: str, kind: str) -> str:
        return f"{self._redis.prefix}:{{{user}}}:{kind}"

    @property
    def _marks(self) -> str:
        return f"{self._redis.prefix}:changed"

    def read(self, kind: str, users: Sequence[str]) -> list[bytes | None]:
        """See `UserStore.read`."""
        if not users:
            return []
        with self._redis.explain():
            client = self._redis.client
            found = getattr(client, "mget_nonatomic", client.mget)([self._key(user, kind) for user in users])
            return [*found]

    def write(self, kind: str, values: Mapping[str, bytes]) -> None:
        """See `UserStore.write`."""
        if values:
            with self._redis.explain():
                client = self._redis.client
                keys = {self._key(user, kind): value for user, value in values.items()}
                getattr(client, "mset_nonatomic", client.mset)(keys)

    def mark(self, users: Iterable[str], changed: bool) -> None:
        """See `UserStore.mark`."""
        of = [*users]
        if of:
            with self._redis.explain():
                client = self._redis.client
                (client.sadd if changed else client.srem)(self._marks, *of)

    def changed(self, most: int) -> list[str]:
        """See `UserStore.changed`."""
        with self._redis.explain():
            return [user.decode() for user in self._redis.client.srandmember(self._marks, most)]

    def users(self) -> Iterator[str]:
        """See `UserStore.users`."""
        begin, end = f"{self._redis.prefix}:{{", f"}}:{_SAMPLES}"
        pattern = f"{begin}*{end}"
        with self._redis.explain():
            for key in self._redis.client.scan_iter(match=pattern, count=_AT_ONCE):
                yield key.decode()[len(begin) : -len(end)]

    def drop(self, users: Sequence[str]) -> None:
        """See `UserStore.drop`."""
        self.mark(users, changed=False)
        with self._redis.explain():
            for user in users:
                self._redis.client.delete(self._key(user, _SAMPLES), self._key(user, _WEIGHTS))

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()


class Refreshed(NamedTuple):
    """What `AdaptedUsers.refresh` has done.

    Attributes:
      adapted: The number of users with new weights.
      diverged: Users whose inner steps have diverged; they keep their former weights, if they have any.
      failed: Users whose samples the model refuses, or can't be read, and why. They keep their former
        weights, and are tried again when they get new samples; `AdaptedUsers.drop` removes their samples.
    """

    adapted: int
    diverged: tuple[str, ...]
    failed: Mapping[str, str] = MappingProxyType({})


class AdaptedUsers:
    """Keeps users' samples and adapted weights in a store, and adapts users whose samples have changed.

    A store has one writer at a time, and any number of readers. Several writers may share the users among
    them, such as by a log's partitions, with a prefix each.

    Args:
      adapt_many: The signature of this name of a loaded export: ``tf.saved_model.load(folder).signatures``.
      store: Where to keep users.
      keep: The number of a user's last samples to adapt to.
      at_once: The most users in one request.

    Raises:
      ConfigError: The signature isn't `gmeta.export.meta_models.meta_signatures`' ``adapt_many``, or a number
        is out of range.

    Example:
      ::

        served = tf.saved_model.load("serving/melu/1").signatures
        users = AdaptedUsers(served["adapt_many"], RedisUsers("redis://localhost/melu"))
        for batch in events:  # such as those of gmeta.io.stream
            users.observe(batch["user"], {name: batch[name] for name in features}, batch["rating"])
            users.refresh()
        served["predict_with"](**candidates, weights_bytes=tf.constant(users.weights(["31"])[0]))
    """

    def __init__(self, adapt_many: Any, store: UserStore, *, keep: int = 50, at_once: int = 256) -> None:
        specs: Mapping[str, Any] = getattr(adapt_many, "structured_input_signature", ((), {}))[1]
        if not {PER_USER, LABEL} <= specs.keys():
            raise ConfigError(
                f"AdaptedUsers needs the signature adapt_many of an exported MetaModel, with {PER_USER}; "
                f"this one takes {', '.join(specs) or 'nothing'}: export the model again"
            )
        self._adapt = adapt_many
        self._specs: dict[str, tf.TensorSpec] = {
            name: spec for name, spec in specs.items() if name != PER_USER
        }
        self._store = store
        self._keep = whole_number("AdaptedUsers: keep", keep, least=1)
        self._at_once = whole_number("AdaptedUsers: at_once", at_once, least=1)

    def observe(self, users: Any, samples: Mapping[str, Any], labels: Any) -> None:
        """Append labelled samples to their users', of which the last ``keep`` stay.

        Args:
          users: (n,) the user of each sample, integers or texts; 31 and "31" are the same user.
          samples: The columns that ``adapt`` takes, (n,), or (n, ids) padded with -1 or ``""``.
          labels: (n,), or (n, outputs).

        Raises:
          ConfigError: Columns are missing, unknown or of another length; or users aren't integers or texts.
          NotFiniteError: A number is NaN or infinite.
        """
        columns = {**samples, LABEL: labels}
        if columns.keys() != self._specs.keys():
            raise ConfigError(
                f"samples have the columns {', '.join(columns)}, and the model takes {', '.join(self._specs)}"
            )
        of = _names(users)
        values = {name: self._values(name, column, len(of)) for name, column in columns.items()}
        own: dict[str, list[int]] = {}
        for place, user in enumerate(of):
            own.setdefault(user, []).append(place)
        for names in _batches(own):
            self._append({user: own[user] for user in names}, values)

    def _append(self, own: Mapping[str, Sequence[int]], values: Mapping[str, Sequence[Any]]) -> None:
        written = {}
        for user, data in zip(own, self._store.read(_SAMPLES, [*own]), strict=True):
            former = self._document(user, data)
            new = {name: [column[place] for place in own[user]] for name, column in values.items()}
            kept = {name: [*former.get(name, ()), *new[name]][-self._keep :] for name in values}
            written[user] = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()
        self._store.mark(own, changed=True)
        self._store.write(_SAMPLES, written)

    def refresh(self, most: int | None = None) -> Refreshed:
        """Adapt the users that have changed since their weights were made.

        Args:
          most: The most users, from 1 on; None: all.
        """
        if most is not None:
            whole_number("AdaptedUsers.refresh: most", most, least=1)
        adapted, diverged, failed = 0, list[str](), dict[str, str]()
        while True:
            done = adapted + len(diverged) + len(failed)
            left = self._at_once if most is None else min(self._at_once, most - done)
            names = self._store.changed(left) if left > 0 else []
            if not names:
                return Refreshed(adapted, tuple(diverged), failed)
            answers = self._answers_of_each(names, failed)
            found = {user: data for user, data in answers.items() if data}
            self._store.write(_WEIGHTS, found)
            self._store.mark(names, changed=False)
            adapted += len(found)
            diverged += [user for user, data in answers.items() if not data]

    def _answers_of_each(self, names: Sequence[str], failed: dict[str, str]) -> dict[str, bytes]:
        """Adapt users, and note those that make a request fail; others are adapted without them."""
        try:
            return self._answers(names)
        except (tf.errors.InvalidArgumentError, DataError, OverflowError, TypeError, ValueError) as error:
            if len(names) == 1:
                failed[names[0]] = reason_of(error)
                return {}
            half = len(names) // 2
            parts = (names[:half], names[half:])
            first, second = (self._answers_of_each(part, failed) for part in parts)
            return first | second

    def _answers(self, names: Sequence[str]) -> dict[str, bytes]:
        """Adapt users. One without samples, whose `observe` was cut short, has no answer."""
        held = dict(zip(names, self._store.read(_SAMPLES, names), strict=True))
        documents = {user: self._document(user, data) for user, data in held.items() if data is not None}
        given = {
            name: tf.constant(_column([document[name] for document in documents.values()], spec))
            for name, spec in self._specs.items()
        }
        counts = [len(document[LABEL]) for document in documents.values()]
        answers = self._adapt(**given, **{PER_USER: tf.constant(counts, tf.int64)})[WEIGHTS]
        return dict(zip(documents, answers.numpy().tolist(), strict=True))

    def readapt(self) -> None:
        """Mark all users as changed, so that `refresh` adapts them: for a new version of the model."""
        for names in _batches(self._store.users()):
            self._store.mark(names, changed=True)

    def weights(self, users: Iterable[Any]) -> list[bytes | None]:
        """Return the adapted weights of users, as ``predict_with`` takes them; None: a user has none."""
        return self._store.read(_WEIGHTS, _names(users))

    def drop(self, users: Iterable[Any]) -> None:
        """Remove the samples and weights of users."""
        self._store.drop(_names(users))

    def _values(self, name: str, column: Any, count: int) -> list[Any]:
        """Return a column's values, as JSON has them, after checks; lists of ids have no padding."""
        spec = self._specs[name]
        lists = isinstance(column, tf.RaggedTensor)
        values = np.asarray(column.flat_values if lists else column)
        shape = (column.nrows().numpy(), None) if lists else values.shape
        if shape[0] != count or len(shape) != spec.shape.rank or not spec.shape.is_compatible_with(shape):
            raise ConfigError(
                f"{name} of {count} samples has the shape {shape}, and the model takes {spec.shape}"
            )
        kinds = "USO" if spec.dtype == tf.string else "biuf" if spec.dtype.is_floating else "iu"
        if values.size and values.dtype.kind not in kinds:
            raise ConfigError(f"{name} is {values.dtype}, and the model takes {spec.dtype.name}")
        with np.errstate(over="ignore"):
            finite = not spec.dtype.is_floating or np.isfinite(values.astype(spec.dtype.as_numpy_dtype)).all()
        if not finite:
            raise NotFiniteError(f"{name} holds NaN or infinity: leave such samples out")
        found: list[Any] = _json_of(column.to_list() if lists else values.tolist())
        if not _is_list(spec):
            return found
        return [[value for value in row if value != _padding(spec)] for row in found]

    def _document(self, user: str, data: bytes | None) -> dict[str, Any]:
        if data is None:
            return {}
        try:
            found = {name: items(each, name) for name, each in mapping(parse_json(data), "it").items()}
        except ValueError as error:
            raise DataError(
                f"the store's samples of user {user} are damaged: {error}", advice="drop the user"
            ) from error
        if found.keys() != self._specs.keys() or len(set(map(len, found.values()))) != 1:
            raise DataError(
                f"the store's samples of user {user} have the columns {', '.join(found)}, and the model "
                f"takes {', '.join(self._specs)}",
                advice="name another prefix for another model, or drop the user",
            )
        return found


def _names(users: Any) -> list[str]:
    """Return users as texts.

    Raises:
      ConfigError: They aren't a vector of integers or texts.
    """
    given = users if hasattr(users, "__array__") or isinstance(users, str | bytes) else [*users]
    values = np.asarray(given)
    found = values.tolist() if values.ndim == 1 else [None]
    known = (str, bytes, int)
    if not all(isinstance(user, known) and not isinstance(user, bool) for user in found):
        raise ConfigError(f"users must be a vector of integers or texts, got {given!r:.100}")
    return [
        user.decode(errors="backslashreplace") if isinstance(user, bytes) else str(user) for user in found
    ]


def _json_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_json_of(each) for each in value]
    return value.decode() if isinstance(value, bytes) else value


def _is_list(spec: tf.TensorSpec) -> bool:
    """Return whether a column has any number of ids a sample."""
    return bool(spec.shape.rank == 2 and spec.shape[1] is None and not spec.dtype.is_floating)


def _padding(spec: tf.TensorSpec) -> Any:
    return TEXT_PADDING.decode() if spec.dtype == tf.string else PADDING


def _column(of_users: Sequence[Sequence[Any]], spec: tf.TensorSpec) -> npt.NDArray[Any]:
    """Join users' values into one column as the signature takes it."""
    values = [value for own in of_users for value in own]
    dtype = object if spec.dtype == tf.string else spec.dtype.as_numpy_dtype
    if _is_list(spec):
        width = max(map(len, values), default=0)
        values = [[*value, *[_padding(spec)] * (width - len(value))] for value in values]
        return np.array(values, dtype).reshape(len(values), width)
    return np.array(values, dtype).reshape(len(values), *(dim or 1 for dim in spec.shape[1:]))


def _batches(users: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(users)
    while some := [*itertools.islice(rest, _AT_ONCE)]:
        yield some
