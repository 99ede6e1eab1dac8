"""Calls of the CUDA library from Python have the parameters that its headers declare; needs no GPU."""

import ast
from pathlib import Path

from support.gpu.cuda_library import parameter_counts

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/cuda", "tests/support/gpu", "tools/bench")
PREFIX = {"call_library": "gmeta_", "call": "gmeta_gpu_"}


def calls():
    """Yield file, line, function and number of arguments of the calls that name a function by a literal."""
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            if any(isinstance(each, ast.Starred) for each in node.args):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in PREFIX:
                name, given = PREFIX[node.func.id] + str(node.args[0].value), len(node.args) - 1
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "call":  # of a GpuTable
                name, given = f"gmeta_gpu_table_{node.args[0].value}", len(node.args)
            else:
                continue
            yield path.relative_to(ROOT), node.lineno, name, given


def test_calls_have_the_parameters_of_the_headers():
    counts, found = parameter_counts(), list(calls())
    assert len(counts) > 50
    assert len(found) > 20
    wrong = [(*each, counts.get(each[2])) for each in found if counts.get(each[2]) != each[3]]
    assert wrong == []
