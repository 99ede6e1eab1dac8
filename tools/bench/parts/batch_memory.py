"""Peak memory of training steps of a GRM: the largest batch that fits, and actual batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gmeta.models import GRM
from gmeta.training.token_limit import FoundLimit, PeakMemory, measure_batches

import numpy as np
from harness import interleave
from parts.balance_lengths import Lengths
from parts.grm_throughput import EXPOSURES, batch, dataset
from parts.meta.memory import forget_peak, status_kib


def measured_limit(
    made: GRM,
    longest: int,
    sizes: Sequence[int],
    budget: float,
    memory: PeakMemory,
) -> FoundLimit:
    """The most tokens of sequences of the greatest length whose steps stay within a budget of bytes.

    The model is unchanged afterwards.
    """
    rng = np.random.default_rng(0)

    def worst(tokens: int) -> Any:
        whole, rest = divmod(tokens, longest)
        return batch(rng, np.array([longest] * whole + [rest] * (rest > EXPOSURES + 1)))

    return measure_batches(made, worst, sizes, budget, memory)


def host_memory() -> PeakMemory:
    """The most resident memory of the process while a function runs, above its present memory.

    Memory that the process has freed but keeps also counts, so a peak after a larger one is too high.
    """
    before = status_kib("VmRSS")

    def measure(run: Callable[[], object]) -> float:
        forget_peak()
        run()
        return 1024.0 * (status_kib("VmHWM") - before)

    return measure


def measured_steps(
    made: GRM, ways: dict[str, list[Lengths]], tokens: int, rounds: int, memory: PeakMemory
) -> dict[str, tuple[float, float]]:
    """Train on batches of each way, in turn, up to this many tokens.

    Returns:
      Way -> the peak of steps on its largest batch and others, in bytes; and tokens a second.
    """
    rng = np.random.default_rng(2)
    runs, counts, peaks = {}, {}, {}
    for way, of_epoch in ways.items():
        chosen = [max(of_epoch, key=lambda lengths: lengths.sum())]
        for place in rng.permutation(len(of_epoch)):
            if sum(lengths.sum() for lengths in chosen) < tokens:
                chosen.append(of_epoch[place])
        data = dataset([batch(rng, lengths.clip(EXPOSURES + 2)) for lengths in chosen])
        runs[way] = partial(made.fit, data, verbose=0)
        counts[way] = int(sum(lengths.sum() for lengths in chosen))
        runs[way]()  # tracing isn't a step's memory
        peaks[way] = memory(runs[way])
    seconds = interleave(
        {way: lambda _, run=run: run() for way, run in runs.items()}, rounds=rounds, warm_up=0
    )
    return {way: (peaks[way], counts[way] / seconds[way]) for way in ways}
