"""README, docs and recipes run as a reader pastes them (`support.pages`), and what they name exists."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import gmeta
from gmeta.cli import main as gmeta_command
from support import warm
from support.pages import (
    ROOT,
    SCRIPTS,
    Block,
    agrees,
    blocks_of,
    check_expression,
    check_page,
    check_python,
    modules_of,
)
from support.process_ranks import without_stalls

PAGES = [
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "docs/*.md", "models/*/README.md")
    for path in sorted(ROOT.glob(pattern))
]
FOREIGN = {
    *(
        "apt-get",
        "cat",
        "cmp",
        "curl",
        "done",
        "echo",
        "export",
        "for",
        "hadoop",
        "horovodrun",
        "ls",
        "mkdir",
    ),
    *("pip", "printf", "sleep", "sort", "spark-submit", "tee", "tensorflow_model_server", "until"),
}


def commands_of(text: str) -> Iterator[list[str]]:
    """The commands of a shell text, without variables that are set before them."""
    text = re.sub(r"(?:^|(?<=\s))#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
    command: list[str] = []
    for word in [*lexer, ";"]:
        if not re.fullmatch(r"[;&|\n]+|do", word):
            command.append(word)
            continue
        while command and re.match(r"[A-Z_]+=", command[0]):
            command.pop(0)
        if command:
            yield command
        command = []


def check_command(words: list[str], where: str) -> None:
    """Check that a command exists, its options, and the project's files that it names."""
    name, *rest = words
    options = [word.split("=")[0].strip("[]") for word in rest if word.strip("[").startswith("--")]
    if "--" in options:
        options = options[: options.index("--")]
    for word in words:
        if re.match(r"(?:tools|models)/.*\.\w+$", word):
            assert (ROOT / word).is_file(), f"{where}: there is no {word}"
    if name == "gmeta":
        known = options_of_gmeta(rest, where)
    elif name == "make":
        targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        known, options = targets[1].split(), [word for word in rest if "=" not in word]
    elif (program := rest[0] if name == "python" else name).startswith("tools/bench/"):
        known = options_of_bench(program, options)
    elif name in SCRIPTS or (name == "python" and rest[0] != "-m"):
        known = help_of(SCRIPTS.get(name, rest[0])).split() if options else []
    elif name == "python":
        assert importlib.util.find_spec(rest[1]) is not None, f"{where}: there is no module {rest[1]}"
        return
    else:
        assert name in FOREIGN or (ROOT / name).is_file(), f"{where}: {name} is no command"
        return
    assert [option for option in options if option not in known] == [], f"{where}: {shlex.join(words)}"


def options_of_gmeta(words: list[str], where: str) -> list[str]:
    """The options of the subcommand that words name."""
    command: click.Command = gmeta_command
    words = [word for word in words if word not in ("--debug", "…")]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"{where}: gmeta has no {words[0]}"
        command, words = found, words[1:]
    known = [each for option in command.params for each in (*option.opts, *option.secondary_opts)]
    return [*known, "--help", "--version"]


def options_of_bench(program: str, asked: list[str]) -> list[str]:
    """The options of a benchmark: read from the sources, which takes less time than asking it for help."""
    file = ROOT / program
    files = [file, file.with_name("harness.py"), *file.parent.glob("parts/**/*.py")]
    known = re.findall(r'"(--[\w-]+)"', "".join(path.read_text() for path in files))
    return known if {*asked} <= {*known} else help_of(program).split()


@functools.cache
def help_of(program: str) -> str:
    """What a program of the project's answers to --help."""
    if program.endswith(".py"):
        words = [ROOT / program]
    else:
        module, function = program.split(":")
        words = ["-c", f"from {module} import {function}; {function}()"]
    done = warm.run([sys.executable, *words, "--help"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def prose_of(page: str) -> Iterator[tuple[str, str]]:
    """What stands as code in the prose, with its place."""
    text = re.sub(
        r"^```.*?^```$",
        lambda block: "\n" * block[0].count("\n"),
        (ROOT / page).read_text(),
        flags=re.M | re.S,
    )
    for each in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        yield " ".join(each[1].split()), f"{page}:{text[: each.start()].count(chr(10)) + 1}"


# The tests.


def skip_without_programs(page: str) -> None:
    for name in ("curl", "jq"):
        if f"{name} " in (ROOT / page).read_text() and shutil.which(name) is None:
            pytest.skip(f"there is no {name}")


RUN = [
    page
    for page in PAGES
    if any(block.kind == "python" or (block.kind == "sh" and not block.note) for block in blocks_of(page))
]
QUICK = ("docs/reinforcement.md",)
SHOWN = pytest.mark.shown_by("test_what_a_page_names_exists")


@pytest.mark.parametrize("page", [pytest.param(page, marks=() if page in QUICK else SHOWN) for page in RUN])
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    skip_without_programs(page)
    done = warm.run([sys.executable, "-m", "support.pages", page], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # No chatter of TensorFlow's, but that a page with many models traces a function again and again.
    assert re.sub(r".* triggered tf.function retracing\..*\n", "", without_stalls(done.stderr)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_with_slow_blocks_where_nothing_is_imported(page: str, tmp_path: Path) -> None:
    skip_without_programs(page)
    command = [sys.executable, "-m", "support.pages", page, "slow"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", RUN)
def test_what_a_page_names_exists(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_page(page)


@pytest.mark.parametrize("page", PAGES)
def test_gmeta_is_imported_before_tensorflow(page: str) -> None:
    """So that a block can be pasted by itself: pages run where gmeta is imported already."""
    for block in blocks_of(page):
        found = ast.walk(ast.parse(block.text)) if block.kind == "python" else ()
        modules = [
            each.split(".")[0]
            for node in sorted(found, key=lambda node: getattr(node, "lineno", 0))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for each in modules_of(node)
        ]
        assert "tensorflow" not in modules or "gmeta" in modules[: modules.index("tensorflow")], block


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    before = Block(0, "", "", "")
    for block in blocks_of(page):
        where = f"{page}:{block.line}"
        assert block.kind in ("python", "sh", "toml", "text"), f"{where}: say what the block is"
        if block.kind == "toml":
            assert Path(block.note).suffix == ".toml", f"{where}: name the file"
        elif block.kind == "text":
            assert block.note.startswith("no-run: ") or before.kind in ("python", "sh"), (
                f"{where}: printed by what?"
            )
        else:
            assert block.note in ("", "slow") or block.note.startswith("no-run: needs "), (
                f"{where}: {block.note}"
            )
        before = block


def test_the_front_page_says_what_gmeta_is_in_few_lines() -> None:
    assert all(block.text.count("\n") <= 30 for block in blocks_of("README.md"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", (ROOT / page).read_text()):
        target = (ROOT / page).parent / link[0] if link[0] else ROOT / page
        assert target.exists(), f"{page}: {link[0]}"
        assert not link[1] or link[1] in anchors_of(target), f"{page}: {link[0]}#{link[1]}"


def anchors_of(path: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_names_exist(page: str) -> None:
    for block in blocks_of(page):
        for words in commands_of(block.text) if block.kind == "sh" else ():
            check_command(words, f"{page}:{block.line}")
    programs = ("gmeta ", "make ", "python ", *(f"{name} " for name in SCRIPTS))
    for code, where in prose_of(page):
        if re.sub(r"^(?:[A-Z_]+=\S+ )*", "", code).startswith(programs):
            for words in commands_of(code):
                check_command(words, where)
        elif re.match(r"[\w.]+(\(|$)", code) and not re.search(r"\.(?:py|json)$", code):
            with contextlib.suppress(SyntaxError):
                check_expression(ast.parse(code, mode="eval").body, public_names(), where)


@functools.cache
def public_names() -> dict[str, Any]:
    """gmeta, and each name that one room alone has."""
    found = {name: getattr(gmeta, name) for name in gmeta.__all__}
    rooms = {name: room for name, room in found.items() if inspect.ismodule(room)}
    names = [name for room in rooms.values() for name in room.__all__]
    return {
        **{
            name: getattr(room, name)
            for room in rooms.values()
            for name in room.__all__
            if names.count(name) == 1
        },
        **found,
        "gmeta": gmeta,
    }


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["```python", "x = 3", "```", "```python", "x  # -> 3", "open('f', 'w').write('so')", "```"], ""),
        (["```sh", "echo so > f", "cat f", "```", "", "```text", "s...", "```"], ""),
        (["```python slow", "x = 3", "```", "```python no-run: needs", "x, print(x, end='')", "```"], ""),
        (["```python", "2 + 2.25  # -> 4 ± 0.2", "```"], "page.md:1: prints no '4 ± 0.2'"),
        (["```sh", "echo 3 rows", "```", "```text", "4 rows", "```"], "page.md:4: prints no '4 rows'"),
        (["```python", "import math", "```", "```python", "pi", "```"], "name 'pi' is not defined"),
        (["```python no-run: needs", "pi", "```"], "page.md:1: pi isn't defined"),
        (["```sh", "false", "true", "```"], "page.md:1: "),
        (
            ["```python", "import warnings", "warnings.warn('so')", "```"],
            "warns, and the page doesn't: UserWarning",
        ),
        (["```python", "x = 3"], "page.md"),
    ],
)
def test_a_page_that_shows_something_else_fails(lines: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("\n".join(lines) + "\n")
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-m", "support.pages", tmp_path / "page.md"]
    done = warm.run(command, cwd=tmp_path / "run")
    assert (done.returncode == 0) is (says == ""), done.stderr
    assert says in done.stderr


@pytest.mark.parametrize(
    ("expected", "line", "same"),
    [
        ("0.77 ± 0.03 stars off", "0.79 stars off", True),
        ("0.77 ± 0.03 stars off", "0.81 stars off", False),
        ("(64, None)", "(64, None)", True),
        ("(64, None)", "(32, None)", False),
        ("... 3 rows", "wrote 3 rows", True),
        ("3 rows", "wrote 3 rows", False),
        ("1,200 rows", "1200 rows", True),
        ("[0.5 ±.1, .25 ±.1]", "[0.55, 0.3]", True),
    ],
)
def test_what_agrees(expected: str, line: str, same: bool) -> None:
    assert agrees(expected, line) is same


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import gmeta\ngmeta.io.tsaks('data')", "gmeta.io.tsaks doesn't exist"),
        ("from gmeta.io import tasks\ntasks('data', qury=3)", "qury"),
        ("from gmeta.io import tsaks", "tsaks"),
        ("tasks('data')", "tasks isn't defined"),
    ],
)
def test_names_that_do_not_exist_are_found(code: str, says: str) -> None:
    with pytest.raises((AssertionError, ImportError), match=says):
        check_python(code, {}, "here")


@pytest.mark.parametrize(
    "line",
    [
        *(
            "gmeta trian",
            "gmeta train --dta data",
            "gmeta history grow x",
            "python tools/bench/exchange.py --rank 2",
        ),
        *(
            "make tset",
            "python tools/dev/demo_clicks.py --layers 3",
            "python -m gmeta.selftset",
            "gemta train",
        ),
        *("gmeta-map --jop x rows", "tools/preprocess/no.sh"),
    ],
)
def test_commands_that_do_not_exist_are_found(line: str) -> None:
    (words,) = commands_of(f"A=1 {line}  # comment")
    with pytest.raises(AssertionError, match="here"):
        check_command(words, "here")
