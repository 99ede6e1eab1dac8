"""A warm program is a process of its own, with the output, exit code and end that `subprocess` would see."""

import os
import subprocess
import sys

import pytest

from support import warm


def run(code, *words, **options):
    return warm.run([sys.executable, "-c", code, *words], **options)


@pytest.mark.parametrize(
    ("code", "ends", "says"),
    [
        ("print('done')", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
)
def test_its_end_is_told(code, ends, says):
    done = run(code)
    assert (done.returncode, done.stderr) == (ends, says)
    assert done.stdout == ("done\n" if ends == 0 else "")


def test_an_error_is_shown():
    done = run("{}['absent']")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'absent'"


def test_it_has_its_own_words_folder_and_environment(tmp_path):
    (tmp_path / "beside.py").write_text("import os\nfound = os.environ['HERE']\n")
    (tmp_path / "start.py").write_text(
        "import os, sys, beside\nprint(beside.found, os.getcwd(), sys.argv[1])\n"
    )
    environment = {**os.environ, "HERE": "so"}
    done = warm.run([sys.executable, tmp_path / "start.py", "a b"], cwd=tmp_path, env=environment)
    assert done.stdout == f"so {tmp_path} a b\n", done.stderr
    code = "import beside; print(beside.found)"
    assert run(code, env={**environment, "PYTHONPATH": str(tmp_path)}).stdout == "so\n"
    assert "ModuleNotFoundError" in run(code, env=environment).stderr


def test_tensorflow_is_loaded_and_has_not_run():
    code = (
        "import sys; assert 'tensorflow' in sys.modules\nfrom tensorflow.python.eager import context\n"
        "assert context._context is None or not context._context._initialized\n"
        "import tensorflow as tf; print(int(tf.add(1, 2)))\n"
    )
    assert run(code).stdout == "3\n"


def test_what_it_starts_is_warm_until_tensorflow_has_run():
    child = "import sys; print('tensorflow' in sys.modules, flush=True)"
    code = (
        "import subprocess, sys, tempfile\nimport tensorflow as tf\nfrom pathlib import Path\n"
        f"def start(): subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
        "folder = tempfile.TemporaryDirectory()\nstart()\n"
        "assert Path(folder.name).exists()\n"  # it is this one's, not the child's, to remove
        "tf.add(1, 2)\nstart()\n"
    )
    done = run(code)
    assert done.stdout == "True\nFalse\n", done.stderr


def test_one_that_takes_too_long_is_killed():
    with pytest.raises(subprocess.TimeoutExpired):
        run("import time; time.sleep(600)", timeout=1)
    assert run("print('next')").stdout == "next\n"
