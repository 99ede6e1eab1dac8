"""Compiled libraries: what they say of themselves, and how wrong ones are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gmeta.core import native
from gmeta.core.errors import NativeLibraryError

OP_LIBRARIES = ("ops", "io")


def altered(name: str, folder: Path, old: bytes, new: bytes) -> Path:
    """A copy of a library with some of its bytes replaced by as many others."""
    assert len(old) == len(new)
    image = native.library_path(name).read_bytes()
    assert old in image
    copy = folder / f"{name}.so"
    copy.write_bytes(image.replace(old, new))
    return copy


@pytest.mark.parametrize("name", OP_LIBRARIES)
def test_an_op_library_says_what_it_was_built_with(name: str) -> None:
    import tensorflow as tf

    info = native.build_info(native.library_path(name))
    assert info["tensorflow"] == tf.__version__
    assert info["cxx11_abi"] == str(tf.sysconfig.CXX11_ABI_FLAG)
    assert info["cuda"] in ("0", "1")
    assert info["compiler"]


@pytest.mark.parametrize("name", OP_LIBRARIES)
def test_an_op_library_loads_once(name: str) -> None:
    assert native.load_op_library(name) is native.load_op_library(name)


def test_a_library_built_against_another_tensorflow_is_refused_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    other = altered("ops", tmp_path, f"tensorflow={tf.__version__}".encode(), b"tensorflow=2.15.1")
    monkeypatch.setitem(native.LIBRARIES, "ops", other)
    native.load_op_library.cache_clear()
    with pytest.raises(NativeLibraryError) as caught:
        native.load_op_library("ops")
    said = str(caught.value)
    assert f"built against TensorFlow 2.15.1, but TensorFlow {tf.__version__} is installed" in said
    checkout = Path(__file__).resolve().parents[2]
    # Set-up would install the pinned TensorFlow instead of serving this one.
    assert said.endswith(
        f"rebuild it for that: `{sys.executable} setup.py build_ext --inplace` in {checkout}"
    )
    monkeypatch.setattr(native, "_PACKAGE", tmp_path / "site-packages" / "gmeta")
    with pytest.raises(NativeLibraryError, match=r"--no-deps \.` in gmeta's source$"):
        native.check_build(other)


def test_a_tensorflow_that_no_library_can_be_built_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    monkeypatch.setattr(tf, "__version__", "2.30.0")
    with pytest.raises(
        NativeLibraryError, match=r"^TensorFlow 2\.30\.0 is installed, but gmeta runs on 2\.16"
    ):
        native.check_build(native.library_path("ops"))


def test_a_library_of_the_other_abi_is_refused(tmp_path: Path) -> None:
    import tensorflow as tf

    abi = tf.sysconfig.CXX11_ABI_FLAG
    other = altered("ops", tmp_path, b";cxx11_abi=%d" % abi, b";cxx11_abi=%d" % (1 - abi))
    with pytest.raises(NativeLibraryError, match=f"_GLIBCXX_USE_CXX11_ABI={1 - abi}"):
        native.check_build(other)


def test_a_missing_library_says_how_to_build_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(native.LIBRARIES, "io", tmp_path / "_gmeta_io.so")
    with pytest.raises(NativeLibraryError, match=r"_gmeta_io\.so is missing: build it with `make setup`"):
        native.library_path("io")


def test_an_environment_may_keep_its_libraries_apart(tmp_path: Path) -> None:
    code = "from gmeta.core.native import LIBRARIES; print(*map(str, LIBRARIES.values()), sep='\\n')"
    environment = {**os.environ, "GMETA_LIBRARIES": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    names = ("_gmeta_ops.so", "_gmeta_io.so", "_gmeta_records.so")
    assert run.stdout.splitlines() == [str(tmp_path / name) for name in names]


def test_a_foreign_library_carries_no_build_information(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.so"
    foreign.write_bytes(b"\x7fELF and nothing of ours")
    with pytest.raises(NativeLibraryError, match="carries no build information"):
        native.build_info(foreign)


@pytest.mark.parametrize("kept", [0, 10, 64, -1])
@pytest.mark.parametrize("name", native.LIBRARIES)
def test_a_library_that_was_cut_short_is_refused(
    name: str, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = tmp_path / "cut.so"
    cut.write_bytes(native.library_path(name).read_bytes()[:kept])
    monkeypatch.setitem(native.LIBRARIES, name, cut)
    with pytest.raises(NativeLibraryError, match=r"cut.so is cut short or is no library: rebuild it"):
        native.library_path(name)


def test_a_library_that_does_not_load_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = altered("ops", tmp_path, b"libc.so.6", b"libc.so.9")
    monkeypatch.setitem(native.LIBRARIES, "ops", other)
    native.load_op_library.cache_clear()
    with pytest.raises(NativeLibraryError, match=r"doesn't load: .*libc\.so\.9.*; rebuild it"):
        native.load_op_library("ops")
