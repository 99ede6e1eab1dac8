"""What a kept state saves: a request that is answered from it beside one that reads the whole history.

    python tools/bench/user_states.py
    python tools/bench/user_states.py --kind size --dim 512 --blocks 3 --heads 8 --tokens 3000
    python tools/bench/user_states.py --kind next-item --dtypes bfloat16
    python tools/bench/user_states.py --kind quality --dim 64 --blocks 3 --heads 1 --json FILE

Models are exported for stock TensorFlow; their signatures are called here without a network, and rounds take
four users in turn. A state's size is that of the bytes which `read` returns.

grm         a `GRM` with biases of times and experts. `predict` takes contexts, history and candidates,
            `score` a state and candidates, and `read_on` a state and one event
next-item   a `NextItemModel` with biases of times and ``places="from_start"``. `recommend` takes the
            history, `recommend_on` a state. from_end has ``places="from_end"``, whose states hold no keys
            and values
size        the bytes of a `GRM`'s state of one user, of the formula and of what `read` returns
quality     GAUC of a small `GRM` from states of each dtype beside that of whole sequences, on new users of a
            generated log (`gmeta.preprocess.synthetic.exposures`) with one page of exposures a user
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import gmeta
from gmeta.core.row_formats import RowDtype
from gmeta.export import export_model
from gmeta.export.sequence_models import exposure_signatures, next_item_signatures, state_signatures
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig
from gmeta.models import UserStates

import numpy as np
import tensorflow as tf
from harness import Result, interleave, parser, report
from parts.state_quality import state_quality

ITEMS, USERS = 10_000, 4


def columns(
    part: str, width: int, users: int, start: int, names: list[str], seed: int
) -> dict[str, tf.Tensor]:
    """The columns of a part, as clients send them."""
    random = np.random.default_rng(seed)
    found = {f"{part}_{name}": tf.constant(random.integers(0, ITEMS, (users, width))) for name in names}
    times = start + np.sort(random.integers(0, 10**6, (users, width)), axis=1)
    return {**found, f"{part}_time": tf.constant(times)}


def make_grm(arguments: Any) -> gmeta.models.GRM:
    """A model that ranks exposures."""
    return gmeta.models.GRM.of(
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


def measure_size(arguments: Any, dtypes: list[RowDtype]) -> list[Result]:
    """The bytes of a state that was read, beside those of the formula."""
    model, results = make_grm(arguments), []
    history = columns("history", arguments.tokens, 1, 0, ["item", "action"], 0)
    ragged = {
        name.removeprefix("history_"): tf.RaggedTensor.from_tensor(each) for name, each in history.items()
    }
    batch = {"contexts": {"city": tf.zeros([1], tf.int64)}, "history": ragged}
    for dtype in dtypes:
        states = UserStates(model, dtype)
        told = states.format.fixed_bytes + (arguments.tokens + 1) * states.format.token_bytes
        size = len(states.read(batch).numpy()[0])
        results.append(Result(f"user_states/{dtype}/bytes", size, "bytes", "formula", told))
    return results


def measure_grm(arguments: Any, dtype: RowDtype, rounds: int) -> list[Result]:
    """The figures of one dtype of states of a model that ranks exposures."""
    model = make_grm(arguments)
    form = UserStates(model, dtype).format
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
    size = len(states[0].numpy()[0])
    if size != form.fixed_bytes + (tokens + 1) * form.token_bytes:
        raise AssertionError(f"a state has {size} bytes, and not those of the formula")
    whole = 1e3 * seconds["predict"]
    return [
        Result(f"user_states/{dtype}/state", size / 1e6, "MB"),
        Result(f"user_states/{dtype}/largest_difference", max(off), ""),
        Result(f"user_states/{dtype}/score", 1e3 * seconds["score"], "ms", "predict", whole),
        Result(f"user_states/{dtype}/read_on", 1e3 * seconds["read_on"], "ms", "predict", whole),
        Result(f"user_states/{dtype}/read", 1e3 * seconds["read"], "ms", "predict", whole),
    ]


def measure_next_item(arguments: Any, dtype: RowDtype, places: Any, rounds: int) -> list[Result]:
    """The figures of one dtype of states of a model of the next item."""
    tokens, wide = arguments.tokens, arguments.dim // arguments.heads
    hstu = HSTU(
        blocks=arguments.blocks,
        heads=arguments.heads,
        attention_dim=wide,
        value_dim=wide,
        max_length=2 * tokens,
    )
    model = gmeta.models.NextItemModel(
        EmbeddingCollection([FeatureConfig("item", dim=arguments.dim)]),
        hstu,
        items=ITEMS,
        max_length=2 * tokens,
        time="time",
        places=places,
    )

    def drawn(seed: int, width: int, start: int) -> dict[str, tf.Tensor]:
        found = columns("history", width, arguments.users, start, ["item"], seed)
        return {name.removeprefix("history_"): each for name, each in found.items()}

    batches = [(drawn(seed, tokens, 0), drawn(seed + 100, 1, 10**7)) for seed in range(USERS)]
    with tempfile.TemporaryDirectory() as folder:
        export_model(model, Path(folder, "1"), signatures=next_item_signatures(model, states=dtype))
        loaded = tf.saved_model.load(str(Path(folder, "1")))
        served = loaded.signatures
        states = [served["read"](**user)["state_bytes"] for user, _ in batches]
        off = []
        for (user, event), state in zip(batches, states, strict=True):
            later = {name: tf.concat([user[name], event[name]], axis=1) for name in user}
            whole = served["recommend"](**later)
            after = served["read_on"](state_bytes=state, **event)["state_bytes"]
            found = served["recommend_on"](state_bytes=after)
            off.append(float(tf.reduce_max(tf.abs(found["scores"] - whole["scores"]))))
        seconds = interleave(
            {
                "recommend": lambda n: served["recommend"](**batches[n % USERS][0]),
                "recommend_on": lambda n: served["recommend_on"](state_bytes=states[n % USERS]),
                "read_on": lambda n: served["read_on"](
                    state_bytes=states[n % USERS], **batches[n % USERS][1]
                ),
                "read": lambda n: served["read"](**batches[n % USERS][0]),
            },
            rounds=rounds,
        )
    name, whole = f"user_states/next_item/{places}/{dtype}", 1e3 * seconds.pop("recommend")
    return [
        Result(f"{name}/state", len(states[0].numpy()[0]) / 1e6, "MB"),
        Result(f"{name}/largest_difference", max(off), ""),
        *(Result(f"{name}/{each}", 1e3 * of, "ms", "recommend", whole) for each, of in seconds.items()),
    ]


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument(
        "--kind", choices=["grm", "next-item", "quality", "size"], default="grm", help="what to measure"
    )
    options.add_argument(
        "--dtypes",
        nargs="+",
        choices=get_args(RowDtype),
        default=list(get_args(RowDtype)),
        help="dtypes of states (default: all)",
    )
    for name, value, smallest, what in (
        ("dim", 256, 16, "the width of a token"),
        ("blocks", 2, 1, "blocks of HSTU"),
        ("heads", 4, 2, "heads of a block"),
        ("tokens", 1000, 20, "events of a history; for quality, their mean"),
        ("candidates", 64, 3, "candidates of a request"),
        ("users", 1, 1, "users of a request"),
        ("seconds", 60, 1, "seconds of training a model, for quality"),
        ("seeds", 3, 1, "logs and models, for quality"),
        ("log-users", 3000, 100, "users of a log, for quality"),
    ):
        small = value if "--smoke" not in sys.argv else smallest
        options.add_argument(f"--{name}", type=int, default=small, help=f"{what} (default: {value})")
    given = options.parse_args()
    dtypes: list[RowDtype] = given.dtypes
    if given.kind == "quality":
        results = state_quality(given, dtypes, smoke=given.smoke)
        report(f"GRM of {given.blocks} blocks of {given.dim}: GAUC from states", results, given.json)
        return
    if given.kind == "next-item":
        results = [
            result
            for dtype in dtypes
            for result in measure_next_item(given, dtype, "from_start", given.rounds)
        ]
        results += measure_next_item(given, dtypes[0], "from_end", given.rounds)
    elif given.kind == "size":
        results = measure_size(given, dtypes)
    else:
        results = [result for dtype in dtypes for result in measure_grm(given, dtype, given.rounds)]
    asked = f", {given.candidates} candidates" if given.kind == "grm" else ""
    title = (
        f"{given.users} users of {given.tokens} events{asked}; {given.blocks} blocks of {given.dim}, "
        f"{given.heads} heads"
    )
    report(title, results, given.json)


if __name__ == "__main__":
    main()
