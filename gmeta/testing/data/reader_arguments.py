"""A reader's start and options out of flat arguments, which tests vary one by one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from gmeta.io import AfterSteps, OneEpoch, ReadOptions


def reading(**given: Any) -> dict[str, Any]:
    """Put options of a reader into ``options``, and an epoch, or steps that were taken, into ``start``.

    Args:
      **given: Arguments of a reader; fields of `ReadOptions`; and of a start, ``epoch``, ``passed``
        (steps that were taken) and ``again`` (all iterations are that epoch).

    Example:
      >>> arguments = reading(batch_size=8, epoch=2, seed=1)
      >>> arguments["batch_size"], arguments["start"], arguments["options"].seed
      (8, 2, 1)
    """
    options = {field.name: given.pop(field.name) for field in fields(ReadOptions) if field.name in given}
    epoch, passed, again = given.pop("epoch", 0), given.pop("passed", None), given.pop("again", False)
    start = epoch if passed is None else AfterSteps(passed, epoch)
    start = OneEpoch(epoch) if again else start
    return {"start": start, **given, "options": ReadOptions(**options)}
