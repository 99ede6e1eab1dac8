"""Reading of tables of CSV, JSON and Parquet files.

- `table_source` reads tables as rows; `prepared_source` does the same for prepared data sets.
- `table_files`, `table_scan`, `json_scan` and `parquet_scan`: files, their formats, and the scan of each.
- `table_survey` and `type_survey` decide what a spec leaves open.
- `record_count` counts records, so that none is lost unnoticed, and `duckdb_text` is the SQL.
"""

__all__: list[str] = []
