"""What reinforcement learning gains on simulated users, whose true click probabilities are known.

    gmeta bench rl --json FILE

A retriever imitates users' histories (SFT). Then it is trained further by rewards, from the same start: by
the true click probability of each item that it draws, and by that of a model of clicks that was trained on
what the log shows (GRM on its exposures, of a mediocre policy). All are measured on new users: the mean true
click probability of the ten likeliest items, each user in the state after the history. The oracle knows that
state, which histories tell only in part, so no policy reaches it.

reward/{sft,learned,true,oracle,logged}   that mean; ``logged`` is what the log's own policy shows
{learned,true}                            which share of the way from SFT to the oracle it has gone
{learned,true}/kl                         the divergence from SFT, estimated from the last epoch's draws
learned/gap                               how much the learned reward of these items is above the true one
learned/auc                               of the model of clicks, on what new users were shown
diverged/{grpo,ecpo}                      how many of the seeds end with a true reward below SFT's, or NaN
stress/{grpo,ecpo}                        the mean true reward at the end of these runs; and the worst

Both train by ECPO, each with its own weight of the divergence (--learned-kl, --kl): a learned reward is wrong
far from the log, and a policy finds where.

For the last, each seed is a short run with the true reward under stress: many updates of each rollout, a high
rate, independent draws, no divergence in the loss. The seed is that of draws and of the order of users.
"""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: F401, E402  (before TensorFlow)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from gmeta.models import GenerativeRetriever  # noqa: E402
from gmeta.reinforcement import (  # noqa: E402
    ECPO,
    GRPO,
    ModelReward,
    PolicyTraining,
    Reward,
    Rollouts,
    SimulatorReward,
)
from harness import Result, parser, report  # noqa: E402
from parts.rl.simulated_users import SimulatedUsers  # noqa: E402
from parts.rl.trained_models import imitate, learn_clicks  # noqa: E402

GROUP, K = 16, 10
_SMALL = {"items": 1100, "users": 96, "events": 16, "pages": 2, "batch": 32, "seeds": 1}
_SHORT = {"sft_epochs": 1, "click_epochs": 1, "epochs": 1, "stress_updates": 2}


class Measure:
    """The mean reward of what a policy retrieves for new users."""

    def __init__(self, users: SimulatedUsers, reward: Reward) -> None:
        self.data, self.reward = users.histories(users.new).cache(), reward

    def __call__(self, policy: GenerativeRetriever) -> float:
        """Return the mean over users and their ten likeliest items."""
        training = PolicyTraining(policy, self.reward, k=K)
        training.compile("sgd")
        return training.evaluate(self.data, verbose=0, return_dict=True)[f"reward@{K}"]


def train(
    sft: GenerativeRetriever,
    users: SimulatedUsers,
    reward: Reward,
    *,
    objective: GRPO,
    rollouts: Rollouts,
    epochs: int,
    rate: float,
    updates: int,
    measure: Measure,
    told: str,
) -> tuple[GenerativeRetriever, dict[str, float]]:
    """Train from SFT's weights; return the policy, what the last epoch reports, and the true reward."""
    policy = sft.copy_dense("policy")
    training = PolicyTraining(
        policy, reward, objective=objective, rollouts=rollouts, updates=updates, user="user", k=K
    )
    steps = epochs * updates * -(-users.users // users.batch)
    warm = steps // 10
    schedule = tf.keras.optimizers.schedules.CosineDecay(
        0.0, steps - warm, warmup_target=rate, warmup_steps=max(warm, 1)
    )
    training.compile(tf.keras.optimizers.Adam(schedule), nan="allow")
    found: dict[str, float] = {}
    for epoch in range(epochs):
        start, data = time.perf_counter(), users.histories(users.past, shuffle=97 * rollouts.seed + epoch)
        logs = training.fit(data, verbose=0).history
        found = {name: float(values[-1]) for name, values in logs.items()}
        found["true"] = measure(policy)
        found["seconds"] = time.perf_counter() - start
        print(json.dumps({"run": told, "epoch": epoch, **found}), flush=True)
    return policy, found


def compare(
    given: Namespace, users: SimulatedUsers, sft: GenerativeRetriever, measure: Measure
) -> list[Result]:
    """Train by the true reward and by a learned one, and compare them with where they start."""
    truth = SimulatorReward(users.simulator, users.past.states)
    clicks = learn_clicks(users, epochs=given.click_epochs, seed=given.seed)
    learned = ModelReward(clicks, attributes={"category": users.simulator.world.category})
    oracle = float(users.simulator.oracle(users.new.states, K).probabilities.mean())
    rewards = {"sft": measure(sft), "oracle": oracle, "logged": float(users.new.p_click.mean())}
    quality = clicks.evaluate(users.exposures(users.new), verbose=0, return_dict=True)["auc_ctr"]
    print(json.dumps({"run": "start", **rewards, "auc_of_learned": float(quality)}), flush=True)
    results = []
    kinds = {"learned": (learned, given.learned_kl), "true": (truth, given.kl)}
    for name, (reward, kl) in kinds.items():
        policy, found = train(
            sft,
            users,
            reward,
            objective=ECPO(kl=kl),
            rollouts=Rollouts(GROUP, "without_replacement", given.seed, weights="equal"),
            epochs=given.epochs,
            rate=given.rate,
            updates=2,
            measure=measure,
            told=name,
        )
        rewards[name] = found["true"]
        share = (found["true"] - rewards["sft"]) / (oracle - rewards["sft"])
        results.append(Result(f"rl/simulator/{name}", 100 * share, "% of the gap"))
        results.append(Result(f"rl/simulator/{name}/kl", found["kl"], "nats"))
        if name == "learned":
            believed = Measure(users, learned)(policy)
            results.append(Result("rl/simulator/learned/gap", believed - found["true"], "probability"))
    rows = [Result(f"rl/simulator/reward/{of}", value, "probability") for of, value in rewards.items()]
    return [*results, *rows, Result("rl/simulator/learned/auc", float(quality), "AUC")]


def stress(
    given: Namespace, users: SimulatedUsers, sft: GenerativeRetriever, measure: Measure
) -> list[Result]:
    """Count how often each method ends below its start, over seeds of draws."""
    truth = SimulatorReward(users.simulator, users.past.states)
    start, results = measure(sft), []
    for name, objective in (("grpo", GRPO(kl=0.0)), ("ecpo", ECPO(kl=0.0))):
        policy, ends = sft.copy_dense("policy"), []
        training = PolicyTraining(
            policy,
            truth,
            objective=objective,
            rollouts=Rollouts(GROUP, "sample"),
            updates=given.stress_updates,
            user="draw",
        )
        training.compile(tf.keras.optimizers.Adam(given.stress_rate), nan="allow")
        training.optimizer.build(training.trainable_variables)
        for seed in range(given.seeds):
            for own, first in zip(policy.trainable_variables, sft.trainable_variables, strict=True):
                own.assign(first)
            for variable in (training.optimizer.iterations, *_slots(training.optimizer)):
                variable.assign(tf.zeros_like(variable))
            # Users draw by their ids: other ids for each seed are other draws, and the graph is traced once.
            data = users.histories(users.past, shuffle=seed).take(given.stress_steps)
            data = data.map(lambda x, seed=seed: {**x, "draw": x["user"] + (seed + 1) * 1_000_000})
            logs = {of: float(v[-1]) for of, v in training.fit(data, verbose=0).history.items()}
            ends.append(measure(policy))
            print(json.dumps({"run": name, "seed": seed, **logs, "true": ends[-1]}), flush=True)
        bad = sum(not math.isfinite(end) or end < start for end in ends)
        results += [
            Result(f"rl/simulator/diverged/{name}", bad, f"of {given.seeds} seeds"),
            Result(f"rl/simulator/stress/{name}", float(np.mean(ends)), "probability"),
            Result(f"rl/simulator/stress/{name}/worst", float(np.min(ends)), "probability"),
        ]
    return results


def _slots(optimizer: tf.keras.optimizers.Optimizer) -> list[tf.Variable]:
    kept = {id(optimizer.iterations), id(optimizer.learning_rate)}
    return [variable for variable in optimizer.variables if id(variable) not in kept]


def main() -> None:
    """Run both parts, or one."""
    options = parser(__doc__)
    sizes = {"items": 2000, "users": 6000, "events": 60, "pages": 6, "batch": 64}
    epochs = {"sft_epochs": 4, "click_epochs": 3, "epochs": 8}
    stressed = {"seeds": 10, "stress_updates": 8, "stress_steps": 16}
    for name, value in {"seed": 0, **sizes, **epochs, **stressed}.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    for name, rate in {"rate": 2e-3, "kl": 0.03, "learned_kl": 0.03, "stress_rate": 1e-2}.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=float, default=rate)
    options.add_argument("--parts", nargs="+", choices=["compare", "stress"], default=["compare", "stress"])
    given = options.parse_args()
    if given.smoke:
        vars(given).update(_SMALL | _SHORT)
    users = SimulatedUsers(given.seed, *(getattr(given, name) for name in sizes))
    sft = imitate(users, epochs=given.sft_epochs, seed=given.seed)
    measure = Measure(users, SimulatorReward(users.simulator, users.new.states))
    runs = {"compare": compare, "stress": stress}
    results = [result for part in given.parts for result in runs[part](given, users, sft, measure)]
    report("Policies of simulated users", results, given.json, group=GROUP, k=K)


if __name__ == "__main__":
    main()
