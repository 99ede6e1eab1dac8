"""The tests that hold tables to what they promise hold those with rows on a drive to it too, and, where there
is a GPU, those on it, also with rows in host memory and on a drive.
"""

from collections.abc import Iterator

import pytest

from gmeta.ops.device import VARIABLE, DeviceKind, why_no_gpu
from gmeta.policies import Tiers
from support.tables import give_tiers


@pytest.fixture(scope="module", params=["cpu", "drive", "gpu", "gpu over host", "gpu over drive"])
def table_device(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeviceKind]:
    """Where tables are that don't say it; on a "drive", no row stays in memory between two calls."""
    place: DeviceKind = "gpu" if request.param.startswith("gpu") else "cpu"
    if place == "gpu" and why_no_gpu():
        pytest.skip(why_no_gpu())
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "drive":
            give_tiers(patch, Tiers(host_bytes=1, ssd=str(tmp_path_factory.mktemp("rows"))))
        if request.param == "gpu over host":
            give_tiers(patch, Tiers(hbm_rows=1))  # a block of rows
        if request.param == "gpu over drive":
            give_tiers(patch, Tiers(host_bytes=1, ssd=str(tmp_path_factory.mktemp("rows")), hbm_rows=1))
        patch.setenv(VARIABLE, place)
        yield place
