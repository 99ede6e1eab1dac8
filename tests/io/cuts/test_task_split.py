"""Support and query: how many rows, which ones, when they are drawn, and what is bad."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import DataError
from gmeta.io import After, Flag, ReadOptions, tasks
from gmeta.io.reader_stats import ReaderStats, data_errors
from gmeta.preprocess import TableSpec, prepare
from support.drawn_batches import plain, sides_by_task
from support.grouped_data import SCHEMA, reading, write_folder
from support.reference import reader as reference

ALL = ["item", "task", "genre", "timestamp", "rating", "weights"]
RULES = st.one_of(
    st.integers(1, 2),
    st.floats(0.01, 0.99),
    st.builds(After, st.just("rating"), st.sampled_from([2, 2.5, 4])),
    st.builds(Flag, st.just("timestamp")),  # the first row of all is 0
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Twenty tasks of 4 to 9 rows in two shards."""
    sizes = np.random.default_rng(0).integers(4, 10, 20).tolist()
    return write_folder(tmp_path_factory.mktemp("data"), sizes[:8], sizes[8:])


def in_order(path):
    shards = Manifest.load(path.parent).splits[path.name].shards
    return reference.groups([str(path.parent / shard.name) for shard in shards], SCHEMA, "columnar")


def one_sided(group, query):
    if not isinstance(query, After | Flag):
        return False
    values = [row[query.column][0] for row in group]
    return len({v >= query.time if isinstance(query, After) else v != 0 for v in values}) == 1


@settings(max_examples=12)  # each one traces a few functions
@given(
    sizes=st.lists(st.integers(3, 8), min_size=1, max_size=7),
    per_batch=st.integers(1, 4),
    query=RULES,
    support=st.sampled_from([None, 1, 3]),
    drawn=st.sampled_from(["latest", "once", "anew"]),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    label=st.sampled_from(["rating", ["rating", "timestamp"]]),
)
@pytest.mark.shown_by("io/readers/test_tasks.py::test_batches_are_the_reference_s")
def test_batches_are_the_reference_s(
    tmp_path_factory, sizes, per_batch, query, support, drawn, seed, epoch, label
):
    path = write_folder(tmp_path_factory.mktemp("data"), sizes)
    options, seeds = {}, None
    if not isinstance(query, After | Flag):
        options = {"once": {"rows": "random"}, "anew": {"resample": True}}.get(drawn, {})
        seeds = {"once": (seed,), "anew": (seed, epoch)}.get(drawn)
    options |= {"query": query, "support": support, "label": label, "features": ALL, "seed": seed}
    options |= {"epoch": epoch, "shuffle": False, "on_bad": "skip"}
    dataset = tasks(path, **reading(tasks_per_batch=per_batch, **options))
    groups = in_order(path)
    for i, batch in enumerate(dataset):
        sound = [g for g in groups[i * per_batch : (i + 1) * per_batch] if not one_sided(g, query)]
        if not sound:
            assert len(batch["task"]) == 0
            continue
        expected = reference.task_batch(sound, SCHEMA, label, query, support=support, seeds=seeds)
        del expected["features"]["batch_id"]
        assert plain(batch) == expected


# Each traces four readers: a count and a share, drawn and not, and both of the others.
@pytest.mark.parametrize(
    ("query", "drawn"),
    [
        # Quick: the others.
        pytest.param(2, {}, marks=pytest.mark.slow),
        (1, {"resample": True}),
        (0.3, {"rows": "random"}),
        pytest.param(0.7, {"resample": True}, marks=pytest.mark.slow),
        pytest.param(After("rating", 2.5), {}, marks=pytest.mark.slow),
        (Flag("timestamp"), {}),
    ],
)
@pytest.mark.shown_by(case="0.3-drawn2")
def test_a_task_s_rows_dont_depend_on_its_neighbours(prepared, query, drawn):
    options = {"query": query, "features": ["timestamp"], "seed": 2**33 + 7, "on_bad": "skip", **drawn}
    alone = sides_by_task(tasks(prepared, **reading(tasks_per_batch=1, **options)))
    assert alone == sides_by_task(tasks(prepared, **reading(tasks_per_batch=32, **options)))
    ranks = [
        sides_by_task(tasks(prepared, **reading(tasks_per_batch=3, shard=(r, 2), **options)))
        for r in range(2)
    ]
    assert alone == {part: ranks[0][part] | ranks[1][part] for part in alone}


def test_rows_are_drawn_anew_or_once(prepared):
    def drawn(epoch, **options):
        return sides_by_task(
            tasks(prepared, **reading(query=3, features=["timestamp"], epoch=epoch, **options))
        )

    latest, anew = drawn(0), [drawn(epoch, seed=6, resample=True) for epoch in range(2)]
    once = [drawn(epoch, seed=6, rows="random") for epoch in range(2)]
    assert anew[0] != anew[1]
    assert once[0] == once[1]
    assert once[0] != drawn(0, seed=7, rows="random")
    for found in (*anew, *once):
        assert found != latest
        for task, rows in latest["support"].items():
            everything = sorted(rows + latest["query"][task])
            assert sorted(found["support"][task] + found["query"][task]) == everything


def test_drawn_rows_are_uniform(tmp_path):
    path, counts = write_folder(tmp_path, [9] * 600), np.zeros(9)
    options = {"query": 1, "features": ["timestamp"], "shuffle": False, "tasks_per_batch": 600}
    latest, drawn = (
        sides_by_task(tasks(path, **reading(resample=anew, **options))) for anew in (False, True)
    )
    for task, [query] in drawn["query"].items():
        counts[[*latest["support"][task], *latest["query"][task]].index(query)] += 1
    assert ((counts - 600 / 9) ** 2 / (600 / 9)).sum() < 26.1  # one in a thousand, 8 degrees


def test_a_share_is_rounded_and_leaves_a_row_on_each_side(tmp_path):
    path = write_folder(tmp_path, [2, 3, 5, 9, 30])
    for share, expected in ((0.5, [1, 2, 3, 5, 15]), (0.05, [1, 1, 1, 1, 2]), (0.99, [1, 2, 4, 8, 29])):
        [batch] = tasks(path, query=share, features=["timestamp"], options=ReadOptions(shuffle=False))
        assert batch["query"]["mask"].numpy().sum(axis=1).tolist() == expected
        assert batch["query"]["index"].shape == (5, max(expected))
        assert tf.reduce_sum(batch["support"]["mask"]) + sum(expected) == 49


def test_one_sided_tasks_are_named_or_counted(tmp_path):
    (tmp_path / "Käufe").mkdir()
    path = write_folder(tmp_path / "Käufe", [4, 4, 4])  # timestamps 0 to 11
    with pytest.raises(DataError) as caught, data_errors():
        list(tasks(path, query=After("timestamp", 6), options=ReadOptions(shuffle=False)))
    assert str(caught.value) == (
        f"{path}: task 0, batch 0 has 0 query rows of 4 by After(column='timestamp', time=6, until=None); "
        "give it a row of either kind, or leave such tasks out with on_bad='skip'"
    )
    stats = ReaderStats()
    dataset = tasks(
        path,
        query=After("timestamp", 6),
        features=["timestamp", "genre"],
        options=ReadOptions(on_bad="skip", stats=stats),
    )
    [batch] = dataset
    assert batch["task"].numpy().tolist() == [1]
    assert batch["features"]["timestamp"].numpy().tolist() == [4, 5, 6, 7]
    counts = stats.read()
    assert (counts.records, counts.groups, counts.skipped, counts.bad) == (4, 1, 8, {"one_sided": 2})
    assert any("task 2, batch 2 has 4 query rows of 4" in line for line in counts.messages)
    stats.reset()
    assert stats.read().messages == ()


@pytest.mark.parametrize(("task", "count"), [("item", 5), ("scenario", 2), ("user", 10)])
@pytest.mark.shown_by(case="scenario-2")
def test_a_task_may_be_any_column(tmp_path, task, count):
    lines = ["user,item,scenario,click,price,held_out"]
    lines += [f"{i // 4},{i % 5},{i % 2},{i % 3 == 0:d},{i / 8},{i % 7 < 3:d}" for i in range(40)]
    (tmp_path / "clicks.csv").write_text("\n".join(lines))
    prepare(tmp_path / "clicks.csv", tmp_path / "data", spec=TableSpec(task, label="click"))
    dataset = tasks(
        tmp_path / "data" / "train",
        label=["click", "price"],
        features=["user", "item", "price"],
        query=Flag("held_out"),
        options=ReadOptions(on_bad="skip"),
    )
    rows = {"support": set(), "query": set()}
    for batch in dataset:
        features = {name: values.numpy().tolist() for name, values in batch["features"].items()}
        assert batch["features"]["price"].dtype == tf.float32
        np.testing.assert_array_equal(batch["label"][:, 1], batch["features"]["price"])
        for part, found in rows.items():
            index = tf.boolean_mask(batch[part]["index"], batch[part]["mask"] > 0).numpy().tolist()
            found |= {(features["user"][i], features["item"][i]) for i in index}
    held_out = {(i // 4, i % 5) for i in range(40) if i % 7 < 3}
    assert len({task for batch in dataset for task in batch["task"].numpy().tolist()}) <= count
    assert rows["query"] <= held_out
    assert not rows["support"] & held_out
    if task == "scenario":
        assert rows["query"] == held_out


def test_columns_taken_by_default_leave_out_labels_and_the_flag(prepared):
    def features(**options):
        return set(tasks(prepared, **reading(**options)).element_spec["features"])

    assert features(query=3, label=["rating", "item"]) == {"genre", "weights"}
    assert features(query=Flag("item")) == {"genre", "weights"}
    assert tasks(prepared, query=3, label=["rating"]).element_spec["label"].shape.as_list() == [None, 1]
