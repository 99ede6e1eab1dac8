"""The settings of a generative model of the next item, and defaults that it shares with other models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gmeta.core.errors import ConfigError
from gmeta.experiment.baselines.task_rows import Ints

Backbone = Literal["sasrec", "esasrec", "hstu", "fuxi"]
TIMED: tuple[Backbone, ...] = ("hstu", "fuxi")
"""The backbones that can read times."""

SOURCES = ("attributes", "cooccurrence", "items", "random")
"""What semantic ids can be made of."""
_WITH_ATTRIBUTES = ("attributes", "random")

_OF_DECODER = {
    "width": 64,
    "decoder_blocks": 1,
    "decoder_heads": 2,
    "sampled": 1.0,
    "repeats": True,
    "weight_decay": 0.0,
}
"""The defaults of what only the form ``"decoder"`` has, besides ``negatives``."""
_READ_ON: tuple[Backbone, ...] = ("sasrec", "hstu")
_LEVELS, _CODES_OF_FLAT, _FEWEST_CODES = 3, 256, 8
_COUNTS = (
    *("levels", "codes", "id_dim", "item_epochs", "depth", "dim", "blocks", "heads", "max_length", "width"),
    *("decoder_blocks", "decoder_heads", "negatives", "users_per_batch", "beam", "epochs", "patience"),
)


@dataclass(frozen=True)
class GenerativeMethod:
    """A `gmeta.models.GenerativeRetriever` or `FlatRetriever`, its semantic ids and its training.

    `complete` decides settings that are None.

    Attributes:
      label: Its name in tables and figures.
      model: The kind of model.
      form: ``"decoder"``: a `GenerativeRetriever`; ``"flat"``: a `FlatRetriever`.
      ids: The source of semantic ids: ``"cooccurrence"``, the items near an item in training histories;
        ``"attributes"``, these and the columns ``attributes``; ``"items"``, the item vectors of a SASRec that
        is trained on the same histories for ``item_epochs``; ``"random"``, the ids of ``"attributes"``,
        shuffled among the items; or a folder of `gmeta semantic-ids` with the ids of all items. None:
        ``"attributes"`` if the data set has columns of attributes, else ``"cooccurrence"``.
      attributes: The columns of items to read (`gmeta.experiment.next_item.side_columns`). None: all that are
        the same in all rows of an item.
      levels: The number of codes of an item. None: 3.
      codes: The number of codes of a level. None: the power of two next to the square root of the number of
        items, at least 8; or 256 in the form ``"flat"``.
      balanced: Whether all codes of a level have equally many items. None: true in the form ``"decoder"``.
      id_dim: The width of the vectors that ids are made from, except those of ``"items"``. None: 64.
      item_epochs: The number of epochs of the model for ``"items"``. None: 10.
      depth: How many codes are generated as digits. None: one, or all in the form ``"flat"``.
      backbone: The backbone that reads histories; in the form ``"flat"``, ``"sasrec"`` or ``"hstu"``.
      dim: The width of vectors.
      blocks: The backbone's number of blocks.
      heads: The backbone's number of attention heads.
      max_length: How many of a history's last items are read. None: `usual_length`.
      times: Whether the backbone reads times, which HSTU and FuXi-α can. None: if it can.
      width: The width of the decoder. None: 64.
      decoder_blocks: The decoder's number of blocks. None: 1.
      decoder_heads: The decoder's number of attention heads. None: 2.
      sampled: The weight of the sampled softmax over items, which is added to the loss of codes. None: 1.
      negatives: Items drawn in a step for the sampled softmax. None: the default of `GenerativeRetriever`.
      repeats: Whether to learn how likely items of the history are to repeat. None: true.
      weight_decay: AdamW's decay of rows. None: 0.
      softmax: What the form ``"flat"`` normalises over in training, ``"children"`` or ``"codes"``. None:
        ``"children"``.
      dropout: The share of units that are dropped.
      learning_rate: Adam's rate, also for rows.
      users_per_batch: Users in a step. None: `usual_users`.
      beam: How many prefixes a search keeps at each digit, and how many items it finds.
      epochs: The maximum number of passes over all users.
      patience: The number of epochs without an improvement in validation after which training ends.

    Raises:
      ConfigError: A number is out of range, or a setting belongs to the other form.
    """

    label: str
    model: Literal["generative"]
    form: Literal["decoder", "flat"] = "decoder"
    ids: str | None = None
    attributes: tuple[str, ...] | None = None
    levels: int | None = None
    codes: int | None = None
    balanced: bool | None = None
    id_dim: int | None = None
    item_epochs: int | None = None
    depth: int | None = None
    backbone: Backbone = "sasrec"
    dim: int = 64
    blocks: int = 1
    heads: int = 1
    max_length: int | None = None
    times: bool | None = None
    width: int | None = None
    decoder_blocks: int | None = None
    decoder_heads: int | None = None
    sampled: float | None = None
    negatives: int | None = None
    repeats: bool | None = None
    weight_decay: float | None = None
    softmax: Literal["children", "codes"] | None = None
    dropout: float = 0.3
    learning_rate: float = 1e-3
    users_per_batch: int | None = None
    beam: int = 50
    epochs: int = 100
    patience: int = 10

    def __post_init__(self) -> None:
        where = f"method {self.label!r}:"
        for name in _COUNTS:
            value, least = getattr(self, name), 2 if name == "codes" else 1
            if value is not None and value < least:
                raise ConfigError(f"{where} {name} must be at least {least}, got {value}")
        for name in ("sampled", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{where} {name} must be a finite number of at least 0, got {value}")
        if not (self.learning_rate > 0 and 0 <= self.dropout < 1):
            raise ConfigError(
                f"{where} learning_rate must be above 0 and dropout in [0, 1), got {self.learning_rate} and "
                f"{self.dropout}"
            )
        others = ("softmax",) if self.form == "decoder" else (*_OF_DECODER, "negatives")
        if given := [name for name in others if getattr(self, name) is not None]:
            other = "flat" if self.form == "decoder" else "decoder"
            raise ConfigError(
                f"{where} form {self.form!r} has no {', '.join(given)}: leave it out, or set form = {other!r}"
            )
        for part, heads in ((self.dim, self.heads), (self.width or 64, self.decoder_heads or 2)):
            if part % heads:
                raise ConfigError(
                    f"{where} {heads} heads must divide the width {part} of what they attend to"
                )
        if self.form == "flat" and self.backbone not in _READ_ON:
            raise ConfigError(
                f"{where} {self.backbone!r} can't read on digit by digit: choose {' or '.join(_READ_ON)}"
            )
        if self.times and self.backbone not in TIMED:
            raise ConfigError(
                f"{where} {self.backbone!r} reads no times: leave times out, or choose {' or '.join(TIMED)}"
            )
        levels = self.levels or _LEVELS
        if self.makes_ids and (self.depth or 1) > levels:
            raise ConfigError(f"{where} depth must be at most levels={levels}, got {self.depth}")
        unread = {
            "attributes": bool(self.attributes) and not self.reads_attributes,
            "item_epochs": self.ids != "items",
            "id_dim": self.ids == "items" or not self.makes_ids,
            **dict.fromkeys(("levels", "codes", "balanced"), not self.makes_ids),
        }
        if given := [name for name, unused in unread.items() if unused and getattr(self, name) is not None]:
            raise ConfigError(f"{where} ids = {self.ids!r} reads no {', '.join(given)}: leave it out")

    @property
    def reads_times(self) -> bool:
        """Whether the backbone reads times if the data set has them."""
        return self.backbone in TIMED if self.times is None else self.times

    @property
    def makes_ids(self) -> bool:
        """Whether semantic ids are made rather than read from a folder."""
        return self.ids is None or self.ids in SOURCES

    @property
    def reads_attributes(self) -> bool:
        """Whether ids are made from columns of attributes, if the data set has any."""
        return self.ids is None or self.ids in _WITH_ATTRIBUTES

    def complete(self, sizes: Ints, items: int, attributes: Sequence[str]) -> GenerativeMethod:
        """Decide the settings that are None.

        Args:
          sizes: The numbers of the users' events in training, (users,).
          items: The size of the catalogue.
          attributes: Those of the requested columns of attributes that the data set has.

        Raises:
          ConfigError: The ids must be made from attributes, but there are none.
        """
        decoder = self.form == "decoder"
        if self.ids in _WITH_ATTRIBUTES and not attributes:
            raise ConfigError(
                f"method {self.label!r}: ids = {self.ids!r} needs a column that is the same in all rows of "
                "an item, and there is none: prepare the data with --join, "
                'or set ids = "cooccurrence"'
            )
        square_root = 2 ** round(math.log2(max(items, 1)) / 2)
        levels = (self.levels or _LEVELS) if self.makes_ids else None
        codes = self.codes or (max(square_root, _FEWEST_CODES) if decoder else _CODES_OF_FLAT)
        return replace(
            self,
            ids=self.ids or ("attributes" if attributes else "cooccurrence"),
            attributes=tuple(attributes) if self.reads_attributes else (),
            levels=levels,
            codes=codes if self.makes_ids else None,
            balanced=(decoder if self.balanced is None else self.balanced) if self.makes_ids else None,
            id_dim=(self.id_dim or 64) if self.makes_ids and self.ids != "items" else None,
            item_epochs=(self.item_epochs or 10) if self.ids == "items" else None,
            depth=self.depth or (1 if decoder else levels),
            max_length=self.max_length or usual_length(sizes),
            users_per_batch=self.users_per_batch or usual_users(sizes),
            softmax=None if decoder else self.softmax or "children",
            **{
                name: default if getattr(self, name) is None else getattr(self, name)
                for name, default in _OF_DECODER.items()
                if decoder
            },  # type: ignore[arg-type]
        )


def usual_length(sizes: Ints) -> int:
    """Return a length, from 50 to 200, that nine in ten histories don't exceed: how many items are read."""
    return int(np.clip(np.ceil(np.quantile(sizes, 0.9) / 50) * 50, 50, 200))


def usual_users(sizes: Ints) -> int:
    """Return the number of users in a step: a thirtieth of those with two events, from 32 to 128."""
    return int(np.clip(np.count_nonzero(sizes > 1) // 30, 32, 128))
