"""What ranks send each other comes back as it was, and bytes of another kind run no code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.collectives.wire import pack, pack_parts, unpack
from gmeta.core.errors import CollectiveError, ConfigError, DataError, GmetaError

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=20)
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.one_of(st.integers(), st.just("!"), st.tuples(st.integers())), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(values)
def test_values_come_back_with_their_types(value: Any) -> None:
    assert repr(unpack(pack(value))) == repr(value)


def test_arrays_and_errors_come_back() -> None:
    sent = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(0, np.int64), np.int32(7), np.array("é")]
    for one, other in zip(unpack(pack(sent)), sent, strict=True):
        assert one.dtype == other.dtype
        assert type(one) is type(other)
        np.testing.assert_array_equal(one, other)
    large = np.arange(5000, dtype=np.float64).reshape(2, 50, 50)[:, ::2].transpose(1, 0, 2)
    parts = pack_parts({"of": [large, np.zeros((0, 9000), np.uint8), b"x" * 9999, large[:1]]})
    assert sum(isinstance(part, memoryview) for part in parts) == 1  # large ones aren't copied
    for memory in (b"".join(parts), memoryview(bytearray(b"".join(parts)))):
        found = unpack(memory)["of"]
        for one, other in zip(
            found[:2] + found[3:], [large, np.zeros((0, 9000), np.uint8), large[:1]], strict=True
        ):
            np.testing.assert_array_equal(one, other)
            one[...] = 0  # they are the receiver's own
        assert found[2] == b"x" * 9999
    assert unpack(pack((DataError, GmetaError))) == (DataError, GmetaError)

    class OwnError(DataError):
        """One that another rank may not have."""

    assert unpack(pack(OwnError)) is DataError


def test_what_cannot_be_sent_is_named() -> None:
    for value in (object(), {1, 2}, [np.array([object()])], ValueError):
        with pytest.raises(ConfigError, match=r"a \w+ can't be sent to another process"):
            pack(value)


class Forged:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_forged_pickle_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    forged = pickle.dumps(Forged(tmp_path / "ran"))
    for data in (forged, len(forged).to_bytes(8, "little") + forged, b"", b"\0" * 8, pack([1])[:-1]):
        with pytest.raises(CollectiveError, match="aren't gmeta's message"):
            unpack(data)
    for crafted in (b'{"!": "array", "dtype": "O", "shape": [1], "begin": 0, "size": 8}', b'{"!": "system"}'):
        with pytest.raises(CollectiveError, match="aren't gmeta's message"):
            unpack(len(crafted).to_bytes(8, "little") + crafted + b"\0" * 8)
    assert not (tmp_path / "ran").exists()
