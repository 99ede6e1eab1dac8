import base64
import dataclasses
import io
import math
import subprocess
import sys
from html.parser import HTMLParser

import matplotlib.image
import pytest

from gmeta.experiment.report import page as table
from gmeta.experiment.report.figures import draw, mean_curve
from gmeta.experiment.report.findings import headline
from gmeta.experiment.report.page import flatten, write_report
from gmeta.experiment.report.style import ceiling
from gmeta.experiment.results.evaluation import MethodResult, TrainingRun
from support.evaluations import example_evaluation

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects what a page asks for, its table cells and its text; checks that its tags are balanced."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text("utf-8")
        self.resources, self.images, self.cells, self.texts, self.open = [], [], [], [], []
        self.feed(self.source)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.resources += [
            attributes[name] for name in ("src", "href", "srcset", "data") if name in attributes
        ]
        if tag == "img":
            assert attributes["alt"]
            self.images.append(attributes["src"])
        assert tag not in ("script", "link", "iframe", "object")
        if tag == "td":
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            assert "url(" not in data
            assert "@import" not in data
            return
        self.texts.append(data)
        if "td" in self.open:
            self.cells[-1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def decoded(image):
    kind, data = image.split(",", 1)
    assert kind == "data:image/png;base64"
    return base64.b64decode(data, validate=True)


def test_page_is_whole_without_a_network_and_shows_the_table(tmp_path):
    evaluation = example_evaluation()
    path = write_report(evaluation, tmp_path / "report")
    page = Page(path)
    assert "http:" not in page.source
    assert "https:" not in page.source
    assert page.resources == page.images
    assert page.source.isascii() or '<meta charset="utf-8">' in page.source

    expected = []
    for row in table.rows(evaluation):
        expected += [row.label if row.first else "", row.steps]
        expected += [cell.mean + cell.spread for cell in row.cells]
    assert page.cells == expected
    assert "0.917±.002" in page.cells

    for text in ("maml.alpha", "0.005", "[64, 64]", "21,034", "184.2 s", "0, 1, 2", "How MAML works."):
        assert text in page.text
    assert "<u.data>:17, 93 & 4411." in page.text, "notes are escaped"
    assert all(sentence in page.text for sentence in headline(evaluation))


def test_figures_are_inlined_and_saved_beside_the_page(tmp_path):
    page = Page(write_report(example_evaluation(), tmp_path))
    names = ["error-by-steps", "error-by-support", "training"]
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == [f"{n}.png" for n in names]
    for image, name in zip(page.images, names, strict=True):
        data = decoded(image)
        assert data == (tmp_path / "figures" / f"{name}.png").read_bytes()
        pixels = matplotlib.image.imread(io.BytesIO(data), format="png")
        height, width, _ = pixels.shape
        assert width == 1440
        assert height > 600
        assert pixels[..., :3].std() > 0.05, "something is drawn"


def test_the_report_is_a_function_of_the_evaluation(tmp_path):
    one = write_report(example_evaluation(), tmp_path / "one").read_bytes()
    assert write_report(example_evaluation(), tmp_path / "two").read_bytes() == one


def test_pyplot_and_tensorflow_are_left_alone_and_matplotlib_waits(tmp_path):
    program = """
import pathlib, sys
from support.evaluations import example_evaluation
from gmeta.experiment.results.metrics import rating_metrics
from gmeta.experiment.report.page import write_report
from gmeta.experiment.report.page import rich_table
late = {"matplotlib", "sklearn", "jinja2", "rich"} & set(sys.modules)
assert not late, late
write_report(example_evaluation(), pathlib.Path(sys.argv[1]))
assert "matplotlib" in sys.modules
never = {"matplotlib.pyplot", "tensorflow"} & set(sys.modules)
assert not never, never
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_undefined_is_a_dash(tmp_path):
    evaluation = example_evaluation()
    maml = evaluation.methods["maml"]
    results = {**maml.results, 5: {"mae": [math.nan] * 3, "auc": [0.5, math.nan, math.nan]}}
    methods = {**evaluation.methods, "maml": dataclasses.replace(maml, results=results)}
    page = Page(write_report(dataclasses.replace(evaluation, methods=methods), tmp_path))
    start = page.cells.index("5")
    assert page.cells[start : start + 6] == ["5", "–", "–", "0.500 (1/3)", "–", "–"]
    assert "nan" not in page.text
    assert len(page.images) == 3


def test_every_method_undefined_still_makes_a_page(tmp_path):
    nothing = {0: {"mae": [math.nan]}, 1: {"mae": [math.nan]}}
    evaluation = dataclasses.replace(
        example_evaluation([0]),
        methods={"maml": MethodResult("MAML", "", nothing)},
        support_curve={"maml": {1: [math.nan], 2: [math.nan]}},
        training={"maml": [TrainingRun([1], {"loss": [math.nan], "mae": [math.nan]})]},
    )
    page = Page(write_report(evaluation, tmp_path))
    assert page.cells == ["MAML", "0", "–", "", "1", "–"]


def test_one_seed_shows_no_spread_and_says_so(tmp_path):
    page = Page(write_report(example_evaluation([7]), tmp_path))
    assert not any("±" in cell for cell in page.cells)
    assert "This is one seed: the spread between seeds is unknown" in page.text
    assert len(page.images) == 3


def test_a_missing_method_or_curve_is_left_out(tmp_path):
    write_report(example_evaluation(), tmp_path)
    evaluation = dataclasses.replace(example_evaluation(joint=False), training={}, support_curve={})
    page = Page(write_report(evaluation, tmp_path))
    assert "joint" not in page.text
    assert len(page.images) == 1
    left = [file.name for file in (tmp_path / "figures").iterdir()]
    assert left == ["error-by-steps.png"], "pictures of the earlier report are gone"


def with_maml(**mae_by_step):
    """The example with other values for MAML's MAE, at steps 0 and 1."""
    evaluation = example_evaluation()
    results = {int(step[1:]): {"mae": values} for step, values in mae_by_step.items()}
    return dataclasses.replace(
        evaluation, methods={**evaluation.methods, "maml": MethodResult("MAML", "", results)}
    )


@pytest.mark.parametrize(
    ("evaluation", "sentence"),
    [
        (example_evaluation(), "After 1 step, MAML’s MAE on cold tasks falls from 1.001 to 0.917."),
        (
            with_maml(s0=[0.8, 0.8, 0.8], s1=[0.9, 0.9, 0.9]),
            "After 1 step, MAML’s MAE on cold tasks rises from 0.800 to 0.900.",
        ),
        (
            with_maml(s0=[0.90, 0.95, 1.0], s1=[0.89, 0.94, 0.99]),
            "After 1 step, MAML’s MAE on cold tasks hardly moves, from 0.950 to 0.940.",
        ),
        (
            example_evaluation(),
            "MAML reaches the lowest MAE, 0.917 after 1 step, but joint training (0.919 after 5 steps) "
            "is level with it within the spread between seeds; item mean: 0.974.",
        ),
        (
            with_maml(s0=[1.5] * 3, s1=[1.4] * 3),
            "Joint training reaches the lowest MAE, 0.919 after 5 steps, ahead of item mean (0.974); "
            "MAML: 1.400.",
        ),
        (
            example_evaluation(),
            "By AUC, MAML (0.641 after 5 steps) is level with joint training (0.641 after 5 steps); "
            "by nDCG@3, joint training (0.668 after 1 step) is ahead of MAML (0.657 after 5 steps).",
        ),
    ],
)
def test_headline_follows_the_numbers(evaluation, sentence):
    assert sentence in headline(evaluation)


@pytest.mark.parametrize(
    ("means", "kept"),
    [
        ([2.05, 0.764, 0.747, 0.824, 0.787, 0.752, 0.79], 0.824),  # one start far off
        ([1.001, 0.917, 0.918, 0.938, 0.929, 0.918, 0.974], None),  # all of one size
        ([2.05, 2.04, 0.75, 0.76], None),  # half of them are up there: both are the picture
        ([1.0, 1.0, 1.0], None),
        ([5.0, 1.0], None),
    ],
)
def test_only_a_few_far_values_are_cut(means, kept):
    assert ceiling(means, means) == kept


def texts(drawing):
    return [text.get_text() for axes in drawing.figure.axes for text in axes.texts]


def test_a_start_far_off_is_named_and_leaves_the_scale_readable():
    drawing = draw(with_maml(s0=[2.03, 2.05, 2.07], s1=[0.91] * 3, s5=[0.9] * 3))[0]
    assert "2.050±.020, off the scale" in texts(drawing)
    low, high = drawing.figure.axes[0].get_ylim()
    assert 0.85 < low < 0.9
    assert 0.974 < high < 1.05
    assert not any("off the scale" in text for text in texts(draw(example_evaluation())[0]))


def test_lines_are_named_with_their_last_value():
    names = ["MAML 0.918", "joint training 0.919", "item mean 0.974"]
    drawing = draw(example_evaluation())[0]
    assert sorted(texts(drawing)) == sorted(names)
    heights = sorted(text.xy[1] for axes in drawing.figure.axes for text in axes.texts)
    inches = drawing.figure.axes[0].get_position().height * drawing.figure.get_figheight()
    assert heights[1] - heights[0] >= 13.9 / 72 / inches, "the labels of 0.918 and 0.919 don't overlap"


def test_support_ratings_stand_on_a_log_2_axis_with_none_at_its_left():
    curve = {"maml": {size: [1 / (2 + size)] * 3 for size in (0, 2, 4, 16)}}
    drawing = draw(dataclasses.replace(example_evaluation(), support_curve=curve))[1]
    (axes,) = drawing.figure.axes
    assert list(axes.get_xticks()) == [0, 1, 2, 4]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2", "4", "16"]
    assert drawing.title == "From 0 to 16 support ratings, MAML’s MAE falls from 0.500 to 0.056"


def test_training_axes_show_the_end_of_training():
    run = TrainingRun([*range(1, 9)], {"loss": [9, 5, *[1.0] * 6], "mae": [1.9, 1.0, *[0.92] * 5, 0.93]})
    drawing = draw(dataclasses.replace(example_evaluation([0]), training={"maml": [run]}))[2]
    loss, mae = drawing.figure.axes
    assert loss.get_yscale() == "log"
    assert loss.get_title(loc="left") == "training loss, logarithmic scale"
    assert mae.get_title(loc="left") == "validation MAE, start cut off"
    assert 0.93 < mae.get_ylim()[1] < 1.0
    assert drawing.title == "Validation MAE ends with MAML at 0.930"


def test_mean_curve_skips_epochs_that_a_seed_lacks():
    runs = [
        TrainingRun([1, 2, 3], {"mae": [3.0, math.nan, 1.0]}),
        TrainingRun([1, 2, 3, 4], {"mae": [1.0, 1.0, 2.0, 0.5]}),
        TrainingRun([1], {"loss": [9.0]}),
    ]
    assert mean_curve(runs, "mae") == {1: 2.0, 3: 1.5}


def test_flatten_names_nested_settings():
    assert flatten({"a": {"b": 1, "c": {}}, "d": "x", "e": [1, None]}) == {
        "a.b": "1",
        "a.c": "{}",
        "d": "x",
        "e": "[1, null]",
    }


def test_clicks_are_compared_by_their_log_loss(tmp_path):
    evaluation = example_evaluation()
    found = {0: {"logloss": [0.7, 0.7, 0.7], "gauc": [0.6, 0.6, 0.6]}, 1: {"logloss": [0.5, 0.5, 0.5]}}
    methods = {
        "maml": dataclasses.replace(evaluation.methods["maml"], results=found),
        "item_mean": dataclasses.replace(evaluation.methods["item_mean"], results={0: {"logloss": [0.65]}}),
    }
    clicks = dataclasses.replace(evaluation, methods=methods, support_curve={}, training={})
    assert clicks.error == "logloss"
    assert "MAML has log loss 0.500 after 1 step against 0.650 of item mean" in headline(clicks)[0]
    page = write_report(clicks, tmp_path).read_text()
    assert "mean negative logarithm" in page.lower()
    assert (tmp_path / "figures" / "error-by-steps.png").exists()
