"""`gmeta doctor`: what it says of a whole installation, and one line with a remedy for each broken thing."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from gmeta import ops, optimizers, policies
from gmeta.checkpoint.store import CheckpointStore
from gmeta.cli import doctor, doctor_memory, main
from gmeta.cli.doctor import parse_transports
from gmeta.cli.doctor_memory import Drive, TableSize, judge, judge_gpu, read_sizes
from gmeta.core import collectives, native
from gmeta.core.collectives import place
from gmeta.core.errors import ConfigError
from gmeta.core.terminal import Finding, Status
from support import warm


def find(subject: str) -> Finding:
    """The one finding about a subject."""
    (finding,) = [finding for finding in doctor.examine() if finding.subject == subject]
    return finding


def test_a_whole_installation() -> None:
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[-1] == "everything that gmeta needs works"
    for said in (
        "python ",
        "tensorflow ",
        "tf-keras ",
        "numpy ",
        "library ops ",
        "library io ",
        "gpus ",
        "remote paths ",
    ):
        assert sum(said in line for line in lines) == 1, said
    assert "keras in use" in done.output
    assert f"built against TensorFlow {importlib.metadata.version('tensorflow')}" in done.output


def test_horovods_backends_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod")
    monkeypatch.delenv("GMETA_RANKS", raising=False)
    assert "gloo yes" in find("ranks").value


def test_a_launcher_that_gmeta_does_not_join_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = doctor._ranks()
    assert found.status is Status.BROKEN
    assert "one of 4 by torchrun (WORLD_SIZE=4, RANK=0)" in found.value
    monkeypatch.setenv("GMETA_RANKS", "one")
    assert doctor._ranks() == Finding("ranks", "this process alone, as GMETA_RANKS says")


def test_no_horovod_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GMETA_RANKS", raising=False)
    for module in (collectives, place):
        monkeypatch.setattr(module, "horovod_version", lambda: None)
    for version, remedy in (
        ("2.18.1", "for horovodrun or mpirun: build it by `make setup`"),
        ("2.19.0", "take TensorFlow 2.18 or older: Horovod 0.28.1 doesn't build against 2.19.0"),
    ):
        monkeypatch.setattr(place, "find_tensorflow", lambda version=version: ("tensorflow", version, ""))
        finding = find("ranks")
        assert finding.status is Status.NOTE
        assert "gmeta brings them together" in finding.value
        assert finding.remedy is not None
        assert remedy in finding.remedy
    monkeypatch.setenv("GMETA_RANKS", "horovod")
    assert find("ranks").status is Status.BROKEN


def test_what_reads_remote_paths_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    finding = find("remote paths")
    assert "gs:// by TensorFlow" in finding.value
    assert "s3://, viewfs:// by pyarrow" in finding.value
    assert (finding.status, finding.remedy) == (Status.NOTE, "pip install fsspec")


def test_without_being_installed_the_versions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    monkeypatch.setattr(doctor, "find_tensorflow", lambda: ("tensorflow-cpu", "2.30.0", ""))
    finding = find("tensorflow")
    assert finding.value == "2.30.0, but gmeta needs <2.22,>=2.16.2"
    assert finding.remedy == "pip install 'tensorflow<2.22,>=2.16.2'"
    assert find("numpy").status is Status.OK


def test_a_horovod_that_does_not_load_is_broken_unless_ranks_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> dict[str, bool]:
        raise ConfigError("Horovod 0.28.1 doesn't load: undefined symbol; build it: `make setup`")

    monkeypatch.delenv("GMETA_RANKS", raising=False)
    for module in (collectives, place):
        monkeypatch.setattr(module, "horovod_version", lambda: "0.28.1")
    monkeypatch.setattr(collectives, "built_backends", broken)
    assert find("ranks").status is Status.BROKEN
    monkeypatch.setenv("GMETA_RANKS", "gmeta")
    assert find("ranks").status is Status.OK


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


# Quick: gmeta; of Horovod's, tests/distributed/test_collectives.py.
@pytest.mark.ranks
@pytest.mark.parametrize(
    "ranks_by", [pytest.param("horovod", marks=pytest.mark.slow), "gmeta"], indirect=True
)
@pytest.mark.shown_by("core/collectives")
def test_ranks_prove_their_collectives(ranks_by: str) -> None:
    command = [sys.executable, "-m", "gmeta", "doctor", "--np", "2"]
    said = warm.run(command)
    assert said.returncode == 0, said.stderr
    assert "Collectives on 2 ranks" in said.stdout
    assert any("in host memory" in line and "TCP, loopback" in line for line in said.stdout.splitlines())
    assert f"{'Horovod' if ranks_by == 'horovod' else ranks_by} " in said.stdout
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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints; the latest has 1,000 rows of 776 bytes and 300 of 40, of which 200 are half rows."""
    store = CheckpointStore(tmp_path_factory.mktemp("ck"))
    user = ops.HashTable(64, optimizers.Adam(0.1), name="user")
    user.lookup(np.arange(500))
    store.save({"user": user}, 1)
    user.lookup(np.arange(1000))
    item = ops.HashTable(8, optimizers.SGD(0.1), name="item", precision=policies.TwoPrecisions(3))
    for rows in (300, 100, 100):
        item.lookup(np.arange(rows))
    store.save({"user": user, "item": item}, 2)
    return store.root


def size_up(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, *options: object, memory: int, free: int = 0
) -> Result:
    """Call the command on a machine of that memory and drive without a GPU, where blocks take no memory."""
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("python", "3")])
    monkeypatch.setattr(doctor_memory, "available_memory", lambda: memory)
    monkeypatch.setattr(doctor_memory, "SEGMENT_BYTES", 0)
    monkeypatch.setattr(doctor_memory, "gpu_memory", lambda: None)
    monkeypatch.setattr(doctor_memory, "BLOCK_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    return CliRunner().invoke(main, ["doctor", "--checkpoint", str(checkpoint), *map(str, options)])


def test_rows_that_have_cooled_down_count_as_half(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    table = ops.HashTable(4, optimizers.SGD(0.1), name="t", precision=policies.TwoPrecisions(3, 8))
    for used in (300, 300, 200, 200, 100, 100, 100, 100, 100):  # 100 rows stay rare, 100 are used longer
        table.lookup(np.arange(used))
    halves = [-1]
    for _ in range(30):
        table.apply_gradients(np.array([0]), np.zeros((1, 4), np.float32))
        half_rows = int(table.statistics().half_rows)  # each step sweeps all shards
        if half_rows != halves[-1]:
            store.save({"t": table}, int(table.step()))
            (size,) = read_sizes(store.root / f"step-{int(table.step()):012d}")
            assert size.half_rows == half_rows
            halves.append(half_rows)
    assert {100, 200, 299} <= set(halves)


NEEDED = 1000 * 776 + 200 * 24 + 100 * 40 + 1300 * 28


def verdict(done: Result, subject: str = "tables") -> str:
    found = [re.sub(" +", " ", line) for line in done.output.splitlines()]
    (line,) = [line for line in found if f" {subject} this model needs" in line]
    return line


def test_tables_that_fit_in_memory(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    done = size_up(monkeypatch, checkpoints, memory=-(-NEEDED * 4 // 3))
    assert done.exit_code == 0, done.output
    said = re.sub(" +", " ", done.output)
    assert "step-000000000002\n" in said
    assert "ok table user 1,000 rows of 776 bytes: 776 kB, and 28 kB for their index\n" in said
    assert "ok table item 300 rows of 40 bytes, 200 of 24 in half precision: 8.8 kB, and 8.4 kB for" in said
    assert "ok host memory 1.09 MB available: 821 kB for tables" in said
    assert verdict(done) == (
        "ok tables this model needs 1,300 rows, 821 kB with their index; all of them fit in host memory"
    )
    assert verdict(size_up(monkeypatch, checkpoints / "step-000000000001", memory=10**6)).startswith(
        "ok tables this model needs 500 rows, 402 kB"
    )


def test_tables_that_need_tiers_name_them(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Path, tmp_path: Path
) -> None:
    done = size_up(monkeypatch, checkpoints, "--ssd", tmp_path, memory=800_000, free=10**7)
    assert done.exit_code == 0, done.output
    # 600,000 less 44 bytes a row; `user` has 776 of each 816 bytes of it, and `item` all of its rows
    share = 542_800 * 776 // 816 / 776_000
    files = 2 * (1 - share) * 1000 * (776 + 12)
    assert verdict(done) == (
        "note tables this model needs 1,300 rows, 821 kB with their index; "
        f"{(int(share * 1000) + 300) / 1300:.1%} of them fit in host memory, and the others on the drive, in "
        f"files of up to {files / 1e3:.3g} kB: give the tables "
        f"tiers=Tiers(host_bytes=542800, ssd='{tmp_path}')"
    )
    assert f"10 MB free in {tmp_path}\n" in done.output


def test_a_drive_without_twice_the_room_lacks_the_rest(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Path, tmp_path: Path
) -> None:
    done = size_up(monkeypatch, checkpoints, "--ssd", tmp_path, memory=800_000, free=500_000)
    assert done.exit_code == 1
    assert "but the drive lacks 27.7 kB" in verdict(done)
    assert done.output.splitlines()[-1] == "1 broken"


def test_without_a_drive_the_room_that_one_needs_is_named(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Path
) -> None:
    done = size_up(monkeypatch, checkpoints, memory=800_000)
    assert done.exit_code == 1
    assert verdict(done).endswith("name a folder on a fast local drive that has 528 kB free: --ssd FOLDER")


def test_memory_that_does_not_hold_the_index(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Path, tmp_path: Path
) -> None:
    done = size_up(monkeypatch, checkpoints, "--ssd", tmp_path, memory=70_000, free=10**12)
    assert done.exit_code == 1
    assert "57.2 kB stay in memory for the index of all rows, and 52.5 kB are available" in verdict(done)
    assert "add 6.27 kB of memory" in verdict(done)


ON_GPU = 768_000 + 200 * 16 + 100 * 32
INDEX_ON_GPU = 16 * (2048 + 1024) + 1300 * 16  # slots at most three quarters full; header, mark, place
GROWTH_ON_GPU = 16 * (1024 + 512) + 1300 * 8


def test_tables_that_fit_on_a_gpu(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    gpu = -(-(ON_GPU + INDEX_ON_GPU + GROWTH_ON_GPU) * 4 // 3)
    done = size_up(monkeypatch, checkpoints, "--gpu-bytes", gpu, memory=10**5)
    assert done.exit_code == 0, done.output
    assert verdict(done, "tables on a GPU") == (
        "ok tables on a GPU this model needs 1,300 rows, 844 kB with their index; "
        "all of them fit in the GPU's memory"
    )
    assert "ok gpu memory 1.17 MB available: 879 kB for tables" in re.sub(" +", " ", done.output)
    assert verdict(done).startswith("note tables")  # they needn't fit in host memory
    monkeypatch.setattr(doctor_memory, "gpu_memory", lambda: gpu)
    found = doctor_memory.examine_tables(checkpoints, None)
    assert [each.status for each in found if each.subject == "tables on a GPU"] == [Status.OK]


def test_tables_that_need_tiers_on_a_gpu_name_them(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Path, tmp_path: Path
) -> None:
    gpu = (400_000) * 4 // 3 + 1
    done = size_up(monkeypatch, checkpoints, "--gpu-bytes", gpu, memory=650_000)
    assert done.exit_code == 0, done.output
    rows = (400_000 - INDEX_ON_GPU - GROWTH_ON_GPU - 6400) // 768  # of `user`, beside all rows of `item`
    assert verdict(done, "tables on a GPU") == (
        f"note tables on a GPU this model needs 1,300 rows, 844 kB with their index; {rows + 300} of them "
        f"({(rows + 300) / 1300:.1%}) fit in the GPU's memory, and the others in "
        f"{(1000 - rows) * 768 / 1e3:.3g} kB of host memory: "
        f"give the tables device='gpu', tiers=Tiers(hbm_rows={rows})"
    )
    less = size_up(monkeypatch, checkpoints, "--gpu-bytes", gpu, memory=620_000)
    assert less.exit_code == 1
    assert "but the others take 480 kB of host memory, which lacks 15 kB: add 20 kB of memory" in verdict(
        less, "tables on a GPU"
    )
    drive = size_up(
        monkeypatch, checkpoints, "--gpu-bytes", gpu, "--ssd", tmp_path, memory=620_000, free=10**6
    )
    assert drive.exit_code == 0
    said = verdict(drive, "tables on a GPU")
    assert "the others in host memory and on the drive, in files of up to 30.5 kB" in said
    assert f"tiers=Tiers(host_bytes=465000, ssd='{tmp_path}', hbm_rows={rows})" in said
    full = size_up(
        monkeypatch, checkpoints, "--gpu-bytes", gpu, "--ssd", tmp_path, memory=620_000, free=10**4
    )
    assert "and files of up to 30.5 kB on the drive: add" in verdict(full, "tables on a GPU")


def test_a_gpu_that_does_not_hold_the_index(monkeypatch: pytest.MonkeyPatch, checkpoints: Path) -> None:
    done = size_up(monkeypatch, checkpoints, "--gpu-bytes", 90_000, memory=10**7)
    assert done.exit_code == 0  # they fit in host memory
    said = verdict(done, "tables on a GPU")
    assert said.startswith("note tables on a GPU")
    assert "the index of all rows takes 70 kB of the GPU's memory, 35 kB more while it grows" in said


SHAPES = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(1, 4096), st.floats(0, 1), st.booleans()),
    min_size=1,
    max_size=4,
)


@given(SHAPES, st.integers(1 << 24, 1 << 42))
def test_proposed_rows_on_a_gpu_are_the_most_that_fit(
    shapes: list[tuple[int, int, float, bool]], gpu: int
) -> None:
    tables = [
        TableSize(str(number), rows, floats, int(half * rows) if two else 0, two)
        for number, (rows, floats, half, two) in enumerate(shapes)
    ]

    def needed(hbm_rows: int) -> int:
        total = 0
        for table in tables:
            slots = 1024
            while slots * 0.75 < table.rows:
                slots *= 2
            numbers = (table.floats + 3) // 4 * 4
            full = -(-hbm_rows // 2) if table.two_precisions else hbm_rows
            grown = min(slots // 2, 1 << 20)  # slots that are there twice
            total += (4 << 20) + (slots + grown) * 16 + table.rows * 24
            total += min(table.half_rows, hbm_rows) * 2 * numbers
            total += min(table.rows - table.half_rows, full) * 4 * numbers
        return total

    found = judge_gpu(tables, gpu, 1 << 62)
    if found.status is Status.OK:
        assert needed(10**10) <= 0.75 * gpu
    elif found.status is Status.NOTE:
        rows = int(re.findall(r"hbm_rows=(\d+)", str(found.remedy))[0])
        assert needed(rows) <= 0.75 * gpu < needed(rows + 1) + 1
    else:
        assert needed(1) > int(0.75 * gpu)


def test_a_gpus_memory_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_memory.gpu_memory() is None
    command = tmp_path / "nvidia-smi"
    for script, expected in (
        ("echo 81000; echo 70000", 70_000 << 20),
        ("echo No devices were found; exit 6", None),
        ("echo '[N/A]'", None),
        ("true", None),
    ):
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        assert doctor_memory.gpu_memory() == expected


@given(
    st.lists(st.tuples(st.integers(0, 10**10), st.integers(1, 4096)), min_size=1, max_size=4),
    st.integers(1 << 20, 1 << 42),
)
def test_proposed_tiers_leave_a_quarter_of_memory(shapes: list[tuple[int, int]], memory: int) -> None:
    tables = [TableSize(str(number), *shape) for number, shape in enumerate(shapes)]
    rows = sum(table.rows for table in tables)
    found = judge(tables, memory, Drive(Path("rows"), 1 << 62))
    fits = sum(table.records for table in tables) + 28 * rows <= int(0.75 * memory)
    assert (found.status is Status.OK) == fits
    if found.status is Status.NOTE:
        host_bytes = int(re.findall(r"host_bytes=(\d+)", str(found.remedy))[0])
        assert host_bytes + (28 + 16) * rows + len(tables) * (32 << 20) <= 0.75 * memory
    elif not fits:
        assert "nor would they in tiers" in found.value
        more = sum(table.records for table in tables) + 28 * rows
        assert judge(tables, -(-more * 4 // 3), None).status is Status.OK


def test_available_memory_is_the_containers_if_that_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  2000 kB\nMemAvailable:  1000 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(doctor_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(doctor_memory, "_CGROUP", tmp_path)
    assert doctor_memory.available_memory() == 1_024_000
    for name, text in (("max", "900000"), ("current", "500000"), ("stat", "anon 5\ninactive_file 100000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert doctor_memory.available_memory() == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor_memory.available_memory() == 1_024_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--checkpoint", "{}/no"],
            "{}/no: no checkpoint here; name a checkpoint or a folder of checkpoints",
        ),
        (["--checkpoint", "{}", "--ssd", "{}/no"], "--ssd {}/no doesn't exist: name a folder on the drive"),
        (["--checkpoint", "{}", "--ssd", "{}/file"], "--ssd {}/file isn't a folder: name a folder on the"),
        (
            ["--ssd", "{}"],
            "--ssd {} is for the rows of a checkpoint: add --checkpoint FOLDER, or leave it out",
        ),
        (["--gpu-bytes", "9"], "--gpu-bytes 9 is for the rows of a checkpoint: add --checkpoint FOLDER"),
        (["--checkpoint", "{}", "--np", "2"], "--checkpoint {} is compared with this machine, and needs no"),
    ],
)
def test_what_cannot_be_sized_is_one_line(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(main, ["doctor", *(option.format(tmp_path) for option in options)])
    assert done.exit_code == 2
    assert done.output.startswith(f"gmeta: error: {said.format(tmp_path)}")
    assert done.output.count("\n") == 1


def test_sizes_need_no_tensorflow() -> None:
    code = "import sys, gmeta.cli.doctor_memory; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
