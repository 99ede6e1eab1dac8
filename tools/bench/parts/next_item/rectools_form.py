"""RecTools' SASRec, run by the peer's interpreter, which has no gmeta.

It uses RecTools' training loop, by `fit_partial`; times cover the epoch, without the preparation of each
call.
"""

from __future__ import annotations

import logging
import math
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from parts.next_item.turns import answer, now
from pytorch_lightning import Callback, Trainer, seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel

HELD = {"validation": 1, "test": 0}
"""How many of a user's last items a cut leaves out; the last one that remains is the target."""


class EpochClock(Callback):
    """Measures the seconds of the last epoch; shared by copies, because RecTools copies its trainer."""

    start: ClassVar[Any] = None
    seconds: ClassVar[Any] = None

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Start."""
        EpochClock.start = now()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Stop."""
        EpochClock.seconds = now() - EpochClock.start


class RecTools:
    """See `parts.next_item.turns.Trainer`.

    Args:
      settings: ``file``, ``dim``, ``max_length``, ``users_per_batch``, ``dropout``, ``learning_rate``,
        ``threads``, ``workers``, ``seed``; ``negatives``, or None for a softmax of the whole catalogue.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        warnings.simplefilter("ignore")
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        torch.set_num_threads(settings["threads"])
        seed_everything(settings["seed"])
        lines = Path(settings["file"]).read_text().splitlines()
        rows = [[*map(int, line.split()[1:])] for line in lines]
        self.histories = [row for row in rows if len(row) >= 3]
        negatives = settings["negatives"]
        self.model = SASRecModel(
            n_blocks=1,
            n_heads=1,
            n_factors=settings["dim"],
            session_max_len=settings["max_length"],
            batch_size=settings["users_per_batch"],
            dropout_rate=settings["dropout"],
            lr=settings["learning_rate"],
            loss="softmax" if negatives is None else "sampled_softmax",
            n_negatives=negatives or 1,
            dataloader_num_workers=settings["workers"],
            get_trainer_func=self._trainer,
        )
        trained = [row[:-2] for row in self.histories]
        learnt_from = sum(len(row) > 1 for row in trained)  # RecTools leaves out the others
        self.steps = math.ceil(learnt_from / settings["users_per_batch"])
        lengths = [*map(len, trained)]
        places = np.concatenate([*map(np.arange, lengths)])
        self.dataset = Dataset.construct(
            pd.DataFrame(
                {
                    Columns.User: np.repeat(np.arange(len(trained)), lengths),
                    Columns.Item: np.concatenate(trained),
                    Columns.Weight: 1.0,
                    Columns.Datetime: pd.Timestamp(0) + pd.to_timedelta(places, unit="s"),
                }
            )
        )

    def _trainer(self) -> Trainer:
        quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
        return Trainer(accelerator="cpu", devices=1, callbacks=[EpochClock()], **dict.fromkeys(quiet, False))

    def train(self, share: float) -> list[float]:
        """Train."""
        steps = max(1, round(share * self.steps))
        trainer = self.model.fit_trainer or self.model._trainer
        trainer.limit_train_batches = steps if steps < self.steps else 1.0
        self.model.fit_partial(self.dataset, min_epochs=1, max_epochs=1)
        return (EpochClock.seconds * (self.steps / steps)).tolist()

    @torch.no_grad()
    def measure(self, cut: str) -> float:
        """Rank the right item among the items of training; one that isn't among them is not found."""
        prepared, network = self.model.data_preparator, self.model.torch_model.eval()
        known = pd.Series(prepared.item_id_map.to_internal)
        items = network.item_model.get_all_embeddings()
        gain, size = 0.0, 1024
        for start in range(0, len(self.histories), size):
            rows = self.histories[start : start + size]
            rows = [row[: len(row) - HELD[cut]] for row in rows]
            sessions = [known.reindex(row[:-1]).dropna().astype(int).to_list() for row in rows]
            right = known.reindex([row[-1] for row in rows])
            found = torch.tensor((right.notna() & [bool(each) for each in sessions]).to_numpy())
            batch = prepared._collate_fn_recommend([(each or [0], [], {}) for each in sessions])
            asked = network.encode_sessions(batch, items)[:, -1]
            scores = asked @ items.T
            own = scores.gather(1, torch.tensor(right.fillna(0).to_numpy(int))[:, None])
            ranks = (scores[:, prepared.n_item_extra_tokens :] >= own).sum(1)
            gain += float(((ranks <= 10) & found).div(torch.log2(ranks + 1.0)).sum())
        network.train()
        return gain / len(self.histories)


if __name__ == "__main__":
    answer(RecTools)
