"""Preparation of data on a cluster, with Spark or Hadoop Streaming.

- `spark_engine` runs the plan on Spark; `spark_tables`, `spark_survey` and `spark_rows` are its input, its
  decisions on columns, and the work on rows.
- `streaming_jobs`: the Hadoop Streaming programs; `row_text` encodes rows.
- `table_input` and `table_job`: the table and the job as every worker sees them, and the shards of workers
  that may be killed or repeated.
"""

__all__: list[str] = []
