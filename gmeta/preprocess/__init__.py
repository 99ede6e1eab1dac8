"""From raw files to prepared data sets: pure map and reduce functions, and the engines that run them.

`prepare` does the whole; `plan` holds the functions; `duckdb_engine` runs them in this process. Nothing here
imports TensorFlow: records are encoded by a native library of its own.
"""

from gmeta.preprocess.config import PrepareConfig as PrepareConfig
from gmeta.preprocess.local.preparation import prepare as prepare
from gmeta.preprocess.summary import PrepareSummary as PrepareSummary
from gmeta.preprocess.synthetic.ratings import SyntheticConfig as SyntheticConfig
from gmeta.preprocess.table_spec import ColumnSpec as ColumnSpec
from gmeta.preprocess.table_spec import TableSpec as TableSpec
