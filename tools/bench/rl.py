"""What reinforcement learning gains on simulated users, whose true click probabilities are known.

    python tools/bench/rl.py --json FILE

A retriever imitates users' histories (SFT). Then it is trained further by rewards, from the same weights: by
the true click probability of each item that it draws, and by that of a model of clicks that was trained on
the log (GRM on its exposures, by a mediocre policy). All are measured on new users: the mean true click
probability of the ten likeliest items, each user in the state after the history. The oracle knows that state,
which histories show only in part, so no policy reaches it.

reward/{sft,learned,true,oracle,logged}   that mean; ``logged`` is what the log's own policy shows
{learned,true}                            the gain over SFT as a share of the oracle's
{learned,true}/kl                         the divergence from SFT, estimated from the last epoch's draws
learned/gap                               how much the learned reward of these items is above the true one
learned/auc                               of the model of clicks, on the exposures of new users
diverged/{grpo,ecpo}                      the number of seeds that end with a true reward below SFT's, or NaN
stress/{grpo,ecpo}/{median,worst}         the true reward at the end of these runs
stress/{grpo,ecpo}/{ratio,norm}           the largest π / π_old and the largest norm of a gradient in a run

Both train by ECPO, each with its own weight of the divergence (--learned-kl, --kl): a learned reward is wrong
far from the log, and a policy exploits that.

For diverged and stress, each seed is a short run with the true reward under stress: the policy that draws is
renewed only every --stress-lag batches, each batch makes --stress-updates steps at a large --stress-rate, and
the loss has no divergence. The seed determines draws and the order of users. The rate was chosen with seeds 0
and 1, so the seeds begin at 2.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import get_args

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: F401, E402  (before TensorFlow)
from gmeta.models import GenerativeRetriever  # noqa: E402
from gmeta.reinforcement import ECPO, GRPO, PolicyTraining, Rollouts  # noqa: E402
from gmeta.reinforcement.rewards import ModelReward, Reward, SimulatorReward  # noqa: E402
from gmeta.reinforcement.rollouts import Sampling  # noqa: E402

import tensorflow as tf  # noqa: E402
from harness import Result, parser, report  # noqa: E402
from parts.rl.simulated_users import SimulatedUsers  # noqa: E402
from parts.rl.stress import OPTIMIZERS, stress  # noqa: E402
from parts.rl.trained_models import imitate, learn_clicks  # noqa: E402

GROUP, K = 16, 10
_SMALL = {"items": 1100, "users": 96, "events": 16, "pages": 2, "batch": 32, "seeds": 1}
_SHORT = {"sft_epochs": 1, "click_epochs": 1, "epochs": 1, "stress_steps": 2, "stress_lag": 2}


class Measure:
    """The mean reward of the items that a policy retrieves for new users."""

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
    """Train by the true reward and by a learned one, and compare both with the initial policy."""
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


def main() -> None:
    """Run both parts, or one."""
    options = parser(__doc__)
    sizes = {"items": 2000, "users": 6000, "events": 60, "pages": 6, "batch": 64}
    epochs = {"sft_epochs": 4, "click_epochs": 3, "epochs": 8}
    stressed = {"seeds": 10, "stress_first": 2, "stress_updates": 4, "stress_steps": 32, "stress_lag": 8}
    for name, value in {"seed": 0, **sizes, **epochs, **stressed}.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    for name, rate in {"rate": 2e-3, "kl": 0.03, "learned_kl": 0.03, "stress_rate": 0.6}.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=float, default=rate)
    options.add_argument("--stress-optimizer", choices=[*OPTIMIZERS], default="sgd")
    options.add_argument("--stress-sampling", choices=get_args(Sampling), default="without_replacement")
    options.add_argument("--parts", nargs="+", choices=["compare", "stress"], default=["compare", "stress"])
    given = options.parse_args()
    if given.smoke:
        vars(given).update(_SMALL | _SHORT)
    users = SimulatedUsers(given.seed, *(getattr(given, name) for name in sizes))
    sft = imitate(users, epochs=given.sft_epochs, seed=given.seed)
    measure = Measure(users, SimulatorReward(users.simulator, users.new.states))
    results = compare(given, users, sft, measure) if "compare" in given.parts else []
    if "stress" in given.parts:
        truth = SimulatorReward(users.simulator, users.past.states)
        results += stress(given, users, sft, truth, measure, GROUP)
    report("Policies of simulated users", results, given.json, group=GROUP, k=K)


if __name__ == "__main__":
    main()
