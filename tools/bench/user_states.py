"""What a kept state saves: a request that scores candidates beside one that reads the whole history.

    python tools/bench/user_states.py
    python tools/bench/user_states.py --dim 512 --blocks 3 --tokens 3000 --candidates 256

A `GRM` with biases of times and experts, exported for stock TensorFlow; its signatures are called here
without a network. `predict` takes contexts, history and candidates, `score` a state and candidates, and
`read_on` a state and one event. Rounds take four users in turn.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import gmeta
from gmeta.core.row_formats import RowDtype
from gmeta.export import export_model
from gmeta.export.sequence_models import exposure_signatures, state_signatures
from gmeta.layers import FeatureConfig
from gmeta.models.sequence.user_states import StateFormat

import numpy as np
import tensorflow as tf
from harness import Result, interleave, parser, report

ITEMS, USERS = 10_000, 4


def columns(
    part: str, width: int, users: int, start: int, names: list[str], seed: int
) -> dict[str, tf.Tensor]:
    """The columns of a part, as clients send them."""
    random = np.random.default_rng(seed)
    found = {f"{part}_{name}": tf.constant(random.integers(0, ITEMS, (users, width))) for name in names}
    times = start + np.sort(random.integers(0, 10**6, (users, width)), axis=1)
    return {**found, f"{part}_time": tf.constant(times)}


def measure(arguments: Any, dtype: RowDtype, rounds: int) -> list[Result]:
    """The figures of one dtype of states."""
    model = gmeta.models.GRM.of(
        [FeatureConfig("city", dim=16), FeatureConfig("item", dim=64), FeatureConfig("action", dim=16)],
        contexts=["city"],
        history=["item", "action"],
        targets=["item"],
        time="time",
        dim=arguments.dim,
        blocks=arguments.blocks,
        heads=arguments.heads,
        max_length=arguments.tokens,
    )
    form = StateFormat(model, dtype)
    users, tokens, width = arguments.users, arguments.tokens, arguments.candidates
    batches = []
    for seed in range(USERS):
        city = {"contexts_city": tf.constant(np.full(users, seed), tf.int64)}
        history = columns("history", tokens, users, 0, ["item", "action"], seed)
        event = columns("history", 1, users, 10**7, ["item", "action"], seed + 100)
        targets = columns("targets", width, users, 10**8, ["item"], seed + 200)
        batches.append(({**city, **history}, event, targets))
    with tempfile.TemporaryDirectory() as folder:
        signatures = {**exposure_signatures(model), **state_signatures(model, dtype=dtype)}
        export_model(model, Path(folder, "1"), signatures=signatures)
        loaded = tf.saved_model.load(str(Path(folder, "1")))
        served = loaded.signatures
        states = [served["read"](**user)["state_bytes"] for user, _, _ in batches]
        off = []
        for (user, _, targets), state in zip(batches, states, strict=True):
            whole = served["predict"](**user, **targets)["click_logit"]
            scored = served["score"](state_bytes=state, **targets)["click_logit"]
            off.append(float(tf.reduce_max(tf.abs(scored - whole))))
        seconds = interleave(
            {
                "predict": lambda n: served["predict"](**batches[n % USERS][0], **batches[n % USERS][2]),
                "score": lambda n: served["score"](state_bytes=states[n % USERS], **batches[n % USERS][2]),
                "read_on": lambda n: served["read_on"](
                    state_bytes=states[n % USERS], **batches[n % USERS][1]
                ),
                "read": lambda n: served["read"](**batches[n % USERS][0]),
            },
            rounds=rounds,
        )
    size = form.fixed_bytes + (tokens + 1) * form.token_bytes
    whole = 1e3 * seconds["predict"]
    return [
        Result(f"user_states/{dtype}/state", size / 1e6, "MB"),
        Result(f"user_states/{dtype}/largest_difference", max(off), ""),
        Result(f"user_states/{dtype}/score", 1e3 * seconds["score"], "ms", "predict", whole),
        Result(f"user_states/{dtype}/read_on", 1e3 * seconds["read_on"], "ms", "predict", whole),
        Result(f"user_states/{dtype}/read", 1e3 * seconds["read"], "ms", "predict", whole),
    ]


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    for name, value, smallest, what in (
        ("dim", 256, 16, "the width of a token"),
        ("blocks", 2, 1, "blocks of HSTU"),
        ("heads", 4, 2, "heads of a block"),
        ("tokens", 1000, 20, "events of a history"),
        ("candidates", 64, 3, "candidates of a request"),
        ("users", 1, 1, "users of a request"),
    ):
        small = value if "--smoke" not in sys.argv else smallest
        options.add_argument(f"--{name}", type=int, default=small, help=f"{what} (default: {value})")
    given = options.parse_args()
    results = [result for dtype in get_args(RowDtype) for result in measure(given, dtype, given.rounds)]
    title = (
        f"{given.users} users of {given.tokens} events, {given.candidates} candidates; "
        f"{given.blocks} blocks of {given.dim}, {given.heads} heads"
    )
    report(title, results, given.json)


if __name__ == "__main__":
    main()
