"""Preprocessing of raw files into prepared data sets: pure map and reduce functions, and engines to run them.

- `local` and `cluster`: the engines; `plan`: the functions that they run; `shards`: the files they write.
- `tables`, `movielens` and `synthetic`: where rows come from, by the interface of `source`.
- `config`, `table_spec`, `columns`, `summary` and `task_sizes`: settings, columns, and what was kept.
- `history`: stores of users' histories. `item_codes` and `cooccurrence`: semantic ids out of vectors.

Nothing here imports TensorFlow: a separate native library encodes the records.
"""

from gmeta.core.semantic_ids import SemanticIds
from gmeta.preprocess.cluster.spark_engine import prepare_on_spark
from gmeta.preprocess.config import PrepareConfig
from gmeta.preprocess.cooccurrence import cooccurrence_vectors
from gmeta.preprocess.history.append import AppendSummary, append_history
from gmeta.preprocess.history.example_sets import ExampleSet, drop_generations, list_examples, remove_examples
from gmeta.preprocess.history.example_writer import ExamplesSummary, history_examples
from gmeta.preprocess.history.export import ExportSummary, export_history
from gmeta.preprocess.history.rebuild import RebuildSummary, compact_history, scrub_history
from gmeta.preprocess.history.shard_reader import history_crcs
from gmeta.preprocess.history.spark_append import append_history_on_spark
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.item_codes import RqVae, semantic_ids
from gmeta.preprocess.local.preparation import prepare
from gmeta.preprocess.summary import PrepareSummary
from gmeta.preprocess.synthetic.exposures import EXPOSURE_SPEC, ExposureConfig, write_exposures
from gmeta.preprocess.synthetic.ratings import SyntheticConfig
from gmeta.preprocess.synthetic.simulator_config import SimulatorConfig, UserStates
from gmeta.preprocess.synthetic.user_simulator import UserHistories, UserSimulator
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

__all__ = [
    "EXPOSURE_SPEC",
    "AppendSummary",
    "ColumnSpec",
    "ExampleSet",
    "ExamplesSummary",
    "ExportSummary",
    "ExposureConfig",
    "HistorySpec",
    "PrepareConfig",
    "PrepareSummary",
    "RebuildSummary",
    "RqVae",
    "SemanticIds",
    "SimulatorConfig",
    "SyntheticConfig",
    "TableSpec",
    "UserHistories",
    "UserSimulator",
    "UserStates",
    "append_history",
    "append_history_on_spark",
    "compact_history",
    "cooccurrence_vectors",
    "drop_generations",
    "export_history",
    "history_crcs",
    "history_examples",
    "list_examples",
    "prepare",
    "prepare_on_spark",
    "remove_examples",
    "scrub_history",
    "semantic_ids",
    "write_exposures",
]
