"""Reading of tables of CSV, JSON and Parquet files.

- `table_source` reads tables as rows; `prepared_source` does the same for prepared data sets.
- `table_files`, `recognition`, `table_scan` and `structured_scan`: files, their formats and numbers of
  records, and the scan of each.
- `table_survey` and `type_survey` decide what a spec leaves open.
- `duckdb_text` is the SQL.
"""

__all__: list[str] = []
