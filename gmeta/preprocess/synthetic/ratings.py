"""A synthetic data set in MovieLens-100K's layout, with a structure that adaptation can learn.

Each rating is drawn from a model that is linear in the features of a recommender::

    score = μ + q_i + b_u + t_u · g_i + ε,      rating = min(5, max(1, round(score)))

=====  ==============================================================================================
q_i    quality of the item, with a part that depends on its decade
b_u    bias of the user: some rate everything high
g_i    genres of the item, as flags scaled to length 1
t_u    taste of the user over genres: a part that follows from gender, age bucket and occupation
       (``demographic``, which a model knows before it has seen a rating), and the user's own part of rank 3
       (``personal``, which can only be learnt from the user's ratings)
ε      noise
=====  ==============================================================================================

A few ratings of a new user reveal ``b_u`` and the personal taste, so a model that adapts beats one that
doesn't, and both beat the mean of an item. The distributions are those of MovieLens: the number of ratings of
a user is log-normal (median 65, mean about 106), the popularity of items follows a power law, and users
prefer to rate what they like. As in the original, one item has neither date nor genre, some postal codes
start with a letter, and many ratings share a second.

The data are a function of the seed and of NumPy's generator; another version of NumPy may draw other data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError
from gmeta.preprocess.movielens.movielens_records import AGE_THRESHOLDS, GENRES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

OCCUPATIONS = (
    "administrator",
    "artist",
    "doctor",
    "educator",
    "engineer",
    "entertainment",
    "executive",
    "healthcare",
    "homemaker",
    "lawyer",
    "librarian",
    "marketing",
    "none",
    "other",
    "programmer",
    "retired",
    "salesman",
    "scientist",
    "student",
    "technician",
    "writer",
)
# How often an item has each genre, roughly as in MovieLens-100K; only the item without a genre has "unknown".
_GENRE_WEIGHTS = np.array([0, 25, 14, 4, 12, 51, 11, 5, 73, 2, 2, 9, 6, 6, 25, 10, 25, 7, 3], np.float64)
_MEDIAN_RATINGS, _SIGMA_RATINGS, _FEWEST_RATINGS = 65.0, 0.99, 5
_START, _SPAN = 874_724_710, 214 * 86_400  # 20 September 1997 to 22 April 1998, as in the original
_MONTH = "Jan"
_TASTE_RANK = 3
_SEVERAL_GENRES = (0.5, 0.35, 0.15)  # probability that an item has one, two, three


@dataclass(frozen=True)
class SyntheticConfig:
    """The size of the synthetic data set and the strength of its effects.

    Attributes:
      seed: Seeds all draws.
      users: Number of users.
      items: Number of items.
      mean: Score of an average item from an average user, in stars.
      quality: Standard deviation of the items' quality, in stars.
      bias: Standard deviation of the users' bias, in stars.
      demographic: Standard deviation of the shared taste's part of a score, in stars.
      personal: Standard deviation of the personal taste's part of a score, in stars.
      noise: Standard deviation of the noise, in stars.
    """

    seed: int = 0
    users: int = 943
    items: int = 1682
    mean: float = 3.5
    quality: float = 0.3
    bias: float = 0.45
    demographic: float = 0.35
    personal: float = 0.6
    noise: float = 0.7

    def __post_init__(self) -> None:
        if self.users < 1 or self.items < 2 * _FEWEST_RATINGS:
            raise ConfigError(
                f"at least 1 user and {2 * _FEWEST_RATINGS} items are needed, "
                f"got {self.users} and {self.items}"
            )


def generate(folder: Path, config: SyntheticConfig | None = None) -> Path:
    """Write the data set into ``folder``; make the folder if it is missing.

    Returns:
      ``folder``, with ``u.data``, ``u.item``, ``u.user``, ``u.genre``, ``u.occupation`` and ``u.info``.

    Raises:
      OSError: The folder can't be written.
    """
    return write(folder, files(config))


def write(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Write files, name -> content, into ``folder``, make it if it is missing, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def files(config: SyntheticConfig | None = None) -> dict[str, bytes]:
    """Generate the files of the data set: name -> content."""
    config = config or SyntheticConfig()
    rng = np.random.default_rng(config.seed)
    items, users = _draw_items(rng, config), _draw_users(rng, config)
    ratings = _draw_ratings(rng, config, items, users)
    info = f"{config.users} users\n{config.items} items\n{len(ratings)} ratings\n"
    return {
        "u.data": _lines("\t".join(map(str, row)) for row in ratings.tolist()),
        "u.item": _lines(items.lines()),
        "u.user": _lines(users.lines()),
        "u.genre": _lines(f"{name}|{index}" for index, name in enumerate(GENRES)),
        "u.occupation": _lines(OCCUPATIONS),
        "u.info": info.encode(),
    }


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


@dataclass(frozen=True)
class _Items:
    year: Ints  # (I,), 0 = unknown
    flags: NDArray[np.bool_]  # (I, 19)
    quality: Floats  # (I,)
    popularity: Floats  # (I,), log of an unnormalised probability

    @property
    def genres(self) -> Floats:
        """The genres (I, 19), in rows of length 1."""
        return self.flags / np.sqrt(self.flags.sum(1, keepdims=True))

    def lines(self) -> list[str]:
        lines = []
        for number, (year, flags) in enumerate(zip(self.year, self.flags, strict=True), start=1):
            title = f"Synthetic film {number} ({year})" if year else "unknown"
            date = f"01-{_MONTH}-{year}" if year else ""
            lines.append(
                "|".join([str(number), title, date, "", "", *("1" if flag else "0" for flag in flags)])
            )
        return lines


@dataclass(frozen=True)
class _Users:
    age: Ints  # (U,), in years
    male: NDArray[np.bool_]  # (U,)
    occupation: Ints  # (U,)
    postal_code: list[str]
    bias: Floats  # (U,)
    taste: Floats  # (U, 19)
    ratings: Ints  # (U,), how many each gives

    def lines(self) -> list[str]:
        return [
            f"{number}|{age}|{'M' if male else 'F'}|{OCCUPATIONS[occupation]}|{code}"
            for number, (age, male, occupation, code) in enumerate(
                zip(self.age, self.male, self.occupation, self.postal_code, strict=True), start=1
            )
        ]


def _draw_items(rng: np.random.Generator, config: SyntheticConfig) -> _Items:
    count = config.items
    year = 1998 - np.minimum(rng.exponential(8.0, count).astype(np.int64), 76)
    how_many = rng.choice(3, size=count, p=_SEVERAL_GENRES) + 1
    # The items with the smallest of -log(U)/w are a weighted draw without replacement.
    arrival = rng.exponential(1.0, (count, len(GENRES))) / np.maximum(_GENRE_WEIGHTS, 1e-9)
    flags = arrival.argsort(1).argsort(1) < how_many[:, None]
    undated = int(rng.integers(count))
    year[undated], flags[undated] = 0, np.arange(len(GENRES)) == 0
    by_decade = np.where(year == 0, 0.0, np.clip((1990 - year) / 30, -0.3, 1.0))
    quality = config.quality * (0.8 * rng.standard_normal(count) + 0.6 * by_decade)
    popularity = -0.9 * np.log(rng.permutation(count) + 10.0)
    return _Items(year, flags, quality, popularity)


def _draw_users(rng: np.random.Generator, config: SyntheticConfig) -> _Users:
    count = config.users
    age = np.clip(rng.gamma(6.0, 5.7, count), 7, 75).astype(np.int64)
    male = rng.random(count) < 0.71
    occupation = rng.integers(len(OCCUPATIONS), size=count)
    letters = rng.random(count) < 0.02
    digits = rng.integers(10_000, 100_000, size=count)
    first = rng.integers(26, size=count)
    codes = [
        f"{chr(65 + f)}{d % 10}{chr(65 + d % 26)}{d // 10 % 10}{chr(65 + d % 23)}" if letter else f"{d:05d}"
        for letter, d, f in zip(letters.tolist(), digits.tolist(), first.tolist(), strict=True)
    ]
    bucket = np.searchsorted(AGE_THRESHOLDS, age, side="right")
    genres = len(GENRES)
    shared = (
        rng.standard_normal((2, genres))[male.astype(np.int64)]
        + rng.standard_normal((len(AGE_THRESHOLDS) + 1, genres))[bucket]
        + rng.standard_normal((len(OCCUPATIONS), genres))[occupation]
    ) / math.sqrt(3)
    own = rng.standard_normal((count, _TASTE_RANK)) @ rng.standard_normal((_TASTE_RANK, genres))
    taste = config.demographic * shared + config.personal * own / math.sqrt(_TASTE_RANK)
    bias = config.bias * rng.standard_normal(count)
    # Stratified: the quantiles of the log-normal in random order, so that the total hardly varies.
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((rank + 0.5) / count) for rank in range(count)])
    wanted = np.rint(_MEDIAN_RATINGS * np.exp(_SIGMA_RATINGS * quantiles)).astype(np.int64)
    ratings = rng.permutation(np.clip(wanted, _FEWEST_RATINGS, config.items // 2))
    return _Users(age, male, occupation, codes, bias, taste, ratings)


def _draw_ratings(rng: np.random.Generator, config: SyntheticConfig, items: _Items, users: _Users) -> Ints:
    """Draw the ratings, (N, 4): user, item, rating, timestamp, in a random order as in the original."""
    genres = items.genres
    parts: list[Ints] = []
    for user in range(config.users):
        liking = items.quality + genres @ users.taste[user]
        # Adding Gumbel noise and taking the top is a weighted draw without replacement.
        urge = items.popularity + 0.5 * liking + rng.gumbel(size=config.items)
        chosen = rng.permutation(np.argsort(-urge)[: users.ratings[user]])
        noise = config.noise * rng.standard_normal(len(chosen))
        score = config.mean + users.bias[user] + liking[chosen] + noise
        stars = np.clip(np.rint(score), 1, 5).astype(np.int64)
        start = _START + rng.integers(_SPAN)
        # Users send a page of ratings at once: most gaps are zero, some are long.
        gaps = rng.exponential(40.0, len(chosen)) * (rng.random(len(chosen)) < 0.3)
        times = start + np.cumsum(gaps).astype(np.int64)
        parts.append(np.column_stack([np.full(len(chosen), user + 1), chosen + 1, stars, times]))
    return rng.permutation(np.concatenate(parts))
