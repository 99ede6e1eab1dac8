"""The tests that hold tables to what they promise hold those on a GPU to it too, where there is one."""

from collections.abc import Iterator

import pytest

from gmeta.ops.device import VARIABLE, Place, why_no_gpu


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def table_device(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Where tables are that don't say it."""
    if request.param == "gpu" and why_no_gpu():
        pytest.skip(why_no_gpu())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, request.param)
        yield request.param
