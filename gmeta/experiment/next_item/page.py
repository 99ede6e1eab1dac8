"""The results of a run that ranks a catalogue: sentences, tables, JSON, and a report of one HTML file."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gmeta.core.files import write_atomically
from gmeta.core.schema import OnBad
from gmeta.core.settings import to_mapping
from gmeta.core.terminal import Rows, method_table
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.next_item.ranked import Ranked, interval
from gmeta.experiment.next_item.runs import Measured, load_catalogue, measure
from gmeta.experiment.plan.next_item_config import BLEND
from gmeta.experiment.runs.run_folder import RunFolder, family_of
from gmeta.experiment.runs.trainer import read_logged

if TYPE_CHECKING:
    from rich.table import Table

_TITLES = {
    "hr": "HR",
    "recall": "recall",
    "precision": "precision",
    "ndcg": "NDCG",
    "map": "MAP",
    "mrr": "MRR",
    "coverage": "coverage",
    "novelty": "novelty",
    "popular": "popular",
}
_ITEMS, _USERS = 8, 10  # shown items of a user; shown users


@dataclass(frozen=True)
class Results:
    """The reported results of a run.

    Attributes:
      measured: The ranks of all methods and baselines.
      epochs: Method -> seed -> NDCG in validation after each epoch.
    """

    measured: Measured
    epochs: Mapping[str, Mapping[int, Sequence[float]]]

    @property
    def k(self) -> int:
        """The first k, at which methods are compared."""
        return self.measured.trained.config.ks[0]

    @property
    def seen(self) -> bool:
        """Whether the first table ranks seen items."""
        return bool(self.measured.trained.config.seen)

    @cached_property
    def counts(self) -> Ints:
        """(items,) how often each item occurs in training."""
        cuts = self.measured.trained.cuts
        return np.bincount(cuts.train.items, minlength=cuts.items)

    @cached_property
    def metrics(self) -> dict[bool, dict[str, list[dict[str, float]]]]:
        """Whether seen items are ranked -> name -> seed -> metric -> value."""
        ks = self.measured.trained.config.ks
        return {
            seen: {name: [each.metrics(ks, self.counts) for each in seeds] for name, seeds in found.items()}
            for seen, found in self.measured.test.items()
        }

    @property
    def strongest(self) -> tuple[str | None, str]:
        """The method and the baseline that are best in validation; None without a method."""
        trained, by = self.measured.trained, self.measured.trained.validation
        methods = [name for name in by if name in trained.methods]
        return max(methods, key=by.__getitem__, default=None), max(trained.baselines, key=by.__getitem__)

    def difference(self, metric: str, seen: bool) -> tuple[float, float, float] | None:
        """Return the strongest method's metric minus the strongest baseline's, and its 95% interval."""
        method, baseline = self.strongest
        if method is None:
            return None
        found = self.measured.test[seen]
        one, other = (
            np.stack([each.of_users(self.k)[metric] for each in found[name]]) for name in (method, baseline)
        )
        return interval(one, other)


def headline(results: Results) -> list[str]:
    """Describe the outcome in sentences; the first one states whether a method wins."""
    trained, k = results.measured.trained, results.k
    method, baseline = results.strongest
    if method is None:
        return [f"The strongest baseline is {trained.label(baseline)}; no method was trained."]
    sentences = []
    for seen in results.measured.test:
        where = "with items seen" if seen else "without items seen"
        parts, signs = [], set()
        for metric in ("hr", "ndcg"):
            name = f"{metric}@{k}"
            ours, theirs = (_mean(results, one, name, seen)[0] for one in (method, baseline))
            found = results.difference(metric, seen)
            assert found is not None
            difference, low, high = found
            signs.add(int(low > 0) - int(high < 0))
            parts.append(
                f"{_TITLES[metric]}@{k} {ours:.4f} against {theirs:.4f}, difference {difference:+.4f} "
                f"[{low:+.4f}, {high:+.4f}]"
            )
        verb = {1: "beats", -1: "loses to"}.get(signs.pop() if len(signs) == 1 else 0, "is level with")
        sentences.append(
            f"{_capital(trained.label(method))} {verb} {trained.label(baseline)}, the strongest baseline, "
            f"{where}: {'; '.join(parts)}."
        )
    sentences.append(
        "Both are the best of their kind in validation. A method beats a baseline if both intervals of 95%, "
        "by a bootstrap over users, leave out zero."
    )
    return sentences


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _mean(results: Results, name: str, metric: str, seen: bool) -> tuple[float, float | None]:
    """Return a metric's mean over seeds, and its sample standard deviation if there are several."""
    values = [each[metric] for each in results.metrics[seen][name]]
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def table(results: Results, seen: bool) -> tuple[list[str], Rows]:
    """Return the titles of a table's columns, and its lines: label, whether a part begins, and cells.

    Methods come first, then baselines, each from best to worst in validation. A cell has a text and whether
    it is the column's best to the digits shown.
    """
    trained, by = results.measured.trained, results.measured.trained.validation
    names = sorted(trained.methods, key=lambda name: -by[name])
    first = {*names[:1], *sorted(trained.baselines, key=lambda name: -by[name])[:1]}
    names += sorted(trained.baselines, key=lambda name: -by[name])
    metrics = list(next(iter(results.metrics[seen].values()))[0])
    digits = {name: 1 if name == "novelty" else 4 for name in metrics}
    shown = {
        (name, metric): f"{_mean(results, name, metric, seen)[0]:.{digits[metric]}f}"
        for name in names
        for metric in metrics
    }
    best = {metric: max(shown[name, metric] for name in names) for metric in metrics if metric != "popular"}
    rows = []
    for name in names:
        cells = []
        for metric in metrics:
            text, spread = shown[name, metric], _mean(results, name, metric, seen)[1]
            cells.append((text + ("" if spread is None else f"±{spread:.4f}"), best.get(metric) == text))
        rows.append((trained.label(name), name in first, cells))
    return [_title(metric) for metric in metrics], rows


def _title(metric: str) -> str:
    name, _, k = metric.partition("@")
    return _TITLES[name] + (f"@{k}" if k else "")


def rich_table(results: Results, seen: bool) -> Table:
    """Build a table for a terminal of 80 columns: the metrics at the first k."""
    trained, k = results.measured.trained, results.k
    several = max(len(each) for each in results.metrics[seen].values()) > 1
    kept = [f"HR@{k}", f"NDCG@{k}", "MRR"] + ([] if several else [f"recall@{k}", f"MAP@{k}", "coverage"])
    where = "items seen are ranked too" if seen else "items seen are left out"
    title = f"{trained.config.title}, {len(trained.cuts.test):,} users, {where}"
    return method_table(title, *table(results, seen), kept)


def to_json(results: Results) -> dict[str, Any]:
    """Return all results as JSON values."""
    trained = results.measured.trained
    return {
        "format": f"gmeta-{family_of(trained.config)}-evaluation",
        "version": 1,
        "headline": headline(results),
        "strongest": dict(zip(("method", "baseline"), results.strongest, strict=True)),
        "validation": {name: round(value, 6) for name, value in results.measured.trained.validation.items()},
        "described": dict(trained.described),
        "results": {
            "seen items ranked" if seen else "seen items left out": found
            for seen, found in results.metrics.items()
        },
        "differences": {
            f"{metric}@{results.k}, {'with' if seen else 'without'} items seen": results.difference(
                metric, seen
            )
            for seen in results.measured.test
            for metric in ("hr", "ndcg")
        },
        "groups": {
            title: {trained.label(name): [*values] for name, values in found.items()}
            for title, (_, found) in groups(results).items()
        },
        "experiment": to_mapping(trained.config),
    }


Group = tuple[list[str], dict[str, list[float]]]


def groups(results: Results) -> dict[str, Group]:
    """Return the recall of the strongest methods and baselines by group.

    Returns:
      Title -> the groups' names, and name -> recall at the first k in each group: by the length of a user's
      history and by how often an item occurs in training, in quarters of the targets.
    """
    trained = results.measured.trained
    by = results.measured.trained.validation
    names = [name for name in sorted(by, key=lambda name: -by[name]) if name in trained.methods]
    names += sorted(trained.baselines, key=lambda name: -by[name])[:2]
    asked = trained.cuts.test
    targets = asked.targets
    known = targets.items >= 0
    lengths = asked.histories.sizes[targets.owner]
    often = np.where(known, results.counts[np.maximum(targets.items, 0)], 0)
    found = {}
    for title, values in (
        ("by the length of a user's history", lengths),
        ("by how often an item occurs in training", often),
    ):
        bounds = np.unique(np.quantile(values, [0.25, 0.5, 0.75], method="higher"))
        place = np.searchsorted(bounds, values, side="left")
        parts = np.unique(place)
        labels = [_span(values[place == part]) for part in parts]
        recalls = {
            name: [
                _found(results.measured.test[results.seen][name], place == part, results.k) for part in parts
            ]
            for name in names
        }
        found[title] = labels, recalls
    return found


def _found(seeds: Sequence[Ranked], chosen: Any, k: int) -> float:
    return float(np.mean([each.ranks[chosen] <= k for each in seeds]))


def _span(values: Ints) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def write_report(results: Results, folder: Path) -> Path:
    """Write ``report.html``, ``evaluation.json`` and ``figures/*.png`` into a run's folder.

    Returns:
      The path of the page.

    Raises:
      OSError: The folder can't be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from gmeta.experiment.report.page import FIGURES, FILE_NAME, flatten

    trained = results.measured.trained
    drawings = []
    for name, heading, caption, figure in _figures(results):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        write_atomically(folder / FIGURES / f"{name}.png", buffer.getvalue())
        drawings.append((name, heading, caption, base64.b64encode(buffer.getvalue()).decode("ascii")))
    write_atomically(folder / "evaluation.json", json.dumps(to_json(results), indent=1) + "\n")
    descriptions = [
        (trained.label(name), f"{_capital(text)}.") for name, text in sorted(trained.described.items())
    ]
    loader = PackageLoader("gmeta.experiment.report", ".")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    cuts = trained.cuts
    method, baseline = results.strongest
    text = page.get_template("next_item.html.j2").render(
        title=trained.config.title,
        about=(
            f"trained on {len(cuts.train.items):,} events of {len(cuts.train):,} users and {cuts.items:,} "
            f"items, evaluated on {len(cuts.test):,} users, protocol {trained.config.protocol}"
        ),
        headline=headline(results),
        tables=[
            ("Items seen are ranked too" if seen else "Items seen are left out", *table(results, seen))
            for seen in results.measured.test
        ],
        legend=(
            "Methods, then baselines, each in the order of validation, by which their settings are chosen. "
            "All items of the catalogue are ranked, and ties count against a method. Coverage: the share "
            "of the catalogue that is shown to anyone. Novelty: bits of an item's share of events. "
            "Popular: the share shown that is among the tenth of items with most events."
        ),
        descriptions=descriptions,
        drawings=drawings,
        ordered=trained.config.ordered,
        shown_by=trained.label(method or baseline),
        users=_users(results, method or baseline),
        settings=flatten(to_mapping(trained.config)),
    )
    return write_atomically(folder / FILE_NAME, text)


def _users(results: Results, name: str) -> list[tuple[Any, ...]]:
    """Return ten users: name, last items, targets, and the items shown with whether each is a target."""
    trained = results.measured.trained
    cuts, texts, item = trained.cuts, trained.texts, trained.config.item
    ranked = results.measured.test[results.seen][name][0]
    chosen = np.linspace(0, len(cuts.test) - 1, min(_USERS, len(cuts.test))).astype(int)
    found = []
    for user in chosen:
        one = cuts.test.choose(np.array([user]))
        did = cuts.ids[one.histories.items[::-1][:_ITEMS]]
        after = one.targets.items[:_ITEMS]
        names = texts.name(item, cuts.ids[np.maximum(after, 0)])
        followed = [name if each >= 0 else "new" for name, each in zip(names, after, strict=True)]
        best = ranked.shown[user][: results.k]
        best = best[best >= 0]
        hits = np.isin(best, after).tolist()
        shown = [*zip(texts.name(item, cuts.ids[best]), hits, strict=True)]
        (name,) = texts.name(trained.schema.task, one.histories.users[:1])
        found.append((name, texts.name(item, did), followed, shown))
    return found


def _figures(results: Results) -> list[tuple[str, str, str, Any]]:
    """Draw the figures: name, heading, caption, figure."""
    from gmeta.experiment.report.style import (
        MARKERS,
        PALETTE,
        canvas,
        draw_groups,
        label_lines,
        whole_numbers,
    )

    trained, k = results.measured.trained, results.k
    drawn = []
    curves = {
        name: seeds for name, seeds in results.epochs.items() if any(len(each) > 1 for each in seeds.values())
    }
    if curves:
        longest = max((trained.label(name) for name in curves), key=len)
        heading = f"NDCG@{k} in validation after each epoch"
        figure, (axes,) = canvas(
            heading, "the best epoch of each run is what the table measures", 3.6, label=longest
        )
        labels = []
        for number, (name, seeds) in enumerate(curves.items()):
            colour = PALETTE[number % len(PALETTE)]
            for values in seeds.values():
                axes.plot(np.arange(1, len(values) + 1), values, color=colour, linewidth=1.6)
                best = int(np.argmax(values))
                axes.plot(best + 1, values[best], MARKERS[number % len(MARKERS)], color=colour)
            labels.append((trained.label(name), colour, next(iter(seeds.values()))[-1]))
        whole_numbers(axes)
        axes.set_xlabel("epoch")
        label_lines(axes, labels)
        drawn.append(("learning", heading, "A marker is at the best epoch of a run.", figure))
    for number, (title, (spans, found)) in enumerate(groups(results).items()):
        heading = f"Recall@{k} {title}"
        lines = [(trained.label(name), name in trained.methods, values) for name, values in found.items()]
        figure = draw_groups(heading, "in quarters of the items asked for", spans, lines, bottom=0)
        caption = "Methods, and the two strongest baselines (dashed)."
        drawn.append((("by_length", "by_popularity")[number], heading, caption, figure))
    return drawn


def evaluate_run(run: RunFolder, on_bad: OnBad = "raise") -> Results:
    """Measure a trained run.

    Raises:
      DataError: The run isn't fully trained.
    """
    trained = load_catalogue(run, on_bad)
    by = f"val_ndcg@{trained.config.ks[0]}"
    epochs = {
        method: {seed: read_logged(run.training(method, seed), by) for seed in trained.config.seeds}
        for method in trained.methods
        if method != BLEND
    }
    return Results(measure(trained), epochs)
