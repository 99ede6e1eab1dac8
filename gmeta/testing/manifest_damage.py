"""Manifests as nobody should write them: JSON whose structure is kept and whose values are another's.

The rule that they are tried by: a damaged manifest is read as what was written, or refused by one of gmeta's
errors in one line, and no file outside of its folder is opened either way.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gmeta.core.errors import GmetaError

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**70, -(2**63), 1e308, 0.5),
    *(
        float("nan"),
        float("inf"),
        "",
        "1",
        "NaN",
        ".",
        "..",
        "../outside",
        "/etc/passwd",
        "a/../../b",
        "a//b",
    ),
    *("~", "%2e%2e", "..\\..", "x\0y", "\ud800", "x\ny", "item/", "./item", "x" * 5000, [], {}, [[]]),
    *([0], ["x"], {"name": "x"}, [None] * 1024, [-1] * 1024, [2**40] * 1024),
)


def damage(value: Any, rng: random.Random) -> Any:
    """A JSON value with one to three changes at places in it, drawn with its structure in view."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        holder, key = rng.choice(places)
        others = [holder_[key_] for holder_, key_ in places]
        _change(holder, key, others, rng)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside, as what holds it and its key there; of long lists a few."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value))) if len(value) < 8 else [0, 1, len(value) // 2, len(value) - 1]
    else:
        return
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _change(holder: Any, key: Any, others: list[Any], rng: random.Random) -> None:
    value = holder[key]
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("..", "/abs", "a/../../b", "x\0y", "surplus", ""))] = holder.pop(key)
        case 2:
            holder[key] = copy.deepcopy(rng.choice(others))
        case 3 if type(value) is int:
            holder[key] = value + rng.choice((-1, 1, 2**32, -(2**40)))
        case 4 if type(value) in (int, float):
            holder[key] = rng.choice((str(value), float(value) if abs(value) < 2**60 else 0.5, [value]))
        case 5 if isinstance(value, str):
            holder[key] = rng.choice(("../" + value, "/" + value, value + "\0", value + "/..", value.upper()))
        case 6 if isinstance(value, list):
            holder[key] = rng.choice((value * 2, value[:-1], value[::-1], [*value, None], [value]))
        case 7:
            for _ in range(rng.choice((1, 200))):
                value = [value]
            holder[key] = value
        case _:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))


def with_digest(value: Any) -> bytes:
    """The manifest's bytes, its digest that of what it says now, so that all of it is read."""
    if isinstance(value, dict):
        body = {name: each for name, each in value.items() if name != "digest"}
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        value = {**body, "digest": digest}
    return json.dumps(value).encode()


def outcome(read: Callable[[], Any]) -> Any:
    """What reading gives, or None where it is refused as it should be.

    Raises:
      AssertionError: It is refused by an error of another class, or in more than a line.
    """
    try:
        return read()
    except GmetaError as error:
        if len(str(error).splitlines()) != 1:
            raise AssertionError(f"refused in several lines: {error}") from error
        return None
    except Exception as error:
        raise AssertionError(f"refused by {type(error).__name__}: {error}") from error


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Watch which files are opened.

    Raises:
      AssertionError: One is not in this folder.
    """
    opened: list[str] = []
    _watching.append(opened)
    try:
        yield
    finally:
        _watching.remove(opened)
    root = folder.resolve()
    outside = [path for path in opened if not Path(path).resolve().is_relative_to(root)]
    if outside:
        raise AssertionError(f"opened {outside[0]}, outside of {root}")


_watching: list[list[str]] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        _watching
        and event in ("open", "os.listdir", "os.scandir")
        and isinstance(arguments[0], str | os.PathLike)
    ):
        for opened in _watching:
            opened.append(os.fspath(arguments[0]))


sys.addaudithook(_hear)
