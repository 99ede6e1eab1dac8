"""Runs README, docs and recipes as a reader pastes them: a page's blocks in order, in one empty folder.

Python blocks share one namespace, and bash runs shell blocks. The fence of a block determines its treatment::

    ```python                      runs
    ```sh                          runs
    ```toml clicks.toml            is written to that file
    ```text                        is in the output of the previous block, among other lines
    ```python slow                 runs with the slow tests, and is otherwise checked like the next one
    ```python no-run: needs a GPU  is compiled; its names must exist, and take the arguments that it passes
    ```sh no-run: needs Spark      isn't run; tests/test_pages.py checks commands and options of all blocks

The text after an expression and ``# ->`` is its printed value. There, and in text, ``...`` is any text, and a
number may differ by the number after ``±``.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import inspect
import io
import linecache
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gmeta

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(gmeta.__file__).resolve().parents[1]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
"""Command -> the function that it calls, as ``module:function``."""
UNKNOWN = object()
"""The value of a name that only a run determines."""

_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_SHOWS = "# -> "


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
      line: The line of its fence.
      kind: ``python``, ``sh``, ``toml`` or ``text``.
      note: The rest of its fence.
      text: The text of its lines.
    """

    line: int
    kind: str
    note: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, whose path begins at the project's root.

    Raises:
      AssertionError: The page has a fence that belongs to none of them.
    """
    text = (ROOT / page).read_text()
    found = [
        Block(text[: each.start()].count("\n") + 1, *each.groups(default=""))
        for each in re.finditer(r"^```(\S*)(?: (.*))?\n((?:.*\n)*?)```$", text, re.MULTILINE)
    ]
    assert len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)) == 2 * len(found), page
    return found


def agrees(expected: str, line: str) -> bool:
    """Return whether a line is as expected: numbers within their ``±``, any text for ``...``.

    Example:
      >>> agrees("0.77 ± 0.03 stars ...", "0.79 stars off"), agrees("0.77 ± 0.03", "0.81")
      (True, False)
    """
    parts = re.split(rf"({_NUMBER})(?: ?± ?({_NUMBER}))?", " ".join(expected.split()))
    words = [re.escape(part).replace(r"\.\.\.", ".*") for part in parts[::3]]
    found = re.fullmatch(f"({_NUMBER})".join(words), " ".join(line.split()))
    if found is None:
        return False
    numbers, given = (
        [float(each.replace(",", "")) for each in each_of] for each_of in (found.groups(), parts[1::3])
    )
    within = [float(each or 0) + 1e-9 for each in parts[2::3]]
    return all(
        abs(number - wanted) <= most for number, wanted, most in zip(numbers, given, within, strict=True)
    )


def run_page(page: str, *, slow: bool = False) -> None:
    """Run a page's blocks in this process and its folder.

    Args:
      page: Its path, from the project's root.
      slow: Whether slow blocks run too.

    Raises:
      AssertionError: A shell block fails, the output differs from the page, there is a warning, or a block
        that isn't run has names or arguments that don't exist.
    """
    with contextlib.ExitStack() as stack:
        environment = _shell_environment(stack)
        names: dict[str, Any] = {"__name__": "__main__"}
        assumed: dict[str, Any] = {}  # names that blocks which aren't run would bind
        printed: str | None = None
        for block in blocks_of(page):
            where = f"{page}:{block.line}"
            if block.kind == "toml":
                Path(block.note).write_text(block.text)
            elif block.kind == "text":
                if printed is not None and not block.note:
                    _expect(block.text.splitlines(), printed, where)
            elif block.note.startswith("no-run") or (block.note == "slow" and not slow):
                printed = None
                if block.kind == "python":
                    assumed |= check_python(block.text, {**names, **assumed}, where)
            elif block.kind == "python":
                printed = _run_python(block, names, page)
            else:
                printed = _run_shell(block, environment, where)


def check_page(page: str) -> None:
    """Check the Python blocks of a page, its path from the project's root, as `check_python` does.

    Raises:
      AssertionError: A block has names or arguments that don't exist.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.kind == "python":
            names |= check_python(block.text, names, f"{page}:{block.line}")


def _expect(lines: list[str], printed: str, where: str) -> None:
    """Check that these lines were printed in this order, among others."""
    there = iter(printed.splitlines())
    for line in filter(str.strip, lines):
        assert any(agrees(line, each) for each in there), f"{where}: prints no {line!r}:\n{printed}"


class _Printed(ast.NodeTransformer):
    """Print the expressions that are followed by their values."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.expected = [line.split(_SHOWS)[1] for line in self.lines if _SHOWS in line]

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        is_print = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "print"
        if _SHOWS in self.lines[(node.end_lineno or 0) - 1] and not is_print:
            node.value = ast.Call(ast.Name("print", ast.Load()), [node.value], [])
        return ast.fix_missing_locations(node)


def _run_python(block: Block, names: dict[str, Any], page: str) -> str:
    printed, where = io.StringIO(), f"{page}:{block.line}"
    lines = block.text.splitlines(keepends=True)
    linecache.cache[where] = len(block.text), None, lines, where  # for `inspect`, which AutoGraph uses
    shows = _Printed(block.text)
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
            exec(compile(shows.visit(ast.parse(block.text)), where, "exec"), names)
    finally:
        sys.stdout.write(printed.getvalue())
    _expect(shows.expected, printed.getvalue(), where)
    shown = [line for each in blocks_of(page) if each.kind == "text" for line in each.text.splitlines()]
    for warning in warned:
        line = f"{warning.category.__name__}: {warning.message}"
        assert any(agrees(expected, line) for expected in shown), (
            f"{where} warns, and the page doesn't: {line}"
        )
    return printed.getvalue()


def _run_shell(block: Block, environment: Mapping[str, str], where: str) -> str:
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def _shell_environment(stack: contextlib.ExitStack) -> dict[str, str]:
    """Emulate a checkout with gmeta installed, and a substitute for TensorFlow Serving (`rest_server`)."""
    from support.serving import rest_server

    commands = Path(".bin")
    commands.mkdir()

    def add(name: str, line: str) -> None:
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)

    for name, place in SCRIPTS.items():
        module, function = place.split(":")
        program = f"import sys; sys.argv[0] = '{name}'; from {module} import {function}; {function}()"
        add(name, f'exec {sys.executable} -c "{program}" "$@"')
    add("python", f'exec {sys.executable} "$@"')
    port = stack.enter_context(rest_server(Path("serving")))
    to_server = f"--connect-to localhost:8501:localhost:{port}"
    add("curl", f'exec {shutil.which("curl")} -sS --fail-with-body {to_server} "$@"')
    add("tensorflow_model_server", "exit 0")
    for folder in ("models", "tools"):
        Path(folder).symlink_to(ROOT / folder)
    return {**os.environ, "PATH": f"{commands.resolve()}:{os.environ['PATH']}"}


def check_python(text: str, names: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check that the names in code exist, and take the arguments that it passes.

    Args:
      text: The code, of which only imports are run.
      names: The names defined before it.
      where: Its place, for messages.

    Returns:
      The names that it would define.

    Raises:
      AssertionError: A name, an attribute or an argument doesn't exist.
      ImportError: It imports something from gmeta that doesn't exist.
    """
    tree = ast.parse(text)
    compile(tree, where, "exec")
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    binds = _imports(nodes) | dict.fromkeys(bound, UNKNOWN)
    arguments = dict.fromkeys((node.arg for node in nodes if isinstance(node, ast.arg)), UNKNOWN)
    known = {**vars(builtins), **names, **binds, **arguments}
    for node in nodes:
        if isinstance(node, ast.Name):
            assert node.id in known, f"{where}: {node.id} isn't defined"
        if isinstance(node, ast.Attribute | ast.Call):
            check_expression(node, known, where)
    return binds


def _imports(nodes: list[ast.AST]) -> dict[str, Any]:
    """Return what imports bind; a package that isn't gmeta's may be missing."""
    names: dict[str, Any] = {}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            rooms = {(module or "").split(".")[0] for module in modules_of(node)}
            if all(room == "gmeta" or importlib.util.find_spec(room) is not None for room in rooms):
                exec(compile(ast.Module([node], []), "<imports>", "exec"), names)
            else:
                names |= {(each.asname or each.name).split(".")[0]: UNKNOWN for each in node.names}
    return names


def modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the modules that an import names."""
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]


def check_expression(node: ast.expr, known: Mapping[str, Any], where: str) -> Any:
    """Return the value of an expression, as far as names and attributes show it, and check these."""
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute):
        value = check_expression(node.value, known, where)
        if value is UNKNOWN:
            return UNKNOWN
        with contextlib.suppress(ImportError):
            if inspect.ismodule(value):  # a page may name a module that isn't imported yet
                importlib.import_module(f"{value.__name__}.{node.attr}")
        found = getattr(value, node.attr, UNKNOWN)
        if found is UNKNOWN:
            of_instances = node.attr in getattr(value, "__annotations__", ())
            if inspect.isclass(value) and not of_instances:
                of_instances = f"self.{node.attr}" in inspect.getsource(value)
            assert of_instances, f"{where}: {ast.unparse(node)} doesn't exist"
        return found
    if isinstance(node, ast.Call) and not any(isinstance(each, ast.Starred) for each in node.args):
        function = check_expression(node.func, known, where)
        passed = {each.arg: None for each in node.keywords if each.arg is not None}
        with contextlib.suppress(ValueError):  # built in, so without a signature
            if function is not UNKNOWN:
                try:
                    inspect.signature(function).bind_partial(*node.args, **passed)
                except TypeError as error:
                    raise AssertionError(f"{where}: {ast.unparse(node.func)}: {error}") from error
    return UNKNOWN


if __name__ == "__main__":
    random.seed(0)  # Keras draws the seeds of initial weights from it
    run_page(sys.argv[1], slow="slow" in sys.argv[2:])
