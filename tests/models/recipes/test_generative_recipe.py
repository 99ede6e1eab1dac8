"""The recipe of generative retrieval: its ids, and a run from a text file to measures."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError, DataError
from gmeta.models.zoo.softmax_blocks import SASRec
from gmeta.ops import Jagged
from support import warm

RECIPES = Path(__file__).resolve().parents[3] / "models"


def made(recipe, file, **settings):
    data = recipe("sequences").read_sequences(file)
    own = recipe("retriever_settings").RetrieverSettings(
        **{"levels": 1, "codes": 3, "vectors": 4, "balanced": False} | settings
    )
    return data, recipe("item_codes").make_ids(data, file, own, seed=0)


def test_ids_follow_sets_of_items_and_random_ones_do_not(recipe, file):
    data, ids = made(recipe, file)
    attributes = recipe("sequences").read_attributes(file)
    assert len(attributes) == len(ids.items) == data.items  # no user has item 999
    sets = np.array([attributes[item][0] for item in range(data.items)])
    pairs = {(int(own), int(code)) for own, code in zip(sets, ids.digits[:, 0], strict=True)}
    assert len(pairs) == 3
    _, chance = made(recipe, file, ids="random")
    assert len(set(zip(sets.tolist(), chance.digits[:, 0].tolist(), strict=True))) > 3
    np.testing.assert_array_equal(np.sort(chance.digits, axis=0), np.sort(ids.digits, axis=0))


def test_ids_know_nothing_of_what_is_held_out(recipe, file):
    _, before = made(recipe, file, ids="cooccurrence")
    rows = [line.split() for line in file.read_text().splitlines()]
    held = [row[-2:] for row in rows]
    turned = [[*row[:-2], *other] for row, other in zip(rows, held[1:] + held[:1], strict=True)]
    file.write_text("".join(" ".join(row) + "\n" for row in turned))
    _, after = made(recipe, file, ids="cooccurrence")
    assert before.digest == after.digest


def test_ids_may_come_from_a_folder(recipe, file, tmp_path):
    data, ids = made(recipe, file)
    folder = tmp_path / "ids"
    folder.mkdir()
    ids.write(folder)
    assert made(recipe, file, ids=str(folder))[1].digest == ids.digest
    folder.rename(tmp_path / "ids-0")
    folder = tmp_path / "ids-0"
    assert made(recipe, file, ids=str(tmp_path / "ids-{seed}"))[1].digest == ids.digest  # of seed 0
    with pytest.raises(DataError, match="these ids aren't of the items 0 to 60 of beauty"):
        recipe("item_codes").read_ids(replace(data, items=61), folder)


def test_what_ids_cannot_be_made_of_is_named(recipe, file):
    with pytest.raises(ConfigError, match=r"ids must be one of .*, or a folder of ids, got 'titles'"):
        made(recipe, file, ids="titles")
    (file.parent / "Beauty_item2attributes.json").write_text("[]")
    with pytest.raises(DataError, match="no mapping from items to attributes"):
        made(recipe, file)


OF_FORMS = {"decoder": ["--negatives", "8"], "flat": ["--form", "flat", "--softmax", "codes"]}


# Quick: test_hstu_recipe.py, test_it_trains_and_measures_and_reports, and the model's own tests.
@pytest.mark.slow
@pytest.mark.parametrize("form", ["decoder", pytest.param("flat", marks=pytest.mark.slow)])
def test_it_trains_and_measures(file, tmp_path, form):
    words = ["--levels", "1", "--codes", "3", "--vectors", "4", "--batch", "16", *OF_FORMS[form]]
    words += ["--threads", "1", "--epochs", "2", "--json", "runs/all.jsonl"]
    done = warm.run([sys.executable, RECIPES / "generative" / "train.py", file, *words], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs" / "all.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert lines[1]["code_loss"] < lines[0]["code_loss"] <= lines[0]["loss"]
    assert lines[0]["settings"]["batch"] == 16
    assert 0 < lines[0]["test"]["hr@50"] <= lines[0]["test_unseen"]["hr@50"] <= 1
    assert lines[0]["valid"]["share@10"] == 1 or form == "flat"  # of codes that all have items
    assert f"{'flat' if form == 'flat' else 'retriever'}-attributes, chosen, seed 0" in done.stdout


def test_settings_of_the_other_form_are_refused(recipe):
    check = recipe("retriever_settings").check_given
    check("flat", {"softmax": "codes", "dim": 8})
    for form, given, told in (
        ("flat", {"width": 8, "repeats": False}, "width, repeats is of --form decoder, and this is flat"),
        ("decoder", {"softmax": "codes"}, "softmax is of --form flat, and this is decoder: leave it out"),
        ("tall", {}, "form must be one of decoder, flat, got 'tall'"),
    ):
        with pytest.raises(ConfigError, match=told):
            check(form, given)


def test_sasrec_reads_on_as_it_reads_whole_sequences():
    stack = SASRec(blocks=2, heads=2, attention_dim=3, value_dim=4, max_length=9)
    random = np.random.default_rng(0)
    offsets, own = np.array([0, 4, 5]), random.normal(size=(2, 3, 2, 6)).astype(np.float32)
    values = tf.constant(random.normal(size=(5, 6)), tf.float32)
    _, reading = stack.read(Jagged(values, tf.constant(offsets)))
    parents = np.array([[2, 0, 0], [1, 1, 2]])
    _, reading = stack.read_on(own[:, :, 0], reading)
    found, _ = stack.read_on(own[:, :, 1], reading, parents)
    for user, beam in np.ndindex(2, 3):
        before = values[offsets[user] : offsets[user + 1]]
        whole = tf.concat([before, own[user, parents[user, beam], :1], own[user, beam, 1:]], 0)
        again = stack(Jagged(whole, tf.constant([0, len(whole)], tf.int64))).values[-1]
        np.testing.assert_allclose(found[user, beam], again, rtol=1e-4, atol=1e-5)
