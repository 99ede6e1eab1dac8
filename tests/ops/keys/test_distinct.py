from __future__ import annotations

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from gmeta.core.errors import ConfigError
from gmeta.ops.distinct import unique

INT64 = np.iinfo(np.int64)


@given(
    ids=hnp.arrays(
        np.int64,
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
        elements=st.one_of(st.integers(-4, 4), st.sampled_from([INT64.min, INT64.max])),
    )
)
def test_keys_come_in_the_order_of_first_appearance_and_the_inverse_leads_back(table_device, ids):
    keys, inverse = (tensor.numpy() for tensor in unique(ids, device=table_device))
    assert keys.tolist() == list(dict.fromkeys(ids.reshape(-1).tolist()))
    assert inverse.dtype == np.int32
    np.testing.assert_array_equal(keys[inverse], ids)


def test_ids_must_be_integers():
    with pytest.raises(ConfigError, match=r"unique: ids must be integers \(int64\), got dtype bool"):
        unique([True])
