"""DuckDB's errors as ours: Ctrl-C stays an interrupt by whichever way it comes out of a query."""

import pytest

from gmeta.preprocess.tables.duckdb_text import arrow_batches, explain_errors


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("RuntimeError", "Query interrupted"),  # the Python package has seen the signal
        ("InterruptException", "INTERRUPT Error: Interrupted!"),  # DuckDB has
        ("Error", "INTERRUPT Error: Interrupted!"),  # and its text came through Arrow
    ],
)
def test_an_interrupt_is_one(tmp_path, kind, text):
    import duckdb

    with pytest.raises(KeyboardInterrupt), explain_errors(tmp_path):
        raise getattr(duckdb, kind, RuntimeError)(text)


def test_a_result_that_is_interrupted_among_its_batches_is_an_interrupt(tmp_path):
    import duckdb

    connection = duckdb.connect(":memory:")
    batches = arrow_batches(connection.sql("SELECT range AS x FROM range(100_000_000)"), 1000)
    next(batches)
    connection.interrupt()
    with pytest.raises(KeyboardInterrupt), explain_errors(tmp_path):
        list(batches)


def test_a_defect_of_ours_stays_one(tmp_path):
    with pytest.raises(RuntimeError, match="ours"), explain_errors(tmp_path):
        raise RuntimeError("ours")
