"""`gmeta doctor`: what it says of a whole installation, and one line with a remedy for each broken thing."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gmeta.cli import installation as doctor
from gmeta.cli import main
from gmeta.cli.installation import Finding, Status
from gmeta.cli.nccl_log import parse_transports
from gmeta.core import collectives, native
from gmeta.core.errors import ConfigError
from gmeta.testing.jobs import warm


def find(subject: str) -> Finding:
    """The one finding about a subject."""
    (finding,) = [finding for finding in doctor.examine() if finding.subject == subject]
    return finding


def test_a_whole_installation() -> None:
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[-1] == "everything that gmeta needs works"
    for said in ("python ", "tensorflow ", "tf-keras ", "numpy ", "library ops ", "library io ", "gpus "):
        assert sum(said in line for line in lines) == 1, said
    assert "keras in use" in done.output
    assert f"built against TensorFlow {importlib.metadata.version('tensorflow')}" in done.output


def test_horovods_backends_are_named() -> None:
    pytest.importorskip("horovod")
    assert "gloo yes" in find("horovod").value


def test_no_horovod_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "horovod_version", lambda: None)
    finding = find("horovod")
    assert finding.status is Status.NOTE
    assert finding.remedy is not None
    assert "make setup" in finding.remedy


def test_a_horovod_that_does_not_load_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, bool]:
        raise ConfigError("Horovod 0.28.1 doesn't load: undefined symbol; build it: `make setup`")

    monkeypatch.setattr(collectives, "horovod_version", lambda: "0.28.1")
    monkeypatch.setattr(collectives, "built_backends", broken)
    assert find("horovod").status is Status.BROKEN


def test_a_missing_library_is_one_line_with_its_remedy_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(native.LIBRARIES, "records", tmp_path / "_gmeta_records.so")
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    (line,) = [line for line in done.output.splitlines() if line.startswith("BROKEN")]
    assert "library records" in line
    assert "make setup" in line
    assert done.output.splitlines()[-1] == "1 broken"


def test_a_damaged_records_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "_gmeta_records.so"
    image = native.library_path("records").read_bytes()
    damaged.write_bytes(image.replace(b"libc.so.6", b"libc.so.9"))
    monkeypatch.setitem(native.LIBRARIES, "records", damaged)
    finding = find("library records")
    assert finding.status is Status.BROKEN
    assert "doesn't load" in finding.value


@pytest.mark.parametrize(
    ("requirement", "said", "remedy"),
    [
        ("click>=99", "but gmeta needs >=99", "pip install 'click>=99'"),
        ("gmeta-is-never-this>=1", "not installed", "pip install 'gmeta-is-never-this>=1'"),
    ],
)
def test_an_unmet_requirement_is_broken(
    monkeypatch: pytest.MonkeyPatch, requirement: str, said: str, remedy: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: [requirement, "absent>=1; extra == 'dev'"])
    (broken,) = [finding for finding in doctor.examine() if finding.status is Status.BROKEN]
    assert said in broken.value
    assert broken.remedy == remedy


@pytest.mark.ranks
def test_ranks_prove_their_collectives() -> None:
    command = [sys.executable, "-m", "gmeta", "doctor", "--np", "2"]
    said = warm.run(command)
    assert said.returncode == 0, said.stderr
    assert "Collectives on 2 ranks" in said.stdout
    assert any("in host memory" in line and "TCP, loopback" in line for line in said.stdout.splitlines())
    for name in ("barrier", "alltoall", "allreduce_sum", "broadcast_variables", "allgather_objects"):
        assert name in said.stdout
    assert said.stdout.count(importlib.metadata.version("tensorflow")) >= 3  # the installation, and each rank


def test_nccls_log_says_how_gpus_are_connected() -> None:
    log = """
host:1:2 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 24, bw 20.0/20.0, type NVL/PIX, sameChannels 1
host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
host:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
host:1:2 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [receive] via NET/IB/3/GDRDMA
host:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
"""
    assert parse_transports(log) == ["P2P/CUMEM/read over NVLink", "NET/IB/GDRDMA", "SHM/direct/direct"]
    assert parse_transports("") == []
