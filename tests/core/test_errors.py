"""Errors name what was received, where, and what to do."""

from __future__ import annotations

import pytest

from gmeta.core import errors
from gmeta.core.errors import DataError, GmetaError


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ({}, "bad"),
        ({"path": "u.data"}, "u.data: bad"),
        ({"path": "u.data", "line": 7}, "u.data:7: bad"),
        ({"path": "warm.tfrecord", "offset": 0}, "warm.tfrecord at byte 0: bad"),
        ({"path": "u.data", "line": 7, "advice": "mend it"}, "u.data:7: bad; mend it"),
        ({"advice": "mend it"}, "bad; mend it"),
    ],
)
def test_a_data_error_says_where(where: dict[str, object], text: str) -> None:
    assert str(DataError("bad", **where)) == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "{{function_node __wrapped__SaveV2_device_}} a/b; No space left [Op:SaveV2] name: \nmore",
            "a/b; No space left",
        ),
        ("  (0) INTERNAL: x is bad", "x is bad"),
        ("a [list] {{of}} words", "a [list] {{of}} words"),
        ("", "ValueError"),
    ],
)
def test_a_first_line_leaves_out_the_names_of_ops(said: str, told: str) -> None:
    assert errors.first_line(ValueError(said)) == told


def test_a_data_error_keeps_its_place() -> None:
    error = DataError("bad", path="u.data", line=7)
    assert (error.path, error.line, error.offset) == ("u.data", 7, None)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.DataError, ValueError),
        (errors.KerasError, ImportError),
        (errors.NativeLibraryError, ImportError),
    ],
)
def test_every_error_is_one_of_ours_and_the_builtin_that_callers_expect(
    error: type[GmetaError], builtin: type[Exception]
) -> None:
    assert issubclass(error, GmetaError)
    assert issubclass(error, builtin)
    assert error.exit_code == 2
