"""The package of the callbacks: what it has, and that it loads nothing that isn't used."""

import subprocess
import sys

import pytest

from gmeta import callbacks


@pytest.mark.parametrize("name", sorted(callbacks._WHERE))
def test_a_callback_is_there_by_its_name(name):
    assert getattr(callbacks, name).__name__ == name
    assert name in dir(callbacks)


def test_what_is_not_there_is_named():
    with pytest.raises(AttributeError, match="has no attribute 'Checkpoint'"):
        callbacks.Checkpoint  # noqa: B018


def test_the_package_alone_loads_no_tensorflow():
    code = "import sys, gmeta; gmeta.callbacks; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
