"""A small folder in the layout of MovieLens-1M with MeLU's split, of drawn ratings with a taste in them."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from gmeta.preprocess.movielens.melu_records import HEADER, PARTITIONS

USERS, MOVIES = 40, 60
NAMES = {
    "rate": ["PG", "R", "G"],
    "genre": ["Drama", "nan", "Comedy", "War"],
    "director": ["nan", "Ada B.", "Béla C", "Cy D"],
    "actor": ["Ann (I)", "Bo", "nan", "Cleo", "Dee"],
    "gender": ["M", "F"],
    "age": ["1", "18", "56"],
    "occupation": ["0", "1", "2"],
    "zipcode": ["48067", "70072", "T8H1N"],
}
"""Every vocabulary, in the order of its numbers."""
WRITERS = ["Ada B.", "Cy D", "Émile"]
"""Names of writers, which have no file; a movie without writers has ``N/A``."""


def small_melu(folder: Path, seed: int = 0) -> Path:
    """Write `USERS` users who rated 14 to 20 movies in every partition, out of `MOVIES` movies."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for name, values in NAMES.items():
        (folder / f"m_{name}.txt").write_bytes("".join(f"{value}\r\n" for value in values).encode())
    users = []
    for user in range(1, USERS + 1):
        gender, age, occupation, zipcode = (str(draw.choice(NAMES[name])) for name in [*NAMES][4:])
        users.append(f"{user}::{gender}::{age}::{occupation}::{zipcode}-1234")
    (folder / "users.dat").write_text("\n".join(users) + "\n")
    movies, quality = [], draw.normal(3.3, 0.8, MOVIES + 1)
    for movie in range(1, MOVIES + 1):
        rate = draw.choice(NAMES["rate"])
        genres, directors, actors = (
            ", ".join(draw.choice(NAMES[name], draw.integers(1, 4), replace=False)).replace("nan", "N/A")
            for name in ("genre", "director", "actor")
        )
        writers = ", ".join(f"{name} (story, uncredited)" for name in WRITERS[: movie % 4]) or "N/A"
        movies.append(
            f"{movie}::Film {movie}::{1990 + movie % 9}::{rate}::1 Jan 1990::{genres}"
            f"::{directors}(co-director)::{writers}::{actors}::A plot: it thickens.::N/A"
        )
    (folder / "movies_extrainfos.dat").write_text("\r\n".join(movies) + "\r\n", encoding="utf-8", newline="")
    ratings = [HEADER.decode()]
    for partition in PARTITIONS:
        for user in range(1, USERS + 1):
            for movie in draw.choice(MOVIES, draw.integers(14, 21), replace=False) + 1:
                stars = int(np.clip(round(quality[movie] + draw.normal(0, 0.6)), 1, 5))
                ratings.append(f"{user},{movie},{stars},{partition}")
    write_ratings(folder, ratings)
    return folder


def write_ratings(folder: Path, lines: list[str]) -> None:
    """Write the ratings file, its header among the lines."""
    (folder / "ratings.csv.gz").write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))


def read_ratings(folder: Path) -> list[str]:
    """The lines of the ratings file."""
    return gzip.decompress((folder / "ratings.csv.gz").read_bytes()).decode().splitlines()
