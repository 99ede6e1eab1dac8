"""Joining exposures with outcomes that arrive later, in event time."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gmeta.core.errors import ConfigError, DataError, finite_number, whole_number
from gmeta.core.schema import OnBad, check_on_bad
from gmeta.io.streams.open_exposures import (
    POSITIVE,
    Decided,
    ExposureRows,
    Floats,
    Ints,
    JoinCounts,
    OpenExposures,
    fingerprints_of,
    kind_of_key,
)

WEIGHT, LOG_ODDS, CORRECTS = "weight", "log_odds", "corrects"
_LONGEST = 2**61  # microseconds; sums of spans stay within int64
_FORMAT = 1


def added_columns(negatives: float, corrections: int) -> list[str]:
    """Return the columns of the output after the label."""
    sampled, corrected = [LOG_ODDS] * (negatives < 1), [CORRECTS] * (corrections > 0)
    return [WEIGHT, *sampled, *corrected]


class LabelJoin:
    """Labels exposures by outcomes that arrive later, such as impressions by clicks.

    The input is one log of both, in an order that is fixed by a key: the largest event time so far, which
    never decreases. An exposure of event time ``t`` is open until the key exceeds ``t + within + lateness``.
    An outcome of the same ``key`` columns and event time ``c`` belongs to it if
    ``t <= c < t + within + corrections``.

    - An outcome that arrives while its exposure is open makes it a positive at once, at the outcome's place.
    - An exposure that closes without one becomes a negative, with label 0, right before the first row whose
      key exceeds its deadline; several close by deadline, then by arrival.
    - An outcome that arrives later, until the key exceeds ``t + within + lateness + corrections``, is a
      correction: the negative again with weight -1, if it was emitted, then the positive with weight 1. Over
      the whole log, the weights of an exposure and a label add up to those of the true label.
    - An outcome that arrives before its exposure waits for ``within + lateness + corrections`` of keys.
    - An exposure has one positive, by the outcome that arrives first. Further outcomes, and exposures whose
      key is known, are dropped and counted.

    So the output is a function of the log's rows, however they are cut into calls, and whenever the state is
    saved and restored.

    Corrections and the log loss: with ``p = sigmoid(z)``, a correction's two rows have the loss
    ``log(1 - p) - log(p) = -z``, and the gradient -1 with regard to the logit ``z``, whatever ``p`` is. It is
    what turns the gradient ``p`` of the negative, at the same weights, into the ``p - 1`` of the positive.
    But the loss of a batch with corrections has no lower bound, and its metrics can leave their range: choose
    ``within`` such that corrections are rare, and don't train on a batch of corrections repeatedly. With
    ``corrections``, the column ``corrects`` is 1 for these two rows, whose example the model has trained on.

    Sampling: ``negatives = r`` keeps a negative if a hash of its key is below ``r``, so reruns and all ranks
    keep the same ones. Positives are all kept, so the odds among the examples are ``1 / r`` times the true
    ones. The column ``log_odds`` holds ``-log(r)``. Train on ``z + log_odds`` as the logit, for positives and
    negatives alike; then ``sigmoid(z)`` without it, which is served, is the true probability.

    Memory: of each known exposure 56 to 68 bytes of index, and its row while an output can need it. Rows
    beyond ``memory`` go to files, mapped into memory; the system reads and drops their pages. A waiting
    outcome takes 55 to 67 bytes. Keys are compared by 64-bit fingerprints: a key of texts or several columns
    is taken for one of n other known keys with probability ``n / 2**64``, 5e-14 for a million. Then its
    exposure is dropped as a repetition, or its outcome goes to the other's exposure. Keys of one integer are
    never confused.

    Args:
      key: The columns that an exposure and its outcomes have in common: integers or texts. All rows of a key
        must reach the same join.
      within: How long after its exposure an outcome counts, in microseconds.
      lateness: How much later than the key rows may be, in microseconds, without a correction.
      corrections: How much longer a closed exposure can still get an outcome, in microseconds.
      label: The name of the column of labels in the output.
      outcome: The outcomes' column with the label of a positive. None: 1.
      negatives: The share of negatives that are kept, above 0 and up to 1.
      memory: Maximum bytes of rows in memory.
      spill: The folder for rows beyond ``memory``, on a disk. None: the system's for temporary files.
      on_bad: ``"raise"`` raises an error at a row with a null key, or a label that is null or not finite;
        ``"skip"`` counts and drops it.

    Raises:
      ConfigError: An argument is out of range.

    Example:
      >>> join = LabelJoin(key=["request"], within=30 * 60 * 10**6)
      >>> shown = pa.record_batch({"request": [7, 8], "item": [1, 2]})
      >>> clicks = pa.record_batch({"request": [8]})
      >>> times = np.array([0, 10, 20])
      >>> join.push(times, times, np.array([0, 0, 1]), np.zeros(3, np.int32), shown, clicks).to_pylist()
      [{'request': 8, 'item': 2, 'label': 1.0, 'weight': 1.0}]
      >>> join.finish().to_pylist()
      [{'request': 7, 'item': 1, 'label': 0.0, 'weight': 1.0}]

    References:
      Monolith (2022), section 3.1; delayed feedback: Ktena et al. (2019), section 4.
    """

    def __init__(
        self,
        *,
        key: Sequence[str],
        within: int,
        lateness: int = 0,
        corrections: int = 0,
        label: str = "label",
        outcome: str | None = None,
        negatives: float = 1.0,
        memory: int = 256 << 20,
        spill: Path | None = None,
        on_bad: OnBad = "raise",
    ) -> None:
        if isinstance(key, str) or not key or len(set(key)) < len(key):
            raise ConfigError(f"LabelJoin: key must be a list of different columns, got {key!r}")
        self._key = list(key)
        self._spans = [
            whole_number("LabelJoin: within", within, least=1),
            whole_number("LabelJoin: lateness", lateness),
            whole_number("LabelJoin: corrections", corrections),
        ]
        if max(self._spans) > _LONGEST:
            raise ConfigError(f"LabelJoin: spans must be at most {_LONGEST} microseconds, got {self._spans}")
        self._negatives = finite_number("LabelJoin: negatives", negatives)
        if not 0 < self._negatives <= 1:
            raise ConfigError(f"LabelJoin: negatives must be above 0 and at most 1, got {negatives!r}")
        self._outcome = outcome
        self._added = [label, *added_columns(self._negatives, corrections)]
        if len(set(self._added)) < len(self._added):
            raise ConfigError(f"LabelJoin: label={label!r} is the name of another column of the output")
        self._memory = whole_number("LabelJoin: memory", memory)
        self._spill = None if spill is None else Path(spill)
        self._on_bad = check_on_bad(on_bad)
        self._clear()

    def _clear(self) -> None:
        self._open = OpenExposures(self._spans, self._negatives)
        self._rows = ExposureRows(self._memory, self._spill)
        self._schema: pa.Schema | None = None
        self._types: list[str] | None = None
        self._clock = -(2**63)
        self._bad = 0

    def push(
        self,
        keys: Ints,
        times: Ints,
        sides: npt.NDArray[np.uint8],
        parts: npt.NDArray[np.int32],
        exposures: pa.RecordBatch,
        outcomes: pa.RecordBatch,
    ) -> pa.RecordBatch:
        """Add the next rows of the log.

        Args:
          keys: (N,) int64, the log's key at each row, in microseconds, which never decreases.
          times: (N,) int64, the event times.
          sides: (N,) uint8, 0 for an exposure, 1 for an outcome.
          parts: (N,) int32, the partitions, by which `restore` distributes exposures.
          exposures: The exposures' rows, in order.
          outcomes: The outcomes' rows, in order.

        Returns:
          The examples that these rows decide: the exposures' columns, then the label and ``weight``, both
          float32, and ``log_odds``, float32, if negatives are sampled.

        Raises:
          DataError: The arrays don't match, keys decrease, columns differ from earlier ones, or a row is bad.
          ConfigError: A column is missing, of the wrong type, or would occur twice in the output.
          GmetaError: A file can't be written, such as on a full disk. The join is of no further use then:
            restore a saved state.
        """
        keys, times = _array(keys, np.int64), _array(times, np.int64)
        sides, parts = _array(sides, np.uint8), _array(parts, np.int32)
        self._check(keys, times, sides, parts, exposures, outcomes)
        schema = self._check_columns(exposures, outcomes)
        labels = self._labels(outcomes)
        sound = [_sound(exposures, self._key), _sound(outcomes, self._key) & np.isfinite(labels)]
        if not all(each.all() for each in sound):
            self._skip_bad(sound)
            good = np.ones(len(sides), np.bool_)
            good[sides == 0], good[sides == 1] = sound
            keys, times, sides, parts = keys[good], times[good], sides[good], parts[good]
            exposures, outcomes = exposures.filter(sound[0]), outcomes.filter(sound[1])
            labels = labels[sound[1]]
        fingerprints = np.empty(len(sides), np.uint64)
        fingerprints[sides == 0] = fingerprints_of(exposures, self._key)
        fingerprints[sides == 1] = fingerprints_of(outcomes, self._key)
        first = self._open.counts.next_row
        accepted, decided = self._open.push(keys, times, sides, parts, fingerprints, labels)
        if len(keys):
            self._clock = int(keys[-1])
        chosen = np.flatnonzero(accepted)
        self._rows.add(first + np.arange(len(chosen)), exposures, chosen)
        return self._examples(decided, schema)

    def finish(self) -> pa.RecordBatch:
        """Close all open exposures, and forget all known ones, at the end of a log that doesn't continue.

        Returns:
          The remaining negatives, with the columns of `push`.
        """
        return self._examples(self._open.finish(), pa.schema([]) if self._schema is None else self._schema)

    @property
    def stats(self) -> JoinCounts:
        """The counters."""
        counts = asdict(self._open.counts)
        del counts["next_row"]
        counts["index_bytes"] += self._rows.index_bytes
        sizes = {"memory_bytes": self._rows.memory_bytes, "spilled_bytes": self._rows.spilled_bytes}
        return JoinCounts(**counts, **sizes, bad=self._bad)

    def state(self) -> bytes:
        """Return everything that later output depends on, with the rows in files, but without the counters.

        Each known exposure takes 21 bytes and its row, each waiting outcome 32 bytes.
        """
        header = {**self._settings(), "clock": self._clock, "types": self._types}
        header["has_rows"] = self._schema is not None
        metadata = {"join": json.dumps(header)}
        sink = pa.BufferOutputStream()
        for columns, names in (
            (self._open.exposures(), _EXPOSURE_NAMES),
            (self._open.waiting(), _WAITING_NAMES),
        ):
            table = pa.record_batch(columns, names=names)
            _write(sink, table.schema.with_metadata(metadata), [table])
        if self._schema is not None:
            _write(sink, self._schema, self._rows.batches())
        return bytes(sink.getvalue())

    def restore(
        self,
        states: Sequence[bytes],
        keep: Callable[[npt.NDArray[np.int32]], npt.NDArray[np.bool_]],
    ) -> None:
        """Replace everything by saved states; the counters begin at 0.

        One state continues as if it hadn't been saved. Of several ranks' states, exposures with equal
        deadlines close in the order of the states.

        Args:
          states: The states of all ranks that had partitions which this rank has now.
          keep: Returns which of some partitions this rank has: (N,) int32 -> (N,) bool.

        Raises:
          ConfigError: A state was saved by a join with other settings.
          DataError: A state is damaged, or the states' rows have different columns.
          GmetaError: A file can't be written, such as on a full disk.
        """
        self._clear()
        clocks, waiting = [], []
        for state in states:
            with pa.BufferReader(state) as source, _damage():
                table = pa.ipc.open_stream(source).read_all()
                header = json.loads(table.schema.metadata[b"join"])
                self._check_settings(header)
                outcomes = _numpy(pa.ipc.open_stream(source).read_all())
                chosen = _keep(keep, outcomes[-1])
                waiting.append([column[chosen] for column in outcomes])
                clocks.append(header["clock"])
                if header["types"] is not None:
                    self._set_types("state", header["types"])
                exposures = _numpy(table)
                ids = self._restore_exposures(exposures, _keep(keep, exposures[2]))
                if header["has_rows"]:
                    self._restore_rows(ids, pa.ipc.open_stream(source))
        self._clock = min(clocks, default=self._clock)
        if waiting:
            columns = [np.concatenate(each) for each in zip(*waiting, strict=True)]
            order = np.argsort(columns[2], kind="stable")
            self._open.restore_waiting([column[order] for column in columns])

    def _restore_exposures(self, columns: list[Any], chosen: npt.NDArray[np.bool_]) -> Ints:
        """Return the number of each exposure that has a row, -1 if it doesn't stay."""
        first = self._open.counts.next_row
        accepted = self._open.restore([column[chosen] for column in columns])
        ids = np.full(len(chosen), -1)
        ids[chosen] = np.where(accepted, first + np.arange(len(accepted)), -1)
        return ids[columns[3] != POSITIVE]

    def _restore_rows(self, ids: Ints, batches: Any) -> None:
        begin = 0
        for batch in batches:
            self._set_schema(batch.schema)
            of_batch = ids[begin : begin + batch.num_rows]
            rows = np.flatnonzero(of_batch >= 0)
            self._rows.add(of_batch[rows], batch, rows)
            begin += batch.num_rows
        if begin != len(ids):
            raise KeyError(f"{begin} rows of {len(ids)}")

    def _settings(self) -> dict[str, Any]:
        names = ("within", "lateness", "corrections")
        spans = dict(zip(names, self._spans, strict=True))
        return {"format": _FORMAT, "key": self._key, **spans, "negatives": self._negatives}

    def _check_settings(self, header: dict[str, Any]) -> None:
        own = self._settings()
        others = {name: header.get(name) for name in own if header.get(name) != own[name]}
        if others:
            wanted = ", ".join(f"{name}={value!r}, not {own[name]!r}" for name, value in others.items())
            raise ConfigError(f"LabelJoin: the state was saved with {wanted}: join with the same settings")

    def _check(self, keys: Ints, times: Ints, sides: Any, parts: Any, exposures: Any, outcomes: Any) -> None:
        lengths = [len(keys), len(times), len(sides), len(parts)]
        if len(set(lengths)) > 1:
            raise DataError(f"keys, times, sides and parts must be of one length, got {lengths}")
        counts = [int((sides == 0).sum()), int((sides == 1).sum())]
        if sum(counts) != len(sides) or counts != [exposures.num_rows, outcomes.num_rows]:
            raise DataError(
                f"{len(sides)} sides have {counts[0]} zeros and {counts[1]} ones, but there are "
                f"{exposures.num_rows} exposures and {outcomes.num_rows} outcomes"
            )
        steps = np.flatnonzero(keys[1:] < keys[:-1])
        if len(keys) and (len(steps) or keys[0] < self._clock):
            at = int(steps[0]) + 1 if len(steps) else 0
            before = int(keys[at - 1]) if at else self._clock
            raise DataError(f"keys must never decrease, but row {at} has {int(keys[at])} after {before}")

    def _check_columns(self, exposures: pa.RecordBatch, outcomes: pa.RecordBatch) -> pa.Schema:
        for side, batch in (("exposures", exposures), ("outcomes", outcomes)):
            if batch.num_rows:
                self._set_types(side, [_kind(side, batch, name) for name in self._key])
        there = [name for name in self._added if name in exposures.schema.names]
        if there:
            raise ConfigError(
                f"LabelJoin: the exposures have a column {there[0]!r} already: leave it out, or "
                f"{'choose another label=' if there[0] == self._added[0] else 'rename it'}"
            )
        if exposures.num_rows:
            self._set_schema(exposures.schema)
        return exposures.schema if self._schema is None else self._schema

    def _set_types(self, where: str, types: list[str]) -> None:
        if self._types is not None and types != self._types:
            raise ConfigError(
                f"LabelJoin: columns {self._key} of the {where} are {types}, but were {self._types} before: "
                "keys of different types are never equal"
            )
        self._types = types

    def _set_schema(self, schema: pa.Schema) -> None:
        schema = schema.remove_metadata()
        if self._schema is None:
            self._schema = schema
        elif schema != self._schema:
            wanted, got = (", ".join(f"{f.name} {f.type}" for f in each) for each in (self._schema, schema))
            raise DataError(f"exposures have the columns {got}; earlier ones had {wanted}")

    def _labels(self, outcomes: pa.RecordBatch) -> Floats:
        if self._outcome is None or not outcomes.num_rows:
            return np.ones(outcomes.num_rows, np.float32)
        column = _column("outcomes", outcomes, self._outcome)
        kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
        if not any(kind(column.type) for kind in kinds):
            raise ConfigError(
                f"LabelJoin: the outcomes' column {self._outcome!r} must be numbers, it is {column.type}"
            )
        numbers = column.cast(pa.float32(), safe=False).fill_null(math.nan)
        return np.ascontiguousarray(numbers.to_numpy(zero_copy_only=False))

    def _skip_bad(self, sound: Sequence[npt.NDArray[np.bool_]]) -> None:
        for side, own in zip(("exposures", "outcomes"), sound, strict=True):
            self._bad += int((~own).sum())
            if self._on_bad == "raise" and not own.all():
                raise DataError(
                    f"row {int(np.argmin(own))} of the {side} has a null key, or a label that is null or not "
                    "finite",
                    advice="or pass on_bad='skip'",
                )

    def _examples(self, decided: Decided, schema: pa.Schema) -> pa.RecordBatch:
        count = len(decided.rows)
        columns = [pa.nulls(0, field.type) for field in schema]
        if count:
            columns = self._rows.take(decided.rows).columns
        self._rows.release(decided.released)
        back = decided.weights < 0  # the positive follows
        added = {
            self._added[0]: decided.labels,
            WEIGHT: decided.weights,
            LOG_ODDS: np.full(count, -math.log(self._negatives), np.float32),
            CORRECTS: (back | np.append(False, back)[:count]).astype(np.float32),
        }
        fields = [pa.field(name, pa.float32()) for name in self._added]
        own = [pa.array(added[name]) for name in self._added]
        return pa.RecordBatch.from_arrays([*columns, *own], schema=pa.schema([*schema, *fields]))


_EXPOSURE_NAMES = ["fingerprint", "time", "part", "status"]
_WAITING_NAMES = ["fingerprint", "time", "arrived", "label", "part"]


def _array(values: npt.ArrayLike, dtype: Any) -> Any:
    given = np.asarray(values)
    array = np.ascontiguousarray(given, dtype)
    if array.ndim != 1 or (given.dtype != dtype and not np.array_equal(given, array)):
        raise DataError(f"expected a vector of {np.dtype(dtype)}, got {given.dtype} of shape {given.shape}")
    return array


def _column(side: str, batch: pa.RecordBatch, name: str) -> pa.Array:
    if name not in batch.schema.names:
        raise ConfigError(f"LabelJoin: the {side} have no column {name!r}; they have {batch.schema.names}")
    return batch.column(name)


def _kind(side: str, batch: pa.RecordBatch, name: str) -> str:
    dtype = _column(side, batch, name).type
    kind = kind_of_key(dtype)
    if kind is None:
        raise ConfigError(f"LabelJoin: the {side}' key {name!r} must be integers or texts, it is {dtype}")
    return kind


def _sound(batch: pa.RecordBatch, key: Sequence[str]) -> npt.NDArray[np.bool_]:
    sound = np.ones(batch.num_rows, np.bool_)
    for name in key if batch.num_rows else ():
        if batch.column(name).null_count:
            sound &= pc.is_valid(batch.column(name)).to_numpy(zero_copy_only=False)
    return sound


def _numpy(table: pa.Table) -> list[Any]:
    return [column.to_numpy() for column in table.columns]


def _keep(keep: Callable[[Any], Any], parts: Any) -> npt.NDArray[np.bool_]:
    chosen = np.asarray(keep(parts))
    if chosen.dtype != np.bool_ or chosen.shape != parts.shape:
        raise ConfigError(
            f"LabelJoin.restore: keep must return a bool for each of {parts.shape} partitions, got "
            f"{chosen.dtype} of shape {chosen.shape}"
        )
    return chosen


def _write(sink: Any, schema: pa.Schema, batches: Any) -> None:
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise DataError(f"the bytes aren't a whole state of a LabelJoin: {error}") from error
