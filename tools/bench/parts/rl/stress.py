"""How often GRPO and ECPO diverge if rollouts are stale and steps are large."""

from __future__ import annotations

import json
import math
import statistics
from argparse import Namespace
from collections.abc import Callable

from gmeta.models import GenerativeRetriever
from gmeta.reinforcement import ECPO, GRPO, Rollouts
from gmeta.reinforcement.rewards import Reward

import tensorflow as tf
from harness import Result
from parts.rl.simulated_users import SimulatedUsers
from parts.rl.stale_rollouts import StaleTraining

OPTIMIZERS = {"sgd": tf.keras.optimizers.SGD, "adam": tf.keras.optimizers.Adam}


def stress(
    given: Namespace,
    users: SimulatedUsers,
    sft: GenerativeRetriever,
    reward: Reward,
    measure: Callable[[GenerativeRetriever], float],
    group: int,
) -> list[Result]:
    """Train from SFT's weights with each method and seed, and count the runs that end worse than they began.

    Args:
      given: The options; ``stress_first`` is the first seed.
      users: The users for training.
      sft: The initial policy of each run.
      reward: The reward of training.
      measure: The measure by which policies are compared.
      group: The number of items of a user.
    """
    start, results = measure(sft), []
    print(json.dumps({"run": "start", "true": start}), flush=True)
    for name, objective in (("grpo", GRPO(kl=0.0)), ("ecpo", ECPO(kl=0.0))):
        rollouts = Rollouts(group, given.stress_sampling, weights="equal")
        training = StaleTraining(
            sft.copy_dense("policy"),
            reward,
            objective,
            rollouts=rollouts,
            updates=given.stress_updates,
            user="draw",
        )
        training.compile(OPTIMIZERS[given.stress_optimizer](given.stress_rate), nan="allow")
        training.optimizer.build(training.trainable_variables)
        runs = []
        for seed in range(given.stress_first, given.stress_first + given.seeds):
            _start_again(training, sft)
            runs.append(_train(training, users, given, seed, measure))
            print(json.dumps({"run": name, "seed": seed, **runs[-1]}), flush=True)
        results += _count(name, runs, start)
    return [*results, Result("rl/simulator/stress/sft", start, "probability")]


def _count(name: str, runs: list[dict[str, float]], start: float) -> list[Result]:
    path, seeds = f"rl/simulator/stress/{name}", f"of {len(runs)} seeds"
    ends = [run["true"] if math.isfinite(run["true"]) else 0.0 for run in runs]  # nothing can be drawn
    lost = sum(not math.isfinite(run["true"]) for run in runs)
    return [
        Result(f"rl/simulator/diverged/{name}", sum(end < start for end in ends), seeds),
        Result(f"{path}/not_finite", lost, seeds),
        Result(f"{path}/median", statistics.median(ends), "probability; 0 if not finite"),
        Result(f"{path}/worst", min(ends), "probability; 0 if not finite"),
        *(
            Result(
                f"{path}/{of}", statistics.median(run[of] for run in runs), f"largest {what}, median of runs"
            )
            for of, what in (("ratio", "π / π_old"), ("norm", "norm of a gradient"))
        ),
    ]


def _start_again(training: StaleTraining, sft: GenerativeRetriever) -> None:
    for own, first in zip(training.policy.trainable_variables, sft.trainable_variables, strict=True):
        own.assign(first)
    for variable in training.optimizer.variables:
        if variable is not training.optimizer.learning_rate:
            variable.assign(tf.zeros_like(variable))
    training.forget()


def _train(
    training: StaleTraining,
    users: SimulatedUsers,
    given: Namespace,
    seed: int,
    measure: Callable[[GenerativeRetriever], float],
) -> dict[str, float]:
    # Users draw by their ids: different ids for each seed give different draws, and the graph is traced once.
    data = users.histories(users.past, shuffle=seed).take(given.stress_steps)
    data = data.map(lambda x: {**x, "draw": x["user"] + (seed + 1) * 1_000_000}).cache()
    try:
        for done in range(0, given.stress_steps, given.stress_lag):
            training.catch_up()
            logs = training.fit(data.skip(done).take(given.stress_lag), verbose=0).history
        told, true = {of: float(logs[of][-1]) for of in ("reward", "tied", "kl")}, measure(training.policy)
    except tf.errors.InvalidArgumentError as error:  # no item can be drawn by NaN
        if "NaN or infinity" not in str(error):
            raise
        told, true = {}, math.nan
    return {"true": true, "ratio": float(training.objective.ratio), "norm": float(training.norm), **told}
