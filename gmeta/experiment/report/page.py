"""The report of an evaluation: one HTML file that needs no network, and a PNG of each figure beside it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gmeta.core.files import write_atomically
from gmeta.experiment.report import table
from gmeta.experiment.report.differences import difference_header, difference_rows
from gmeta.experiment.report.findings import headline
from gmeta.experiment.report.reliability import reliability_rows
from gmeta.experiment.results.calibration import LEVELS
from gmeta.experiment.results.evaluation import Evaluation
from gmeta.experiment.results.metrics import METRICS

FILE_NAME, FIGURES = "report.html", "figures"


def write_report(evaluation: Evaluation, folder: Path) -> Path:
    """Write ``report.html`` and ``figures/*.png`` into ``folder``.

    The page embeds its figures and loads nothing from the network, so it can be mailed or filed as it is. If
    the evaluation has no data for a figure, the figure is left out, and its PNG from an earlier report in the
    same folder is removed. Each file is written whole or not at all, the page last.

    Args:
      evaluation: What to report.
      folder: Where to write; made if it is missing.

    Returns:
      The path of the page.

    Raises:
      OSError: The folder can't be written.

    Example:
      >>> from gmeta.experiment.results.evaluation_json import load
      >>> write_report(load(Path("cold.json")), Path("report"))  # doctest: +SKIP
      PosixPath('report/report.html')
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from gmeta.experiment.report import figures

    drawings = figures.draw(evaluation)
    images = []
    for drawing in drawings:
        buffer = io.BytesIO()
        drawing.figure.savefig(buffer, format="png", metadata={"Software": None})
        write_atomically(folder / FIGURES / f"{drawing.name}.png", buffer.getvalue())
        images.append(base64.b64encode(buffer.getvalue()).decode("ascii"))
    for name in set(figures.NAMES) - {drawing.name for drawing in drawings}:
        (folder / FIGURES / f"{name}.png").unlink(missing_ok=True)

    loader = PackageLoader("gmeta.experiment.report", ".")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    text = page.get_template("page.html.j2").render(
        evaluation=evaluation,
        headline=headline(evaluation),
        sections=[
            (one.data.split, table.header(one), table.rows(one), table.legend(one))
            for one in evaluation.sections
        ],
        metrics={METRICS[name].label: METRICS[name].description for name in evaluation.metrics},
        reliability=reliability_rows(evaluation),
        levels=LEVELS,
        compared=[
            (one.data.split, difference_header(one), difference_rows(one))
            for one in evaluation.sections
            if one.bootstrap
        ],
        drawings=list(zip(drawings, images, strict=True)),
        settings=flatten(evaluation.config),
    )
    return write_atomically(folder / FILE_NAME, text)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested settings: dotted name -> the value as JSON; strings stay without quotes."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = (
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            )
    return flat
