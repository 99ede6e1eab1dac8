"""The tests that hold tables to what they promise hold those with rows on a drive to it too, and those on a
GPU, where there is one.
"""

from collections.abc import Iterator

import pytest

from gmeta.ops.device import VARIABLE, Place, why_no_gpu
from gmeta.policies import Tiers
from gmeta.testing.tables import put_on_a_drive


@pytest.fixture(scope="module", params=["cpu", "drive", "gpu"])
def table_device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where tables are that don't say it; on a "drive", no row stays in memory between two calls."""
    if request.param == "gpu" and why_no_gpu():
        pytest.skip(why_no_gpu())
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "drive":
            put_on_a_drive(patch, Tiers(host_bytes=1, ssd=str(tmp_path_factory.mktemp("rows"))))
        place: Place = "gpu" if request.param == "gpu" else "cpu"
        patch.setenv(VARIABLE, place)
        yield place
