"""The contenders of the meta-learning benchmark: their versions, agreement and times."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from collections.abc import Callable

from harness import interleave
from parts.meta.case import Case, Form, assert_same
from parts.meta.gmeta_form import GMeta
from parts.meta.loop_form import LoopForm

LOOP, VMAP, LEARN2LEARN = "loop over tasks", "torch.func", "learn2learn"
COMPILED = f"{VMAP}, compiled"
MINIMUM = 0.25
"""The least seconds of a timed call, in whole steps."""


def contenders(case: Case, threads: int, compiled: bool) -> dict[str, Form]:
    """The contenders that are installed, gmeta first; all compute the same."""
    ours = GMeta(case)
    start = ours.start()
    found: dict[str, Form] = {"gmeta": ours, LOOP: LoopForm(case, start)}
    try:
        import torch
        from parts.meta.learn2learn_form import Learn2Learn, load_maml
        from parts.meta.vmap_form import VmapForm
    except ImportError:
        pass
    else:
        torch.set_num_threads(threads)
        found[VMAP] = VmapForm(case, start)
        if compiled:
            found[COMPILED] = VmapForm(case, start, compiled=True)
        if load_maml() is not None:
            found[LEARN2LEARN] = Learn2Learn(case, start)
    expected = ours.outer(0)
    for name, form in found.items():
        assert_same(expected, form.outer(0), name)
    return found


def seconds_a_step(forms: dict[str, Form], rounds: int) -> dict[str, float]:
    """Medians over rounds of calls of several steps."""
    counts, calls = {}, {}
    for name, form in forms.items():
        for number in range(3):
            start = time.perf_counter()
            form.step(number)
            taken = time.perf_counter() - start
        counts[name] = 1 if rounds == 1 else max(1, round(MINIMUM / taken))
        calls[name] = _steps(form, counts[name])
    found = interleave(calls, rounds=rounds, warm_up=min(2, rounds))
    return {name: taken / counts[name] for name, taken in found.items()}


def _steps(form: Form, count: int) -> Callable[[int], None]:
    def run(number: int) -> None:
        for step in range(number * count, (number + 1) * count):
            form.step(step)

    return run


def versions() -> dict[str, str]:
    """The versions of the frameworks; those that aren't installed are absent."""
    found = {}
    for name in ("tensorflow", "torch", "learn2learn"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # A folder on the path has no metadata.
            spec = importlib.util.find_spec(name)
            found[name] = "absent" if spec is None else "on the path"
    return found
