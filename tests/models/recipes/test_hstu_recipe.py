"""The recipe of the next item: its histories, its SASRec, what it runs and what it reports."""

import itertools
import json
import sys
from pathlib import Path

import click.testing
import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import DataError
from gmeta.models.zoo.softmax_blocks import LiGRBlock, SASRecBlock
from gmeta.ops import Jagged
from gmeta.testing.small_experiment import ITEMS, USERS, as_1m, small_100k
from support import warm

RECIPE = Path(__file__).resolve().parents[3] / "models" / "hstu"


@pytest.fixture
def recipe(monkeypatch):
    """Imports a module of the recipe's folder, which is no package."""
    monkeypatch.syspath_prepend(RECIPE)
    names = [path.stem for path in RECIPE.glob("*.py")]
    yield __import__
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_100k(tmp_path_factory.mktemp("ml-100k"))


def test_histories_are_in_the_order_of_time_and_hold_two_items_out(recipe, folder, tmp_path):
    data = recipe("histories").read_histories(folder)
    rows = np.loadtxt(folder / "u.data", dtype=int)
    assert (data.users, data.items) == (USERS, ITEMS)
    for place, user in enumerate(np.unique(rows[:, 0])):
        own = rows[rows[:, 0] == user]
        own = own[np.argsort(own[:, 3], kind="stable")]
        np.testing.assert_array_equal(data.test["item"][place], own[:, 1] - 1)
        np.testing.assert_array_equal(data.test["time"][place], own[:, 3])
        for cut, held in ((data.validation, 1), (data.train, 2)):
            for column in ("item", "time"):
                np.testing.assert_array_equal(cut[column][place], data.test[column][place][:-held])
    same = recipe("histories").read_histories(as_1m(folder, tmp_path / "ml-1m"))
    assert same.name == "ml-1m"
    np.testing.assert_array_equal(same.test["item"].values, data.test["item"].values)


def test_batches_are_shuffled_anew_each_epoch_and_alike_by_a_seed(recipe, folder):
    histories = recipe("histories")
    train = histories.read_histories(folder).train
    first, again = (histories.batches(train, 7, shuffle=3) for _ in range(2))
    epochs = [[batch["item"].to_list() for batch in data] for data in (first, first, again)]
    assert epochs[0] == epochs[2] != epochs[1]
    everyone = sorted(row for batch in epochs[1] for row in batch)
    assert everyone == sorted(train["item"].to_list())


def test_what_is_no_such_folder_is_named(recipe, tmp_path):
    done = click.testing.CliRunner().invoke(recipe("train").main, [str(tmp_path)])
    assert done.exit_code == 1
    assert "not a MovieLens folder: looked for u.data" in done.output


def softmax_attention(block, x):
    """One history, by the formula."""
    weight = {name: value.numpy().astype(float) for name, value in block.kernels.items()}
    bias = {name: value.numpy().astype(float) for name, value in block.biases.items()}

    def norm(rows):
        centred = rows - rows.mean(axis=1, keepdims=True)
        return centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-6)

    asking = norm(x)
    q = asking @ weight["query"] + bias["query"]
    k, v = (x @ weight[name] + bias[name] for name in ("key", "value"))
    d, found = block.attention_dim, []
    for i in range(len(x)):
        heads = []
        for h in range(block.heads):
            part = slice(h * d, (h + 1) * d)
            weights = np.exp(k[: i + 1, part] @ q[i, part] / np.sqrt(d))
            heads.append(weights @ v[: i + 1, part] / weights.sum())
        found.append(np.concatenate(heads))
    asked = norm(asking + np.array(found) @ weight["output"] + bias["output"])
    hidden = np.maximum(asked @ weight["ffn1"] + bias["ffn1"], 0)
    return asked + hidden @ weight["ffn2"] + bias["ffn2"]


def test_sasrec_is_its_formula_whatever_else_is_in_the_batch():
    block = SASRecBlock(heads=2, attention_dim=4, value_dim=4, max_length=9)
    random = np.random.default_rng(0)
    lengths = [3, 0, 1, 7]
    x, offsets = random.normal(size=[sum(lengths), 8]), np.cumsum([0, *lengths])
    found = block(Jagged(tf.constant(x, tf.float32), tf.constant(offsets))).values
    for value in block.biases.values():  # they start at 0, where a missing one isn't seen
        value.assign(random.normal(size=value.shape))
    found = block(Jagged(tf.constant(x, tf.float32), tf.constant(offsets))).values
    expected = [softmax_attention(block, x[a:b]) for a, b in itertools.pairwise(offsets) if b > a]
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_popularity_counts_ties_against_itself(recipe):
    histories, train = recipe("histories"), recipe("train")
    rows = {"item": tf.ragged.constant([[0, 0, 1, 2], [0, 1, 3, 1]], tf.int64)}
    cuts = [{"item": rows["item"][:, :-held]} for held in (2, 1)]
    data = histories.LeaveLastOut("made", 5, *cuts, rows)
    found = train.popularity(data)  # 0 three times, 1 once, the others never
    assert found["validation"]["mrr"] == pytest.approx((1 / 2 + 1 / 5) / 2)
    assert found["test"]["mrr"] == pytest.approx((1 / 5 + 1 / 2) / 2)


def test_it_trains_and_measures_and_reports(folder, tmp_path):
    def run(*words):
        done = warm.run([sys.executable, *words], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # One model in full; that the others train is theirs to show, and each takes seconds to trace.
    words = ["--model", "popularity", "--model", "sasrec", "--seed", "1", "--batch", "16", "--threads", "1"]
    said = run(RECIPE / "train.py", folder, *words, "--epochs", "3", "--every", "2", "--json", "all.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [(line["model"], line.get("seed"), line["epoch"]) for line in lines] == [
        ("popularity", None, 0),
        ("sasrec", 1, 2),
        ("sasrec", 1, 3),
    ]
    assert lines[2]["loss"] < lines[1]["loss"]
    assert lines[2]["settings"]["batch"] == 16
    assert "sasrec, seed 1, epoch 2" in said
    table = run(RECIPE / "report.py", "all.jsonl", "--out", "report")
    assert (tmp_path / "report" / "table.md").read_text() == table
    assert (tmp_path / "report" / "learning-curves.png").read_bytes().startswith(b"\x89PNG")


def line(model="hstu-2", seed=0, epoch=5, validation=0.1, test=0.2, **other):
    numbers = {"hr@10": 0.3, "hr@50": 0.4, "mrr": 0.1}
    facts = {"data": "ml-100k", "model": model, "seed": seed, "epoch": epoch, "seconds": 2.0 * epoch}
    cuts = {"validation": {**numbers, "ndcg@10": validation}, "test": {**numbers, "ndcg@10": test}}
    return {**facts, "settings": {"batch": 128}, **cuts, **other}


def write(path, *lines):
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_the_test_item_chooses_nothing(recipe, tmp_path):
    report, untrained = recipe("report"), ("data", "model", "epoch", "validation", "test")
    first = write(tmp_path / "0", line(epoch=10, validation=0.3, test=0.1), line(validation=0.2, test=0.9))
    second = write(
        tmp_path / "1",
        line(seed=1, validation=0.3, test=0.2),
        line(seed=1, epoch=10, validation=0.3, test=0.9),  # no better by validation: the earlier one
        {name: value for name, value in line("popularity", epoch=0).items() if name in untrained},
    )
    runs = report.read_runs([second, first])
    assert list(runs) == ["popularity", "hstu-2"]
    last = report.table(runs).splitlines()[-1]
    assert last == "| hstu-2 | 0.3000±.0000 | 0.4000±.0000 | 0.1500±.0707 | 0.1000±.0000 | 2 | 10, 5 | 2.00 |"


def test_lines_that_do_not_belong_together_are_named(recipe, tmp_path):
    report = recipe("report")
    for second, words in (
        (line(), "2: hstu-2, seed 0, epoch 5: measured twice; give the files"),
        (line(seed=1, settings={"batch": 1}), "2: settings differ between runs"),
        (line(seed=1, data="ml-1m"), "2: data differ between runs"),
        ({"model": "hstu-2"}, "2: not a line of train.py: KeyError"),
    ):
        with pytest.raises(DataError, match=words):
            report.read_runs([write(tmp_path / "lines", line(), second)])


def test_text_files_are_renumbered_and_their_faults_named(recipe, tmp_path):
    sequences = recipe("sequences")
    path = tmp_path / "Beauty.txt"
    path.write_text("1 1 2 3 4\n2 1 5\n3 4 2 6\n")  # the second user has too few items
    data = sequences.read_sequences(sequences.find_file("beauty", tmp_path))
    assert (data.name, data.users, data.items) == ("beauty", 2, 5)
    first, second = data.test["item"].to_list()
    assert (first[1], first[3]) == (second[1], second[0])
    assert data.train["item"].to_list() == [first[:2], second[:1]]
    assert sequences.find_file("ml-100k", None) is None
    with pytest.raises(DataError, match=r"no Yelp\.txt in"):
        sequences.find_file("yelp", tmp_path)
    path.write_text("1 a\n")
    with pytest.raises(DataError, match="not a line of whole numbers"):
        sequences.read_sequences(path)


def ligr(block, x):
    """One history, by the formula."""
    weight = {name: value.numpy().astype(float) for name, value in block.kernels.items()}
    bias = {name: value.numpy().astype(float) for name, value in block.biases.items()}

    def norm(rows):
        centred = rows - rows.mean(axis=1, keepdims=True)
        return centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-6)

    def linear(name, rows):
        return rows @ weight[name] + bias[name]

    def gate(name, rows):
        return 1 / (1 + np.exp(-linear(name, rows)))

    q, k, v = (linear(name, norm(x)) for name in ("query", "key", "value"))
    found = []
    for i in range(len(x)):
        weights = np.exp(k[: i + 1] @ q[i] / np.sqrt(q.shape[1]))
        found.append(weights @ v[: i + 1] / weights.sum())
    y = x + linear("output", np.array(found)) * gate("attention_gate", x)
    first = norm(y) @ weight["ffn1"]
    hidden = first / (1 + np.exp(-first)) * (norm(y) @ weight["ffn2"])
    return y + hidden @ weight["ffn3"] * gate("ffn_gate", y)


def test_ligr_is_its_formula():
    block = LiGRBlock(heads=1, attention_dim=8, value_dim=8, max_length=9)
    random = np.random.default_rng(0)
    x, offsets = random.normal(size=[7, 8]), np.array([0, 3, 7])
    tokens = Jagged(tf.constant(x, tf.float32), tf.constant(offsets))
    block(tokens)
    for value in block.biases.values():
        value.assign(random.normal(size=value.shape))
    expected = [ligr(block, x[a:b]) for a, b in itertools.pairwise(offsets)]
    np.testing.assert_allclose(block(tokens).values, np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_the_published_numbers_stand_beside_ours(recipe, tmp_path):
    report = recipe("report")
    runs = {"sasrec": [[line("sasrec", data="beauty")]]}
    text = report.write_report(runs, tmp_path)
    assert text.splitlines()[-1] == "| sasrec | 0.3000 | 0.0921 | 0.2000 | 0.0531 |"
