"""Small MovieLens folders for tests, in either layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gmeta.experiment.plan.experiment_config import ExperimentConfig, MethodConfig
from gmeta.meta import InnerLoop
from gmeta.preprocess import prepare
from gmeta.preprocess.movielens.movielens_records import AGE_THRESHOLDS, GENRES
from gmeta.preprocess.synthetic import ratings as synthetic

USERS, ITEMS = 60, 80
_GROUPS_1M = (1, *AGE_THRESHOLDS)


def small_100k(folder: Path, seed: int = 0) -> Path:
    """Write a synthetic folder of `USERS` users and `ITEMS` items in MovieLens-100K's layout."""
    return synthetic.generate(folder, synthetic.SyntheticConfig(seed=seed, users=USERS, items=ITEMS))


def as_1m(folder_100k: Path, folder: Path) -> Path:
    """Write the content of a MovieLens-100K folder in MovieLens-1M's layout.

    Attributes come out the same from either, but for items of the genre "unknown", which 1M doesn't have
    and which are given none.
    """
    occupations = (folder_100k / "u.occupation").read_text().split()
    users = []
    for line in (folder_100k / "u.user").read_text().splitlines():
        user, age, gender, occupation, code = line.split("|")
        group = _GROUPS_1M[sum(int(age) >= threshold for threshold in AGE_THRESHOLDS)]
        users.append(f"{user}::{gender}::{group}::{occupations.index(occupation)}::{code}")
    items = []
    for line in (folder_100k / "u.item").read_text(encoding="latin-1").splitlines():
        item, title, _, _, _, *flags = line.split("|")
        genres = [name for name, flag in zip(GENRES[1:], flags[1:], strict=True) if flag == "1"]
        items.append(f"{item}::{title}::{'|'.join(genres)}")
    ratings = (folder_100k / "u.data").read_text().replace("\t", "::").splitlines()
    contents = {"users.dat": users, "movies.dat": items, "ratings.dat": ratings}
    return synthetic.write(folder, {name: _join(lines) for name, lines in contents.items()})


def edit(folder: Path, name: str, lines: Mapping[int, str | None]) -> None:
    """Replace lines of a file, counted from 1; None removes one, the number after the last appends one."""
    path = folder / name
    content: list[str | None] = [*path.read_text(encoding="latin-1").splitlines(), None]
    for number, line in lines.items():
        content[number - 1] = line
    path.write_bytes(_join([line for line in content if line is not None]))


def _join(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("latin-1")


# An experiment that trains in seconds: a few tasks of synthetic ratings, a narrow network.


def small_data(folder: Path) -> Path:
    """Prepare a small synthetic data set below ``folder``."""
    prepare(small_100k(folder / "raw"), folder / "data")
    return folder / "data"


def small_config(epochs: int = 3, seeds: tuple[int, ...] = (0,)) -> ExperimentConfig:
    """Both methods of the default experiment, made small."""
    return ExperimentConfig(
        seeds=seeds,
        tasks_per_batch=8,
        query=4,
        embedding_dim=4,
        hidden=(8,),
        support_sizes=(1, 4),
        support_steps=1,
        methods={
            "maml": MethodConfig(
                "MAML", "Adapts.", InnerLoop(steps=1, learning_rate=0.01), learning_rate=1e-2, epochs=epochs
            ),
            "joint": MethodConfig(
                "joint training",
                "Doesn't adapt.",
                InnerLoop(steps=0, learning_rate=0.01),
                outer_samples="all",
                learning_rate=1e-2,
                epochs=epochs,
            ),
        },
    )


def small_toml(*, epochs: int, tasks: int = 8) -> str:
    """Settings for ``gmeta train``: the first of these methods, with ``tasks`` a batch."""
    return _TOML.format(epochs=epochs, tasks=tasks)


_TOML = """
seeds = [0]
tasks_per_batch = {tasks}
query = 4
embedding_dim = 4
hidden = [8]
support_sizes = [1, 4]
support_steps = 1
[methods.maml]
label = "MAML"
description = "Adapts."
inner = {{ steps = 1 }}
learning_rate = 1e-2
epochs = {epochs}
"""
