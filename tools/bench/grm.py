"""How fast a GRM trains, and how even its batches are over ranks.

    python tools/bench/grm.py --json FILE

Each rank reads its own sequences, whose lengths have a long tail (lognormal of sigma 0.9, cut to a mean of
570 and at most 3,000), and all wait for the rank with the most work.

fixed        batches of a fixed number of sequences
alg1_tokens  MTGenRec's algorithm 1, batches of about equally many tokens
alg1_flops   the same, of about equal cost

balance         a simulation: the largest cost of a rank's batch over the mean of the ranks', averaged over
                steps, in floating-point operations of HSTU; 1 is even
train           tokens a second of training `gmeta.models.GRM` (2 blocks of HSTU in its production form,
                experts, two towers, tables), 16 users a step with lengths as above, in one process. Its peer
                is the same model with its blocks over padded sequences, as in stock Keras: a dense mask, SiLU
                of the scores of all pairs. Both start from the same weights
loss            of both after the timed steps, to show that they are the same model
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2
from gmeta.io import SequenceCost
from gmeta.io.readers.balance import Costs

import numpy as np
from harness import Result, interleave, parser, report
from parts.balance_lengths import LONGEST, Lengths, balanced, lengths
from parts.grm_throughput import BACKBONES, batches, model

CASES = [  # width, sequences in a rank's batch, ranks
    (512, 480, 8),
    (512, 480, 64),
    (1024, 80, 4),
    (1024, 80, 8),
    (1024, 80, 64),
]


def unevenness(costs: Costs) -> float:
    """(ranks, steps): the largest over the mean, averaged over steps."""
    return float((costs.max(axis=0) / costs.mean(axis=0)).mean())


def cut(of_ranks: list[Lengths], batch: int, steps: int, cost: SequenceCost, by: SequenceCost) -> Costs:
    """(ranks, steps): the cost of batches that `prefix_batches` has cut by another cost."""
    target = float(np.mean([by.of(one).mean() for one in of_ranks])) * batch
    return np.array([[cost.of(one).sum() for one in balanced(own, by, target, steps)] for own in of_ranks])


def measure(dim: int, batch: int, ranks: int, steps: int) -> dict[str, float]:
    """Way -> unevenness."""
    cost, rng = SequenceCost.of_hstu(dim), np.random.default_rng(1)
    of_ranks = [lengths(rng, batch * (steps + 10)) for _ in range(ranks)]
    costs = np.array([cost.of(one[: steps * batch].reshape(steps, batch)) for one in of_ranks])
    ways: dict[str, Callable[[], Costs]] = {
        "fixed": lambda: costs.sum(axis=2),
        "alg1_tokens": lambda: cut(of_ranks, batch, steps, cost, SequenceCost()),
        "alg1_flops": lambda: cut(of_ranks, batch, steps, cost, cost),
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
    """Both."""
    given = parser(__doc__).parse_args()
    results = [*time_training(given.smoke, given.rounds), *simulate(given.smoke)]
    report("Generative ranking", results, given.json)


if __name__ == "__main__":
    main()
