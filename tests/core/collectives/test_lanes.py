"""Which lanes a job may use, and at which addresses its ranks meet."""

from __future__ import annotations

import dataclasses
import platform
import socket
from pathlib import Path

import pytest

from gmeta.core.collectives import wire
from gmeta.core.collectives.lane import Gpu, can_use_nccl, choose_lane, lane_key
from gmeta.core.collectives.rendezvous import SECRET
from gmeta.core.errors import ConfigError
from gmeta.core.launcher.meeting import meet_by_horovod

HERE = ("host", "boot")
GPUS = [Gpu(True, "0000:01:00.0", 22304), Gpu(True, "0000:02:00.0", 22304)]


def test_ranks_with_a_gpu_each_use_nccl() -> None:
    assert can_use_nccl([HERE, HERE], GPUS)
    assert can_use_nccl([HERE, ("other", "boot")], [GPUS[0], GPUS[0]])


@pytest.mark.parametrize(
    "change", [{"seen": False}, {"why": "no libnccl.so.2"}, {"version": 22105}, {"address": GPUS[0].address}]
)
def test_one_rank_without_its_own_keeps_all_from_nccl(change: dict[str, object]) -> None:
    assert not can_use_nccl([HERE, HERE], [GPUS[0], dataclasses.replace(GPUS[1], **change)])  # type: ignore[arg-type]


def test_auto_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GMETA_LANE", raising=False)
    assert choose_lane() == "auto"
    monkeypatch.setenv("GMETA_LANE", "nccl")
    with pytest.raises(ConfigError, match="GMETA_LANE='nccl': give one of auto, tcp, horovod"):
        choose_lane()


def test_the_key_of_a_lane_is_made_of_the_jobs_secret_and_the_lanes_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = []
    for secret in (None, "one", "other"):
        monkeypatch.delenv(SECRET, raising=False)
        if secret is not None:
            monkeypatch.setenv(SECRET, secret)
        keys += [lane_key("a"), lane_key("b")]
    assert len(set(keys)) == 6
    assert {len(key) for key in keys} == {32}


@pytest.mark.horovod
def test_ranks_that_horovod_introduces_have_a_secret_for_their_lanes() -> None:
    with meet_by_horovod(2) as environments:
        (secret,) = {each[SECRET] for each in environments}
        assert len(secret) == 64
        assert secret not in environments[0]["HOROVOD_GLOO_RENDEZVOUS_ADDR"]


def test_ranks_of_one_machine_meet_on_loopback() -> None:
    assert wire.choose_addresses(local=True) == ("127.0.0.1", "127.0.0.1")


def test_ranks_of_several_machines_meet_at_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    bound, told = wire.choose_addresses(local=False)
    assert bound == ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    assert told == platform.node()
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    assert wire.choose_addresses(local=False) == ("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "none0")
    with pytest.raises(ConfigError, match=r"HOROVOD_GLOO_IFACE='none0' on .* has no address"):
        wire.choose_addresses(local=False)


def test_an_interface_of_ipv6_alone_has_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "if_inet6"
    listed.write_text(
        "fe800000000000000000000000000001 05 40 20 80  gmeta6\n"
        "20010db8000000000000000000000007 05 40 00 80  gmeta6\n"
    )
    monkeypatch.setattr(wire, "_IPV6", listed)
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "gmeta6")
    assert wire.choose_addresses(local=False) == ("2001:db8::7", "2001:db8::7")
