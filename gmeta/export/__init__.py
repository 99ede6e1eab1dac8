"""Exports trained models as SavedModels that stock TensorFlow Serving loads.

- `saved_model` writes the export, with default signatures, or those that `signature` describes.
- `meta_models` has the signatures of a `MetaModel`, and `delta_strings` encodes a task's deltas for them.
- `sequence_models` has the signatures of models over histories, and of states that keep what was read of
  these, for which `servers` has `StateCache`; `derived` computes the vectors of a catalogue
  that these hold, at export and for each delta.
- `model_server` serves exports by stock TensorFlow (`gmeta serve`), and `server_files` writes what servers
  need beside a SavedModel: warm-up requests, and model repositories of Triton.
- `adapted_users` keeps users' adapted weights in a store, and adapts users again whose samples have changed.
- `publisher` publishes a model while it trains: `model_deltas` encodes what has changed, `published_folder`
  names, lists and compacts the files, `delta_signatures` applies them in a server, and `delivery` sends them.
- `external_rows` makes signatures that take rows of tables larger than a server; `row_stores` holds these in
  Redis or RocksDB, where `delivery` sends them too.

Each name is loaded at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.core.imports import load_lazily

if TYPE_CHECKING:
    from gmeta.export.publisher import Publisher
    from gmeta.export.saved_model import export_model
    from gmeta.export.servers import StateCache

_WHERE = {
    "Publisher": "gmeta.export.publisher",
    "StateCache": "gmeta.export.servers",
    "export_model": "gmeta.export.saved_model",
}
"""Name -> the module that defines it."""

_MOVED = {
    "DEFAULT_SIGNATURE": "gmeta.export.signature",
    "Exported": "gmeta.export.saved_model",
    "PADDING": "gmeta.export.signature",
    "Signature": "gmeta.export.signature",
    "default_signatures": "gmeta.export.saved_model",
    "exposure_signatures": "gmeta.export.sequence_models",
    "feature_inputs": "gmeta.export.signature",
    "meta_sequence_signatures": "gmeta.export.meta_models",
    "meta_signatures": "gmeta.export.meta_models",
    "next_item_signatures": "gmeta.export.sequence_models",
    "retrieval_signatures": "gmeta.export.sequence_models",
    "unknown_rows": "gmeta.export.saved_model",
}
"""Old name -> the module that has it now, for one release."""

__all__ = ["Publisher", "StateCache", "export_model"]

__getattr__, __dir__ = load_lazily(__name__, _WHERE, _MOVED)
