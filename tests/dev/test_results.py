"""The files of docs/results: what a page's numbers come from, and nothing else."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_page_cites_every_file() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("models/*/README.md"),
    ]
    text = "\n".join(page.read_text() for page in pages)
    files = sorted(path.name for path in (ROOT / "docs" / "results").iterdir())
    assert files
    assert [name for name in files if f"results/{name}" not in text] == []
