"""Writes a trained model as a SavedModel that stock TensorFlow Serving loads.

The graph has TensorFlow ops only. Every embedding table becomes a static hash table from key to row
number, and a variable with the rows. By default, an untrained id reads the row with which training would
have initialised it; the graph computes that row (a pure function of seed and key).

Clients send tensors by name. A feature with several ids per sample is a dense (samples, width) tensor whose
rows are padded with `PADDING`. Of the forms of a ragged batch, this one works everywhere in TensorFlow
Serving, because the first dimension of all inputs is the samples (REST's row format and the server's own
batching require that). Clients send the ids of a feature that hashes (``FeatureConfig(hash=True)``) as text,
padded with the empty text, and the graph hashes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError, GmetaError, NotFiniteError, first_line
from gmeta.core.files import stage_folder
from gmeta.core.graph import gradients_released
from gmeta.core.row_formats import RowDtype, RowFormat
from gmeta.export.delta_signatures import Updates
from gmeta.export.derived import derived_values
from gmeta.export.external_rows import External, ExternalRows
from gmeta.export.meta_models import RATING, meta_sequence_signatures, meta_signatures
from gmeta.export.sequence_models import (
    exposure_signatures,
    next_item_signatures,
    retrieval_signatures,
    two_tower_signatures,
)
from gmeta.export.server_files import WarmUp, write_warm_up
from gmeta.export.signature import (
    DEFAULT_SIGNATURE,
    OUTPUT,
    Signature,
    feature_inputs,
    receive,
    wire_names,
    wire_specs,
)
from gmeta.export.signature import PADDING as PADDING
from gmeta.layers import EmbeddingCollection
from gmeta.layers.embedding.merge_plan import MergedTable
from gmeta.models import GRM, FlatRetriever, GenerativeRetriever, MetaGRM, MetaModel, NextItemModel, TwoTower
from gmeta.models.sequence.catalogue import Catalogue
from gmeta.ops import HashTable
from gmeta.ops.table.portable_tables import (
    UnknownRows,
    initial_rows_of,
    no_external_rows,
    own_rows,
    portable_ops,
)

# Rows that an exported model reads for untrained ids.

Unknown: TypeAlias = "Literal['initial', 'zeros'] | Mapping[str, npt.ArrayLike]"
"""``"initial"``: the row that training would have started the id with, as an evaluation reads it.
``"zeros"``: a row of zeros. A mapping: embedding table -> the one row, (dim,), that all its unknown ids read;
tables that the mapping doesn't name use ``"initial"``."""


def unknown_rows(
    unknown: Unknown, collections: Iterable[EmbeddingCollection]
) -> Callable[[HashTable], UnknownRows]:
    """Make the function that returns the rows of unknown keys in a physical table, for `portable_ops`.

    Raises:
      ConfigError: ``unknown`` is an invalid word, names a table that doesn't exist, or has a row of the wrong
        width or one that isn't finite.
    """
    if unknown == "initial":
        return initial_rows_of
    if unknown == "zeros":
        return _zeros
    if not isinstance(unknown, Mapping):
        raise ConfigError(f"unknown must be 'initial', 'zeros' or rows by table, got {unknown!r}")
    merged_of = {
        id(table): merged
        for collection in collections
        for table, merged in zip(collection.tables, collection.merged, strict=True)
    }
    names = [name for merged in merged_of.values() for name in merged.tables]
    strange = sorted(set(unknown) - set(names))
    if strange:
        raise ConfigError(f"unknown names {', '.join(strange)}, but the tables are {', '.join(names)}")

    def rows_of(table: HashTable) -> UnknownRows:
        merged = merged_of.get(id(table))
        return initial_rows_of(table) if merged is None else _take_rows(unknown, table, merged)

    return rows_of


def _zeros(table: HashTable) -> UnknownRows:
    return lambda keys: tf.zeros([tf.size(keys), table.dim])


def _take_rows(unknown: Mapping[str, npt.ArrayLike], table: HashTable, merged: MergedTable) -> UnknownRows:
    rows = np.zeros((len(merged.tables), merged.dim), np.float32)
    for number, name in enumerate(merged.tables):
        if name in unknown:
            row = np.asarray(unknown[name], np.float32)
            if row.shape != (merged.dim,):
                raise ConfigError(
                    f"unknown[{name!r}] must have shape ({merged.dim},), the table's width; got {row.shape}"
                )
            if not np.isfinite(row).all():
                raise ConfigError(f"unknown[{name!r}] must hold finite numbers, got {row}")
            rows[number] = row
    given = np.array([name in unknown for name in merged.tables])
    initial = initial_rows_of(table)

    def read(keys: tf.Tensor) -> tf.Tensor:
        number = tf.bitwise.right_shift(keys, tf.constant(merged.id_bits, tf.int64))
        fixed = tf.gather(tf.constant(rows), number)
        if given.all():
            return fixed
        return tf.where(tf.gather(tf.constant(given), number)[:, tf.newaxis], fixed, initial(keys))

    return read


@dataclass(frozen=True)
class Exported:
    """A SavedModel that was written.

    Attributes:
      folder: The SavedModel.
      signatures: Signature -> name of an input -> its dtype and shape, as clients send it.
      answers: Signature -> name of an output -> its dtype and shape.
      rows: Number of embedding rows in all tables.
      notes: What to know before the model is served.
    """

    folder: Path
    signatures: Mapping[str, Mapping[str, str]]
    answers: Mapping[str, Mapping[str, str]]
    rows: int
    notes: tuple[str, ...] = ()


def export_model(
    model: tf.keras.Model,
    folder: str | os.PathLike[str],
    *,
    signatures: Mapping[str, Signature] | None = None,
    unknown: Unknown = "initial",
    text_ids: bool = True,
    label: str | None = None,
    updates: Updates | None = None,
    dtype: RowDtype = "float32",
    external: External = (),
    warm_up: Mapping[str, Mapping[str, npt.ArrayLike]] | bool = True,
) -> Exported:
    """Write a model as a SavedModel without custom ops.

    Args:
      model: Any Keras model; embedding collections may be anywhere in it.
      folder: The folder to create. TensorFlow Serving expects ``<model>/<number>``, and serves a new number
        as soon as it appears; this function makes it appear only when it is complete.
      signatures: Name -> signature; the first is also served as `DEFAULT_SIGNATURE`. None: those
        of `default_signatures`.
      unknown: The row that an untrained id reads; see `Unknown`.
      text_ids: Whether clients send text for the inputs that have the name of a feature that hashes. False:
        they send the numbers that ``gmeta prepare`` would store for it (`gmeta.ops.hash_text`). Where the
        model itself takes text, clients send text in either case.
      label: The name that the default signatures give to the answer of an ordinary model with one output, or
        of a `MetaModel`. If the compiled loss takes logits, this answer is the probability, and
        ``<label>_logit`` is a second answer.
      updates: Makes the exported model take deltas while it serves, as those of a `Publisher` do: it also
        has the signatures ``apply_delta`` and ``delta_version``.
      dtype: How the exported tables hold rows: ``"float32"``; ``"bfloat16"``, in half the bytes; ``"int8"``,
        with a float32 scale a row, ``max(|row|) / 127``, in about a quarter (68 instead of 256 bytes for a
        row of 64). Lookups return float32: for ``"int8"`` within ``max(|row|) / 254`` of the trained number,
        for ``"bfloat16"`` within a relative 2^-8. Weights, rows of ids that the tables don't hold, and
        vectors that are computed from rows at export, as those of a catalogue, stay float32.
      external: Names of tables whose rows aren't in the SavedModel, because they are larger than a server;
        ``"all"``: of every table. A signature ``name`` that reads them takes their rows as inputs, and
        ``name_ids`` returns the ids whose rows it needs (`gmeta.export.external_rows`). A `Publisher` with
        this argument writes the rows, and `gmeta deliver` copies them to Redis or RocksDB.
      warm_up: Requests that a server answers before those of clients, so that the first of these don't wait
        for TensorFlow to prepare the graphs (`gmeta.export.server_files.WarmUp`). True: a request of one
        sample for each signature. A mapping of a signature to its inputs by name, as clients send them: these
        requests, for instance with as many samples as clients send, and the others as for True. False: none.

    Raises:
      NotFiniteError: Weights, or rows of the tables that are served, hold NaN or infinity. The message names
        the weights, or the table and the ids.
      ConfigError: ``folder`` exists; the inputs can't be determined or sent; a signature inserts rows, or its
        graph still has an op of gmeta; deltas can't update the model; a table can't be external; or
        ``warm_up`` has a request that can't be answered.
      GmetaError: The folder can't be written.

    Example:
      ::

        export_model(model, "serving/my_model/1")
    """
    folder = Path(folder)
    if folder.exists():
        raise ConfigError(f"{folder} exists: name a new folder")
    RowFormat(dtype, 1)  # refuses other dtypes
    if updates is not None and updates.rows != dtype:
        raise ConfigError(f"deltas with rows of {updates.rows} can't update an export with dtype={dtype!r}")
    parts = [model, *tf.train.TrackableView(model).descendants()]
    parts += [held for part in parts if isinstance(part, Catalogue) for held in part.resources]
    collections = [part for part in parts if isinstance(part, EmbeddingCollection)]
    chosen = signatures or default_signatures(model, collections, label=label, text_ids=text_ids)
    _check_finite(model)
    features = [feature for collection in collections for feature in collection.features]
    texts = {feature.name for feature in features if feature.hash and text_ids}
    outside = ExternalRows(model, external, dtype, [each.name for each in features]) if external else None
    copy = no_external_rows if outside is None else outside.copy
    rows_of, live = unknown_rows(unknown, collections), updates is not None
    rows = own_rows if updates is None else updates.rows_of
    graphs: list[tf.Graph] = []

    def trace(name: str, signature: Signature, texts: Collection[str] = texts) -> Any:
        return _trace(name, signature, texts, graphs)

    with (
        gradients_released(graphs),
        portable_ops(rows_of, live=live, dtype=dtype, external=copy, rows=rows) as tables,
        derived_values() as derived,
    ):
        if outside is not None:
            chosen = outside.split(chosen, trace)
        traced = {name: trace(name, signature) for name, signature in chosen.items()}
        module = tf.Module()
        if updates is not None:
            read = [variable for each in traced.values() for variable in each.variables]
            taken = updates.signatures(model, tables, read, [*derived.values()])
            if twice := sorted(chosen.keys() & taken.keys()):
                raise ConfigError(f"signature {twice[0]!r} is that of deltas: name yours otherwise")
            traced |= {name: trace(name, signature, ()) for name, signature in taken.items()}
            chosen = {**chosen, **taken}
            module.updates = updates.resources
        module.tables = list(tables)
        if dtype != "float32" and not module.tables:
            raise ConfigError(f"dtype={dtype!r} has no use: the exported graph reads no rows of tables")
    module.variables_read = list({id(v): v for f in traced.values() for v in f.variables}.values())
    # For example, lookup tables of preprocessing layers. The tables of training are left out.
    module.resources = [
        part
        for part in parts
        if isinstance(part, tf.saved_model.experimental.TrackableResource) and not isinstance(part, HashTable)
    ]
    served = {DEFAULT_SIGNATURE: next(iter(traced.values())), **traced}
    sent = {name: _sent(signature, texts) for name, signature in chosen.items()}
    requests: dict[str, dict[str, npt.NDArray[Any]]] = {}
    cold: dict[str, str] = {}
    if warm_up is not False:
        requests, cold = WarmUp(traced, sent, {} if warm_up is True else warm_up).requests()
        if (first := next(iter(traced))) in requests:
            requests, sent[DEFAULT_SIGNATURE] = {DEFAULT_SIGNATURE: requests[first], **requests}, sent[first]
    with stage_folder(folder) as staging:
        try:
            tf.saved_model.save(module, str(staging), signatures=served, options=_OPTIONS)
        except tf.errors.OpError as error:
            raise GmetaError(f"can't write {folder}: {first_line(error)}") from error
        if requests:
            write_warm_up(staging, requests, sent)
    return Exported(
        folder,
        {name: _describe(sent[name]) for name in chosen},
        {name: _describe(each.structured_outputs) for name, each in traced.items()},
        sum(table.size for table in module.tables),
        (*_notes(model, chosen), *_cold_notes(cold)),
    )


# A server computes no gradient of a signature: those that a signature contains are traced with it.
_OPTIONS = tf.saved_model.SaveOptions(experimental_custom_gradients=False)


def _notes(model: tf.keras.Model, signatures: Collection[str]) -> tuple[str, ...]:
    if not isinstance(model, MetaModel | MetaGRM) or model.inner.teaches_start or "predict" not in signatures:
        return ()
    return (
        f"`predict` answers by the shared weights, which {model.inner.algorithm} teaches to adapt and not to "
        "predict: before you serve tasks without samples by it, measure it (AdaptationCurve with steps=0)",
    )


def _cold_notes(cold: Mapping[str, str]) -> list[str]:
    return [
        f"`{name}` has no warm-up request, so its first request takes longer ({why}): give "
        f"warm_up={{{name!r}: its inputs}}"
        for name, why in cold.items()
        if name != "apply_delta"
    ]


def _check_finite(model: tf.keras.Model) -> None:
    """Refuse a model that has diverged, because it would return NaN to all clients."""
    bad = [
        weight.name
        for weight in model.weights
        if weight.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(weight)))
    ]
    if bad:
        raise NotFiniteError(
            f"{model.name}: {', '.join(bad)} hold NaN or infinity: training has diverged. Train with a lower "
            "rate, or export an earlier checkpoint"
        )


def _sent(signature: Signature, texts: Collection[str]) -> dict[str, tf.TensorSpec]:
    """Return the specs of the tensors that clients send, by the names that clients use."""
    names, specs = wire_names(signature.inputs), wire_specs(signature.inputs, texts)
    return {sent: tf.TensorSpec(specs[key].shape, specs[key].dtype, sent) for key, sent in names.items()}


def _trace(
    name: str, signature: Signature, texts: Collection[str], graphs: list[tf.Graph]
) -> tf.types.experimental.ConcreteFunction:
    names = wire_names(signature.inputs)

    @tf.function(autograph=False)
    def serve(**inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        graphs.append(tf.compat.v1.get_default_graph())
        outputs = signature.function(
            {key: receive(inputs[names[key]], spec) for key, spec in signature.inputs.items()}
        )
        return dict(outputs) if isinstance(outputs, Mapping) else {OUTPUT: outputs}

    traced = serve.get_concrete_function(**_sent(signature, texts))
    definition = traced.graph.as_graph_def()
    nodes = [*definition.node, *(n for function in definition.library.function for n in function.node_def)]
    foreign = sorted({node.op for node in nodes if node.op.startswith("Gmeta")})
    if foreign:
        raise ConfigError(
            f"signature {name!r} still has {', '.join(foreign)} in its graph, which TensorFlow Serving "
            "doesn't have: it calls a tf.function that was traced before, or changes a table"
        )
    return traced


def _describe(specs: Mapping[str, tf.TensorSpec]) -> dict[str, str]:
    return {name: f"{spec.dtype.name} {json.dumps(spec.shape.as_list())}" for name, spec in specs.items()}


def default_signatures(
    model: tf.keras.Model,
    collections: Sequence[EmbeddingCollection],
    *,
    label: str | None = None,
    text_ids: bool = True,
) -> Mapping[str, Signature]:
    """Choose the signatures of a model by its class.

    A `MetaModel` or a `MetaGRM` has those of `gmeta.export.meta_models`, and a `GRM`, a `NextItemModel`, a
    `TwoTower`, a `GenerativeRetriever` or a `FlatRetriever` those of `gmeta.export.sequence_models`. Any
    other model has one signature, which calls it with ``training=False``. Its inputs are a functional
    model's inputs, or else the features of the model's embedding collections; its answer is that of
    `predict`.

    Args:
      model: The model.
      collections: The embedding collections in the model.
      label: As for `gmeta.export.export_model`.
      text_ids: As for `gmeta.export.export_model`.

    Raises:
      ConfigError: The inputs can't be determined; or a label is given although answers already have names.
    """
    if label is not None and isinstance(model, MetaGRM | GRM | NextItemModel | TwoTower | FlatRetriever):
        raise ConfigError(
            f"{model.name}: label={label!r} has no use, because its answers have names: leave it out"
        )
    if isinstance(model, MetaGRM):
        return meta_sequence_signatures(model, text_ids=text_ids)
    if isinstance(model, MetaModel):
        of_logits = label is not None and takes_logits(model)
        return meta_signatures(model, answer=label or RATING, of_logits=of_logits)
    if isinstance(model, GRM):
        return exposure_signatures(model, text_ids=text_ids)
    if isinstance(model, GenerativeRetriever | FlatRetriever):
        return retrieval_signatures(model, text_ids=text_ids)
    if isinstance(model, NextItemModel):
        return next_item_signatures(model, text_ids=text_ids)
    if isinstance(model, TwoTower):
        return two_tower_signatures(model, text_ids=text_ids)
    return {DEFAULT_SIGNATURE: _own_call(model, collections, label)}


def takes_logits(model: tf.keras.Model) -> bool:
    """Return whether a model was compiled with a binary cross-entropy that takes logits."""
    loss = getattr(model, "loss", None)
    binary = tf.keras.losses.BinaryCrossentropy | tf.keras.losses.BinaryFocalCrossentropy
    return isinstance(loss, binary) and bool(loss.get_config().get("from_logits"))


def _own_call(
    model: tf.keras.Model, collections: Sequence[EmbeddingCollection], label: str | None
) -> Signature:
    def answer(outputs: Any) -> Any:
        if label is None:
            return outputs
        if not tf.is_tensor(outputs):
            raise ConfigError(
                f"{model.name} has several outputs, which have names: leave label={label!r} out"
            )
        if takes_logits(model):
            return {label: tf.sigmoid(outputs), f"{label}_logit": outputs}
        return {label: outputs}

    if getattr(model, "inputs", None):  # a functional model stores its inputs and their structure
        tensors = tf.nest.flatten(model.input)
        return Signature(
            lambda inputs: answer(
                model(
                    tf.nest.pack_sequence_as(model.input, [inputs[tensor.name] for tensor in tensors]),
                    training=False,
                )
            ),
            {tensor.name: tensor.type_spec for tensor in tensors},
        )
    if not collections:
        raise ConfigError(f"{model.name} has no inputs or features of its own: give signatures")
    features = [feature for collection in collections for feature in collection.features]
    return Signature(lambda inputs: answer(model(inputs, training=False)), feature_inputs(features))
