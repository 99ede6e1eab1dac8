"""A generative model by the commands: its ids are made once, kept and checked, and its search is measured."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.semantic_ids import SemanticIds
from gmeta.core.settings import from_mapping
from gmeta.experiment.next_item import generative
from gmeta.experiment.next_item.blend import with_floor
from gmeta.experiment.next_item.histories import Asked
from gmeta.experiment.next_item.models import load_best, measure_epochs, train
from gmeta.experiment.next_item.ranked import rank
from gmeta.experiment.next_item.runs import load_catalogue, plan_catalogue, read_cuts
from gmeta.experiment.next_item.served import Padded, in_tensorflow
from gmeta.experiment.plan.generative_config import GenerativeMethod
from gmeta.experiment.plan.next_item_config import NextItemConfig, NextItemMethod
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.experiment.search.tunables import generative_space
from support.eager import eagerly
from support.next_item import ITEMS, histories, write_events

METHOD = {
    "label": "generative",
    "model": "generative",
    "codes": 5,
    "levels": 2,
    "id_dim": 4,
    "dim": 8,
    "width": 8,
    "beam": 6,
    "max_length": 10,
    "epochs": 2,
}
SMALL = {"item": "item", "ks": [3, 5], "methods": {"own": METHOD}}
GIVEN = dict.fromkeys(("levels", "codes", "id_dim"))  # what ids from a folder leave open
RUN = Path("runs", "default")


def gmeta(*arguments, code=0):
    result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which a model was trained."""
    folder = tmp_path_factory.mktemp("generative")
    write_events(folder / "events.parquet")
    events = pq.read_table(folder / "events.parquet")
    kinds = events["item"].to_numpy() // 7 % 3
    pq.write_table(events.append_column("kind", [kinds]), folder / "events.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        gmeta("prepare", "--data", "events.parquet", "--task", "user", "--time", "ts")
        settings = [f"methods.own.{name}={json.dumps(value)}" for name, value in METHOD.items()]
        words = [word for line in ("ks=[3,5]", *settings) for word in ("--set", line)]
        with eagerly():
            (folder / "said.txt").write_text(gmeta("train", "--for", "next-item", *words).stderr)
    return folder


@pytest.fixture(scope="module")
def served(folder):
    """The folder, in which the other commands ran too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        gmeta("evaluate", "--json", "table.json")
        gmeta("recommend", "-k", 4, "--no-seen", "--method", "own")
        gmeta("export", "-k", 4, "--no-seen", "--method", "own")
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    return load_catalogue(RunFolder(folder / RUN))


def planned(folder, **settings):
    config = plan_catalogue({**SMALL, "methods": {"own": {**METHOD, **settings}}}, folder / "data").config
    return config, read_cuts(config, folder / "data")


@pytest.mark.shown_by("cli/test_next_item.py::test_the_export_answers_what_recommend_writes")
def test_commands_train_measure_recommend_and_export(served, trained):
    folder = served
    said = (folder / "said.txt").read_text()
    assert "2 codes of 5, from neighbours in training histories and the columns kind" in said
    found = json.loads((folder / "table.json").read_text())["results"]["seen items left out"]
    assert 0 < found["own"][0]["hr@5"] <= 1
    assert np.isfinite(found["blend"][0]["ndcg@5"])
    top = pq.read_table(folder / "top.parquet").to_pydict()
    assert all(len(set(items)) == 4 for items in top["items"])
    recommend = tf.saved_model.load(str(folder / "serving" / "1")).signatures["recommend"]
    whole = trained.cuts.whole
    padded = tf.RaggedTensor.from_row_splits(trained.cuts.ids[whole.items], whole.row_splits).to_tensor(-1)
    np.testing.assert_allclose(recommend(item=padded)["scores"], top["scores"], rtol=1e-4, atol=1e-4)


@pytest.mark.shown_by("models/generative")
def test_a_search_scores_what_it_finds_and_the_rest_counts_as_missed(trained):
    scorer, asked = trained.methods["own"][0], trained.cuts.test
    scores = scorer.scores(asked.histories)
    exact = scorer.model.item_log_probs(asked.histories.ragged()).numpy()
    there = np.isfinite(scores)
    np.testing.assert_allclose(scores[there], exact[there], rtol=1e-4, atol=1e-4)
    left = there.copy()
    left[asked.histories.owner, asked.histories.items] = False
    assert (left.sum(axis=1) >= scorer.model.beam).all()  # without the items of the histories
    padded = Padded(*(asked.histories.ragged()[name].to_tensor(-1) for name in ("item", "time")))
    for each in (scorer, trained.methods["blend"][0]):
        in_graph, here = in_tensorflow(each, ITEMS)(padded), each.scores(asked.histories)
        np.testing.assert_allclose(np.exp(in_graph), np.exp(here), rtol=1e-3, atol=1e-6)  # of -inf, 0

    class Narrow:
        def scores(self, histories):
            return np.array([[-1.0, -np.inf, -2.0, -np.inf]], np.float32)

    part = Asked(histories([[0]]), histories([[1, 2]]))
    assert rank(Narrow(), part, 4, seen=True, shown=3).ranks.tolist() == [np.inf, 2]
    assert with_floor(Narrow().scores(part.histories)).tolist() == [[-1, -2, -2, -2]]


def test_wider_answers_than_the_beam_are_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for command in ("recommend", "export"):
        said = gmeta(command, "-k", 7, "--method", "own", code=2)
        assert "k must be at most 6, the items that the search with this beam finds" in said.output


def test_ids_are_kept_and_checked(folder, tmp_path):
    config, cuts = planned(folder)
    method, kept = config.methods["own"], folder / RUN / "own" / "seed-0"
    before = SemanticIds.read(kept / "ids")
    np.testing.assert_array_equal(before.items, cuts.ids)
    made = (kept / "ids" / "ids.arrow").stat().st_mtime_ns
    generative.keep_ids(method, 0, cuts, kept, lambda: pytest.fail("they are there"))
    assert (kept / "ids" / "ids.arrow").stat().st_mtime_ns == made
    assert generative.make_ids(method, 0, cuts, lambda: None).digest == before.digest
    copied = tmp_path / "seed-1"
    shutil.copytree(kept, copied)
    with pytest.raises(DataError, match="were made with seed = 0, and now it is 1"):
        load_best(config, "own", 1, cuts=cuts, folder=copied)
    with pytest.raises(DataError, match="were made with codes = 5, and now it is 4"):
        generative.read_ids(replace(method, codes=4), 0, cuts, kept)
    shutil.rmtree(copied / "ids")  # others would give the trained codes to other items
    with pytest.raises(DataError, match="its semantic ids are gone"):
        train(config, "own", 0, cuts=cuts, folder=copied)
    fewer = replace(cuts, ids=cuts.ids[:-1])
    with pytest.raises(DataError, match="are of 25 items, and not of the 24 items"):
        generative.read_ids(method, 0, fewer, kept)


def test_ids_are_made_of_the_training_part_and_of_what_is_asked_for(folder, tmp_path):
    config, cuts = planned(folder, levels=1, codes=3, balanced=False, id_dim=24)
    method = config.methods["own"]
    kinds = cuts.columns.items.columns["kind"][0]
    alone = replace(cuts, validation=None, test=None, whole=None)
    by_kind = generative.make_ids(method, 0, alone, lambda: None)
    pairs = set(zip(kinds.tolist(), by_kind.digits[:, 0].tolist(), strict=True))
    chance = generative.make_ids(replace(method, ids="random"), 0, alone, lambda: None)
    np.testing.assert_array_equal(np.sort(chance.digits, axis=0), np.sort(by_kind.digits, axis=0))
    assert len(set(zip(kinds.tolist(), chance.digits[:, 0].tolist(), strict=True))) > len(pairs)
    kind_vectors = np.eye(3)[kinds]
    of_vectors = replace(method, ids="items", attributes=(), id_dim=None, item_epochs=1)
    found = generative.make_ids(of_vectors, 0, alone, lambda: kind_vectors)
    assert len(set(zip(kinds.tolist(), found.digits[:, 0].tolist(), strict=True))) == 3
    found.write(tmp_path)
    given = planned(folder, ids=str(tmp_path), **GIVEN)[0].methods["own"]
    assert generative.make_ids(given, 0, alone, lambda: None).digest == found.digest
    lacking = replace(alone, ids=np.append(cuts.ids, 9999))
    with pytest.raises(DataError, match="no semantic ids of 1 of 26 items, such as 9999"):
        generative.make_ids(given, 0, lacking, lambda: None)


@pytest.mark.parametrize(
    "settings",
    [
        {"form": "flat", "width": None, "ids": "cooccurrence"},
        # Quick: test_ids_are_made_of_the_training_part_and_of_what_is_asked_for.
        pytest.param({"ids": "items", "id_dim": None, "item_epochs": 1}, marks=pytest.mark.slow),
    ],
    ids=["flat", "items"],
)
def test_the_flat_form_and_ids_of_trained_item_vectors_learn(folder, settings):
    config, cuts = planned(folder, epochs=1, **settings)
    method = config.methods["own"]
    assert (method.softmax, method.width) == (("children", None) if method.form == "flat" else (None, 8))
    with eagerly():
        assert 0 < measure_epochs(config, "own", 0, cuts=cuts, report=lambda *_: None) < 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "flat"}, "form 'flat' has no width: leave it out, or set form = 'decoder'"),
        ({"softmax": "codes"}, "form 'decoder' has no softmax: leave it out, or set form = 'flat'"),
        (
            {"form": "flat", "width": None, "backbone": "fuxi"},
            "'fuxi' can't read on .*: choose sasrec or hstu",
        ),
        ({"times": True}, "'sasrec' reads no times: leave times out, or choose hstu or fuxi"),
        ({"beam": 4}, "beam must be at least 5, the most items that ks shows"),
        ({"depth": 3}, "depth must be at most levels=2, got 3"),
        ({"ids": "titles", **GIVEN}, "ids must be one of .*, or a folder of ids, got 'titles'"),
        ({"ids": "cooccurrence", "attributes": ["kind"]}, "ids = 'cooccurrence' reads no attributes"),
        ({"ids": "items"}, "ids = 'items' reads no id_dim: leave it out"),
        ({"ids": "."}, "ids = '.' reads no id_dim, levels, codes: leave it out"),
        ({"attributes": ["place"]}, "attributes names place, which aren't the same in all rows of an item"),
        ({"attributes": ["genre"]}, "names genre, .*; the columns of items are kind"),
        ({"ids": "attributes", "attributes": []}, "needs a column that is the same in all rows of an item"),
        ({"item_epochs": 3}, "ids = None reads no item_epochs"),
        ({"model": "other"}, "model must be one of sasrec, esasrec, hstu, fuxi, generative, got 'other'"),
        ({"wide": 3}, "unknown keys: wide @ config.methods"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        planned(folder, **settings)


def test_the_model_decides_the_kind_of_settings():
    methods = {"one": {"label": "one"}, "two": {"label": "two", "model": "generative"}}
    found = from_mapping(NextItemConfig, {"item": "item", "methods": methods}).methods
    assert [type(each) for each in found.values()] == [NextItemMethod, GenerativeMethod]
    keys = [each.key for each in generative_space([found["two"]])]
    assert keys == ["learning_rate", "dropout", "blocks", "dim", "width"]
    flat = replace(found["two"], form="flat")
    assert [each.key for each in generative_space([flat])] == keys[:-1]
