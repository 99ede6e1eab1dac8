"""Examines an installation: versions, Keras, native libraries, Horovod, GPUs.

Every check returns its result as a `Finding` and never raises, so one fault doesn't hide the next.
Checks that need TensorFlow import it themselves, so this module does not.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from packaging.requirements import Requirement

from gmeta.core import collectives, native
from gmeta.core.collectives.place import ONE, RANKS, check_alone, choice, uses_horovod
from gmeta.core.errors import ConfigError, NativeLibraryError
from gmeta.core.version import DISTRIBUTIONS, WANTED, __version__, find_tensorflow

_REINSTALL = "run `make setup` in a checkout, or `pip install .` in gmeta's source"


class Status(enum.Enum):
    """The outcome of a check."""

    OK = "ok"
    NOTE = "note"  # worth knowing; gmeta works without it
    BROKEN = "BROKEN"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      subject: The thing that was checked, such as ``tensorflow`` or ``library ops``.
      value: What was found.
      status: Whether that is good.
      remedy: What to do about it, if anything.
    """

    subject: str
    value: str
    status: Status = Status.OK
    remedy: str | None = None


def examine() -> list[Finding]:
    """Run all checks, each after the checks that it depends on.

    Returns:
      At least one finding per check; `Status.BROKEN` where gmeta can't work.
    """
    findings = [
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        Finding("gmeta", __version__),
        *_requirements(),
    ]
    try:
        import tensorflow as tf
    except Exception as error:  # a broken TensorFlow may raise any error
        return [
            *findings,
            Finding("tensorflow", f"import fails: {error}", Status.BROKEN, _REINSTALL),
            _records_library(),
            _ranks(),
        ]
    return [
        *findings,
        _keras(tf),
        *(_op_library(name) for name in native.LIBRARIES if name != "records"),
        _records_library(),
        _ranks(),
        _remote_paths(),
        _gpus(tf),
    ]


def _requirements() -> Iterator[Finding]:
    """Compare each package that pyproject.toml requires with the installed one."""
    try:
        lines = importlib.metadata.requires("gmeta") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "packages", "gmeta runs from its source without being installed", Status.NOTE, _REINSTALL
        )
        lines = [*WANTED, "numpy"]
    for requirement in map(Requirement, lines):
        # Extras are optional; their packages carry the marker `extra == "..."`.
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _requirement(requirement)


def _requirement(requirement: Requirement) -> Finding:
    install = f"pip install '{requirement.name}{requirement.specifier}'"
    version = _version(requirement.name)
    if version is None:
        return Finding(requirement.name, "not installed", Status.BROKEN, install)
    if not requirement.specifier.contains(version, prereleases=True):
        value = f"{version}, but gmeta needs {requirement.specifier}"
        return Finding(requirement.name, value, Status.BROKEN, install)
    return Finding(requirement.name, version)


def _version(name: str) -> str | None:
    """Return the version of a package; for TensorFlow, of whichever distribution is installed."""
    if name == DISTRIBUTIONS[0]:
        found = find_tensorflow()
        return found[1] if found else None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _keras(tf: ModuleType) -> Finding:
    package = tf.keras.Model.__module__.split(".")[0]  # tf.keras itself is a lazy loader without a name
    value = f"{package} {importlib.metadata.version(package)}"
    if package == "tf_keras":
        return Finding("keras in use", value)
    remedy = "export TF_USE_LEGACY_KERAS=1, or put `import gmeta` above `import tensorflow`"
    return Finding("keras in use", f"{value}, but gmeta needs tf_keras", Status.BROKEN, remedy)


def _library(name: str, load: Callable[[], str]) -> Finding:
    try:
        return Finding(f"library {name}", load())
    except NativeLibraryError as error:  # its message ends with the remedy
        return Finding(f"library {name}", str(error), Status.BROKEN)


def _op_library(name: str) -> Finding:
    def load() -> str:
        native.load_op_library(name)
        info = native.build_info(native.library_path(name))
        cuda = "CUDA" if info["cuda"] == "1" else "no CUDA (GMETA_CUDA=ON make setup compiles its kernels)"
        return f"loads; built against TensorFlow {info['tensorflow']}, compiler {info['compiler']}, {cuda}"

    return _library(name, load)


def _records_library() -> Finding:
    def load() -> str:
        path = native.library_path("records")
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeLibraryError(f"{path} doesn't load: {error}; rebuild it with `make setup`") from error
        return "loads; needs no TensorFlow"

    return _library("records", load)


def _ranks() -> Finding:
    version = collectives.horovod_version()
    try:
        if choice() == ONE:
            return Finding("ranks", f"this process alone, as {RANKS} says")
        check_alone("do the same work")
        used = uses_horovod()
    except ConfigError as error:  # its message ends with the remedy
        return Finding("ranks", str(error), Status.BROKEN)
    if version is None:
        value = "gmeta brings them together and its lanes carry all; Horovod is not installed"
        return Finding(
            "ranks", value, Status.NOTE, f"for horovodrun or mpirun: {collectives.horovod_advice()}"
        )
    if not used:
        return Finding("ranks", f"gmeta brings them together, as {RANKS} says; its lanes carry all")
    try:
        backends = collectives.built_backends()
    except ConfigError as error:
        remedy = f"or do without it: {RANKS}=gmeta"
        return Finding("ranks", str(error), Status.BROKEN, remedy)
    built = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in backends.items())
    return Finding("ranks", f"Horovod {version} brings them together; backends: {built}")


def _remote_paths() -> Finding:
    from gmeta.io.readers.remote import readable

    by = readable()
    listed = "; ".join(f"{', '.join(f'{name}://' for name in by[each])} by {each}" for each in by if by[each])
    if "fsspec" in by:
        return Finding("remote paths", f"{listed}; others by fsspec")
    return Finding("remote paths", f"{listed}; others need fsspec", Status.NOTE, "pip install fsspec")


def _gpus(tf: ModuleType) -> Finding:
    names = [
        tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name)
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    if names:
        return Finding("gpus", f"{len(names)}: {', '.join(names)}")
    return Finding("gpus", "none that TensorFlow can use; training runs on the CPU")
