"""For all tests: Keras 2 is selected before any of them imports TensorFlow, Keras is traced as it is,
Hypothesis is given time, draws are the same in every run, and what takes longest comes first.
"""

import os

# Each core runs a worker of pytest already: more threads of BLAS would only wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gc
import importlib.metadata
import importlib.util
import platform
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest

import gmeta  # noqa: F401
from gmeta.core.version import find_tensorflow

# A TensorFlow op's first call may take seconds, and a shared machine may stall: no deadline. The same
# examples every time, so that a red run is red again; `make test-all` draws more of them.
EXAMPLES = 50 if "GMETA_ALL_CASES" in os.environ else 20
hypothesis.settings.register_profile("gmeta", deadline=None, derandomize=True, max_examples=EXAMPLES)
hypothesis.settings.load_profile("gmeta")

# `tests/support`, for the processes that tests start.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)

# A shell makes what it starts with `&` ignore Ctrl-C, and the processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# GMETA_RANKS=gmeta runs all tests that start ranks without it.
HAS_HOROVOD = importlib.util.find_spec("horovod") is not None and os.environ.get("GMETA_RANKS") != "gmeta"
# It replaces parts of Horovod.
collect_ignore = [] if HAS_HOROVOD else ["core/collectives/test_rendezvous.py"]

# The files that take longest, longest first: a worker that began one of them last would let others wait.
LONGEST = (
    "native/test_native_cores.py",  # which compiles, when nothing is built
    "cli/test_own_data.py",
    "export/test_publisher.py",
    "test_pages.py",
    "io/service/test_distribute.py",
    "experiment/test_ranking.py",
    "export/test_export_meta.py",
    "models/sequence/test_growing_catalogue.py",
    "distributed/test_keras_on_ranks.py",
    "models/generative/test_flat_retriever.py",
    "export/test_export.py",
    "models/training/test_table_rule.py",
    "models/sequence/test_next_item.py",
    "models/sequence/test_grm.py",
    "models/training/test_windows.py",
    "models/training/memory/test_token_limit.py",
    "reinforcement/test_policy_training.py",
    "experiment/test_trainer.py",
    "cli/test_next_item.py",
    "models/training/test_nan_guard.py",
    "checkpoint/test_callback.py",
    "models/training/test_pipeline.py",
    "models/meta/test_fast_weights.py",
    "checkpoint/test_sharded.py",
    "io/readers/test_tasks.py",
    "models/training/pipeline/test_step_number.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order of `LONGEST`, then as they were found; without Horovod those that need it are skipped."""
    here = Path(__file__).parent
    leave_longer(items, here)
    places = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if not HAS_HOROVOD:
        skip = pytest.mark.skip(reason="there is no Horovod")
        for item in items:
            if item.get_closest_marker("horovod") is not None or "horovod" in _words(item):
                item.add_marker(skip)


def leave_longer(items: list[pytest.Item], tests: Path) -> None:
    """Mark as ``longer`` what `make test` leaves to `make test-longer`.

    ``@pytest.mark.shown_by("test_name")`` names a test of the same file that shows the same in less time. It
    may also name one elsewhere, ``"ops/test_x.py::test_name"``, or a folder of tests.
    ``@pytest.mark.shown_by(case="x-1")`` leaves out all cases but that one, and ``case=["x-1", "y-1"]`` all
    but these two.
    """
    cases: dict[tuple[Path, str, str], list[bool]] = {}
    for item in items:
        mark = item.get_closest_marker("shown_by")
        if mark is None:
            continue
        if "case" in mark.kwargs:
            quick = mark.kwargs["case"]
            kept = False
            for case in [quick] if isinstance(quick, str) else quick:
                found = item.name.endswith(f"[{case}]")
                cases.setdefault((item.path, item.originalname, case), []).append(found)  # type: ignore[attr-defined]
                kept |= found
        else:
            kept = False
            [quick] = mark.args
            file, _, name = quick.rpartition("::")
            path = tests / file if file else item.path
            shown = path.is_file() and f"def {name}(" in path.read_text()
            shown = shown or (tests / quick).is_dir()
            if not shown:
                raise pytest.UsageError(f"{item.nodeid} is shown by {quick!r}, which doesn't exist")
        if not kept:
            item.add_marker("longer")
    for (path, function, case), named in cases.items():
        if not any(named) and not any("::" in word for word in items[0].config.args):
            raise pytest.UsageError(f"{path}::{function} has no case {case!r}")


def _words(item: pytest.Item) -> list[str]:
    """The strings among a test's parameters, and in tuples of them: a tensor can't be compared with one."""
    found: list[object] = []
    for value in getattr(item, "callspec", SimpleNamespace(params={})).params.values():
        found += [*value] if isinstance(value, tuple) else [value]
    return [value for value in found if isinstance(value, str)]


def pytest_collection_finish() -> None:
    if "tensorflow" in sys.modules:
        from support.warm import tune_no_datasets

        tune_no_datasets()
    # A million objects of imported packages stay to the end. Looking through them for garbage, again and
    # again while functions are traced, was a tenth of the time.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or DuckDB prints what it finds alive when the process ends


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the tests ran on: a row of README's table."""
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("tf-keras", "numpy")]
    found = find_tensorflow()
    tensorflow = " ".join(found[:2]) if found is not None else "no TensorFlow"
    horovod = "with Horovod" if HAS_HOROVOD else "without Horovod"
    words = [tensorflow, *packages, f"Python {platform.python_version()}", horovod]
    terminalreporter.write_line(", ".join(words))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test, with what is made for it, draws the same numbers in every run: those of Keras' initial
    weights, where they have no seed of their own, come from `random`.
    """
    random.seed(0)
    np.random.seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After a file's last test, collect its garbage, and exempt what survives from later collections.

    TensorFlow keeps the graphs of functions whose models are gone: a million objects after a few files.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(params=["horovod", "gmeta"])
def ranks_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What brings ranks together that the test starts: Horovod, then gmeta's own store and lanes."""
    way: str = request.param
    monkeypatch.setenv("GMETA_RANKS", way)
    return way


@pytest.fixture(autouse=True)
def _no_seed_is_left() -> Iterator[None]:
    """A seed that a test sets for the process would shuffle the data of those that come after it."""
    yield
    tf = sys.modules.get("tensorflow")
    # Setting a seed, even none, drops all kernels, which eager code then makes again one by one.
    if tf is not None and tf.compat.v1.random.get_seed(None) != (None, None):
        tf.random.set_seed(None)
