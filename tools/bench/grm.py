"""How fast a GRM trains, how even its batches are over ranks, and what that makes of steps.

    gmeta bench grm --json FILE

Each rank reads sequences of its own, with lengths of a long tail (lognormal of sigma 0.9, cut to a mean of
570 and at most 3,000), and all wait for the one that has most to do.

fixed        batches of a fixed number of sequences
alg1_tokens  MTGenRec's algorithm 1, batches of about equally many tokens
alg1_flops   the same, of about equal cost
kk           fixed batches whose sequences are dealt out anew over all ranks (Karmarkar and Karp)
kk_ahead     the same, of steps: the next batch is dealt out while this one computes

balance         a simulation: the largest cost of a rank's batch over the mean of the ranks', averaged over
                steps, in floating-point operations of HSTU; 1 is even
step            median milliseconds of a step of real ranks, processes on this machine. Computing is a sleep
                in proportion to the rank's floating-point operations, 200 ms for a mean batch, so that it
                takes no core: two cores do for four ranks. Dealing out, sending and the all-reduce at the end
                are real. A token has two int64 columns and a float32 one
kk_exchange     the part of kk's step in which it deals out and sends
karmarkar_karp  milliseconds in which the method deals out one global batch
train           tokens a second of training `gmeta.models.GRM` (2 blocks of HSTU in its production form,
                experts, two towers, tables), 16 users a step with lengths as above, in one process. Its peer
                is the same model with its blocks over padded sequences, as stock Keras has them: a dense
                mask, SiLU of the scores of all pairs. Both start from the same weights
loss            of both after the timed steps, to show that they are the same model
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2
from gmeta.io import SequenceCost
from gmeta.io.balance import Costs
from gmeta.io.rank_balance import rank_of_each
from support.reference.balance import karmarkar_karp

import numpy as np
import tensorflow as tf
from harness import Result, interleave, parser, report
from parts.balance_lengths import LONGEST, Lengths, balanced, lengths
from parts.grm_throughput import BACKBONES, batches, model
from parts.jobs import run_job

CASES = [  # width, sequences in a rank's batch, ranks
    (512, 480, 8),
    (512, 480, 64),
    (1024, 80, 4),
    (1024, 80, 8),
    (1024, 80, 64),
]
STEP = {"dim": 1024, "batch": 80, "steps": 40, "compute": 0.2}


def unevenness(costs: Costs) -> float:
    """(ranks, steps): the largest over the mean, averaged over steps."""
    return float((costs.max(axis=0) / costs.mean(axis=0)).mean())


def cut(of_ranks: list[Lengths], batch: int, steps: int, cost: SequenceCost, by: SequenceCost) -> Costs:
    """(ranks, steps): what batches cost that `prefix_batches` has cut by another cost."""
    target = float(np.mean([by.of(one).mean() for one in of_ranks])) * batch
    return np.array([[cost.of(one).sum() for one in balanced(own, by, target, steps)] for own in of_ranks])


def measure(dim: int, batch: int, ranks: int, steps: int) -> dict[str, float]:
    """Way -> unevenness."""
    cost, rng = SequenceCost.of_hstu(dim), np.random.default_rng(1)
    of_ranks = [lengths(rng, batch * (steps + 10)) for _ in range(ranks)]
    costs = np.array([cost.of(one[: steps * batch].reshape(steps, batch)) for one in of_ranks])
    dealt = []
    for step in range(steps):
        joint = costs[:, step].ravel()
        dealt.append(np.bincount(rank_of_each(tf.constant(joint), ranks).numpy(), joint, ranks))
    ways: dict[str, Callable[[], Costs]] = {
        "fixed": lambda: costs.sum(axis=2),
        "alg1_tokens": lambda: cut(of_ranks, batch, steps, cost, SequenceCost()),
        "alg1_flops": lambda: cut(of_ranks, batch, steps, cost, cost),
        "kk": lambda: np.array(dealt).T,
    }
    return {way: unevenness(make()) for way, make in ways.items()}


def simulate(smoke: bool) -> list[Result]:
    """How even batches are, in all cases."""
    results = []
    for dim, batch, ranks in [(8, 16, 4)] if smoke else CASES:
        found = measure(dim, batch, ranks, steps=5 if smoke else 60)
        for way, value in found.items():
            name = f"grm/balance/{way}/d{dim}/ranks{ranks}"
            peer = () if way == "fixed" else ("fixed batches", found["fixed"])
            results.append(Result(name, value, "max/mean", *peer))
    return results


def time_steps(smoke: bool) -> list[Result]:
    """How long steps take on real ranks."""
    ranks = 2 if smoke else 4
    settings = {**STEP, "steps": 3, "compute": 0.01} if smoke else STEP
    with tempfile.TemporaryDirectory() as folder:
        found = run_job("balance_rank", ranks, settings, Path(folder) / "found.json")
    results = []
    for way, value in found.items():
        peer = () if way in ("fixed", "kk_exchange") else ("fixed batches", found["fixed"])
        results.append(Result(f"grm/step/{way}/d{STEP['dim']}/ranks{ranks}", value, "ms", *peer))
    return results


def dealt(smoke: bool, rounds: int) -> list[Result]:
    """How long dealing out takes."""
    results = []
    for dim, batch, ranks in [(8, 16, 4)] if smoke else CASES:
        costs = SequenceCost.of_hstu(dim).of(lengths(np.random.default_rng(1), batch * ranks))
        tensor = tf.constant(costs)
        seconds = interleave(
            {
                "native": lambda _, tensor=tensor, ranks=ranks: rank_of_each(tensor, ranks).numpy(),
                "python": lambda _, costs=costs, ranks=ranks: karmarkar_karp(costs, ranks),
            },
            rounds=rounds,
            warm_up=1,
        )
        name = f"grm/karmarkar_karp/sequences{batch * ranks}/ranks{ranks}"
        results.append(Result(name, 1000 * seconds["native"], "ms", "Python", 1000 * seconds["python"]))
    return results


def time_training(smoke: bool, rounds: int) -> list[Result]:
    """How fast a model trains."""
    results = []
    for dim in (8,) if smoke else (64, 128):
        dataset, tokens = batches(1 if smoke else 3, 40 if smoke else LONGEST)
        models = {form: model(form, dim) for form in BACKBONES}
        losses = dict.fromkeys(models, 0.0)

        def epoch(_: int, form: str, models: Any = models, losses: Any = losses, data: Any = dataset) -> None:
            losses[form] = models[form].fit(data, verbose=0).history["loss"][-1]

        seconds = interleave({form: partial(epoch, form=form) for form in models}, rounds=rounds)
        away = abs(losses["jagged"] / losses["padded"] - 1)
        assert away < 1e-3, f"the losses differ by {away:.2g} of their size: {losses}"
        rates = [tokens / seconds[form] for form in models]
        peer = "padded Keras"
        results.append(Result(f"grm/train/d{dim}", rates[0], "tokens/s", peer, rates[1]))
        results.append(Result(f"grm/loss/d{dim}", losses["jagged"], "loss", peer, losses["padded"]))
    return results


def main() -> None:
    """All four."""
    given = parser(__doc__).parse_args()
    steps = time_steps(given.smoke)  # of ranks, which start before this process computes
    results = [*time_training(given.smoke, given.rounds), *simulate(given.smoke), *steps]
    report("Generative ranking", [*results, *dealt(given.smoke, given.rounds)], given.json)


if __name__ == "__main__":
    main()
