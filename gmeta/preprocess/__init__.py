"""Preprocessing of raw files into prepared data sets: pure map and reduce functions, and engines to run them.

- `local` and `cluster`: the engines; `plan`: the functions that they run; `shards`: the files they write.
- `tables`, `movielens` and `synthetic`: the sources of rows, which implement the interface of `source`.
- `config`, `table_spec` and `summary`: settings, columns, and what was kept.
- `history`: stores of users' histories. `item_codes`: vectors of items, and semantic ids out of vectors.

Nothing here imports TensorFlow: a separate native library encodes the records.
"""

from gmeta.core.imports import load_lazily
from gmeta.preprocess.cluster.spark_engine import prepare_on_spark
from gmeta.preprocess.config import PrepareConfig
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.item_codes import cooccurrence_vectors, semantic_ids
from gmeta.preprocess.local.preparation import prepare
from gmeta.preprocess.synthetic.ratings import SyntheticConfig
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

_MOVED = {
    "AppendSummary": "gmeta.preprocess.history.append",
    "EXPOSURE_SPEC": "gmeta.preprocess.synthetic.exposures",
    "ExampleSet": "gmeta.preprocess.history.example_sets",
    "ExamplesSummary": "gmeta.preprocess.history.example_writer",
    "ExportSummary": "gmeta.preprocess.history.reading",
    "ExposureConfig": "gmeta.preprocess.synthetic.exposures",
    "PrepareSummary": "gmeta.preprocess.summary",
    "RebuildSummary": "gmeta.preprocess.history.rebuild",
    "RqVae": "gmeta.preprocess.item_codes",
    "SemanticIds": "gmeta.core.semantic_ids",
    "SimulatorConfig": "gmeta.preprocess.synthetic.user_law",
    "UserHistories": "gmeta.preprocess.synthetic.user_simulator",
    "UserSimulator": "gmeta.preprocess.synthetic.user_simulator",
    "UserStates": "gmeta.preprocess.synthetic.user_law",
    "append_history": "gmeta.preprocess.history.append",
    "append_history_on_spark": "gmeta.preprocess.history.cluster_append",
    "compact_history": "gmeta.preprocess.history.rebuild",
    "drop_generations": "gmeta.preprocess.history.example_sets",
    "export_history": "gmeta.preprocess.history.reading",
    "history_crcs": "gmeta.preprocess.history.shard_reader:history_crc_of_splits",
    "history_examples": "gmeta.preprocess.history.example_writer",
    "list_examples": "gmeta.preprocess.history.example_sets",
    "remove_examples": "gmeta.preprocess.history.example_sets",
    "scrub_history": "gmeta.preprocess.history.rebuild",
    "write_exposures": "gmeta.preprocess.synthetic.exposures",
}
"""Old name -> the module that has it now, for one release."""

__all__ = [
    "ColumnSpec",
    "HistorySpec",
    "PrepareConfig",
    "SyntheticConfig",
    "TableSpec",
    "cooccurrence_vectors",
    "prepare",
    "prepare_on_spark",
    "semantic_ids",
]

__getattr__, __dir__ = load_lazily(__name__, {}, _MOVED)
