"""Preprocessing of raw files into prepared data sets: pure map and reduce functions, and engines to run them.

`prepare` runs the whole preparation, `plan` holds the functions, and `duckdb_engine` runs them in this
process. Nothing here imports TensorFlow: a separate native library encodes the records.
"""

from gmeta.preprocess.cluster.spark_engine import prepare_on_spark
from gmeta.preprocess.config import PrepareConfig
from gmeta.preprocess.history.append import AppendSummary, append_history
from gmeta.preprocess.history.compact import CompactSummary, compact_history, drop_generations
from gmeta.preprocess.history.example_sets import ExampleSet, list_examples, remove_examples
from gmeta.preprocess.history.example_writer import ExamplesSummary, history_examples
from gmeta.preprocess.history.export import ExportSummary, export_history
from gmeta.preprocess.history.files.history_crc import history_crcs
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.local.preparation import prepare
from gmeta.preprocess.summary import PrepareSummary
from gmeta.preprocess.synthetic.exposures import EXPOSURE_SPEC, ExposureConfig, write_exposures
from gmeta.preprocess.synthetic.ratings import SyntheticConfig
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

__all__ = [
    "EXPOSURE_SPEC",
    "AppendSummary",
    "ColumnSpec",
    "CompactSummary",
    "ExampleSet",
    "ExamplesSummary",
    "ExportSummary",
    "ExposureConfig",
    "HistorySpec",
    "PrepareConfig",
    "PrepareSummary",
    "SyntheticConfig",
    "TableSpec",
    "append_history",
    "compact_history",
    "drop_generations",
    "export_history",
    "history_crcs",
    "history_examples",
    "list_examples",
    "prepare",
    "prepare_on_spark",
    "remove_examples",
    "write_exposures",
]
