"""A trained model as a SavedModel that stock TensorFlow Serving loads.

The graph has TensorFlow's own ops only. Every embedding table becomes a static hash table from key to row
number, and rows in a variable; an id that was never trained reads, by default, the row that training would
have started it with, which is computed in the graph (a pure function of seed and key).

Clients send tensors by name. A feature with several ids a sample is a dense (samples, width) tensor here, its
rows filled up with `PADDING`: of the forms that a ragged batch can take, this is the one that TensorFlow
Serving takes everywhere, because all inputs have the samples as their first dimension (REST's row format and
the server's own batching need that). Ids of a feature that hashes (``FeatureConfig(hash=True)``) are text
there, padded with the empty one, and the graph hashes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from gmeta.core.errors import ConfigError, GmetaError, NotFiniteError
from gmeta.core.staging import stage_folder
from gmeta.export.client_inputs import PADDING as PADDING
from gmeta.export.client_inputs import receive, wire_specs
from gmeta.export.defaults import default_signatures
from gmeta.export.signature import DEFAULT_SIGNATURE as DEFAULT_SIGNATURE
from gmeta.export.signature import OUTPUT
from gmeta.export.signature import Signature as Signature
from gmeta.export.signature import feature_inputs as feature_inputs
from gmeta.export.unknown_ids import Unknown, unknown_rows
from gmeta.layers import EmbeddingCollection
from gmeta.ops import HashTable, portable_ops


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
      folder: The SavedModel.
      signatures: Signature -> name of an input -> its dtype and shape, as clients send it.
      answers: Signature -> name of an output -> its dtype and shape.
      rows: Embedding rows, of all tables.
    """

    folder: Path
    signatures: Mapping[str, Mapping[str, str]]
    answers: Mapping[str, Mapping[str, str]]
    rows: int


def export_model(
    model: tf.keras.Model,
    folder: str | os.PathLike[str],
    *,
    signatures: Mapping[str, Signature] | None = None,
    unknown: Unknown = "initial",
    text_ids: bool = True,
    label: str | None = None,
) -> Exported:
    """Write a model as a SavedModel without custom ops.

    Args:
      model: Any Keras model; embedding collections may be anywhere in it.
      folder: To make. TensorFlow Serving expects ``<model>/<number>``, and takes a new number into service as
        soon as it appears; here it appears whole.
      signatures: What clients can ask, by name; the first is also served as `DEFAULT_SIGNATURE`. None:
        `gmeta.export.defaults` has them for every model.
      unknown: What an id reads that was never trained; see `gmeta.export.unknown_ids.Unknown`.
      text_ids: Whether clients send text for the inputs that are called as a feature that hashes. False:
        they send the numbers that ``gmeta prepare`` would store of it (`gmeta.ops.hash_text`). Where the
        model itself takes text, clients send text in either case.
      label: What the default signatures call the answer of an ordinary model with one output, or of a
        `MetaModel`. Where the compiled loss takes logits, that is the probability, and beside it stands
        ``<label>_logit``.

    Raises:
      NotFiniteError: Weights hold NaN or infinity.
      ConfigError: ``folder`` exists; inputs can't be told or sent; a signature inserts rows, or still has an
        op of gmeta in its graph.
      GmetaError: The folder can't be written.

    Example:
      ::

        export_model(model, "serving/my_model/1")
    """
    folder = Path(folder)
    if folder.exists():
        raise ConfigError(f"{folder} exists: name a new folder")
    parts = [model, *tf.train.TrackableView(model).descendants()]
    collections = [part for part in parts if isinstance(part, EmbeddingCollection)]
    chosen = signatures or default_signatures(model, collections, label=label, text_ids=text_ids)
    _check_finite(model)
    features = [feature for collection in collections for feature in collection.features]
    texts = {feature.name for feature in features if feature.hash and text_ids}
    with portable_ops(unknown_rows(unknown, collections)) as tables:
        traced = {name: _trace(name, signature, texts) for name, signature in chosen.items()}
        module = tf.Module()
        module.tables = list(tables)
    module.variables_read = list({id(v): v for f in traced.values() for v in f.variables}.values())
    # Lookup tables of preprocessing layers, say. The trained tables stay behind.
    module.resources = [
        part
        for part in parts
        if isinstance(part, tf.saved_model.experimental.TrackableResource) and not isinstance(part, HashTable)
    ]
    served = {DEFAULT_SIGNATURE: next(iter(traced.values())), **traced}
    with stage_folder(folder) as staging:
        try:
            tf.saved_model.save(module, str(staging), signatures=served)
        except tf.errors.OpError as error:
            raise GmetaError(f"can't write {folder}: {str(error).splitlines()[0]}") from error
    return Exported(
        folder,
        {name: _describe(wire_specs(signature.inputs, texts)) for name, signature in chosen.items()},
        {name: _describe(each.structured_outputs) for name, each in traced.items()},
        sum(table.size for table in module.tables),
    )


def _check_finite(model: tf.keras.Model) -> None:
    """A model that has diverged would answer NaN to everybody."""
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


def _trace(name: str, signature: Signature, texts: Collection[str]) -> tf.types.experimental.ConcreteFunction:
    specs = wire_specs(signature.inputs, texts)

    @tf.function(autograph=False)
    def serve(**inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        outputs = signature.function(
            {key: receive(inputs[key], spec) for key, spec in signature.inputs.items()}
        )
        return dict(outputs) if isinstance(outputs, Mapping) else {OUTPUT: outputs}

    traced = serve.get_concrete_function(**specs)
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
