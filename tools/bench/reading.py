"""Reading groups of a prepared data set, compared with TensorFlow's own readers.

    python tools/bench/reading.py --json FILE

Rows have 13 int64 and 8 float32 columns and a group 32 of them; an element is 32 groups. Files are in the
page cache, as from the second epoch on if memory allows.

columnar        `gmeta.io.groups` over the columnar layout, in order and shuffled, by number of threads
columnar_zstd   the same with compressed records
example         the same over ``tf.train.Example`` records
rows            `gmeta.io.rows`: the same groups' rows, shuffled, in batches of 1,024
tensorflow      over the same Examples: ``parse_single_example`` and ``batch``; ``group_by_window``; batched
                ``parse_example``; and ``TFRecordDataset`` alone, which parses nothing
text            rows as lines of comma-joined numbers in TFRecords: ``decode_csv`` of batches, ungrouped; and
                of lines, then ``group_by_window``. It is what G-Meta's records replace (section 2.2.2)
disk            reading the bytes of the columnar files without parsing
training        a small MAML model from `gmeta.io.tasks`, compared with the same from memory, and the share of
                the time that it waited for data
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # before TensorFlow is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tempfile
from collections.abc import Callable
from pathlib import Path

import gmeta
from gmeta import io, layers, meta, models
from gmeta.io.readers.read_options import ReadingTime, from_memory

import tensorflow as tf
from harness import Result, interleave, parser, report
from parts.io_data import FLOATS, INTS, SCHEMA, write, write_text

ROWS = 32  # of a group
BATCH = 1024  # rows of the peers' batches, as many as an element has


def shards(path: Path) -> list[str]:
    """The files of a split."""
    return sorted(str(file) for file in path.parent.glob("*.tfrecord"))


def size(path: Path) -> int:
    """The bytes of the files."""
    return sum(Path(file).stat().st_size for file in shards(path))


def drain(dataset: tf.data.Dataset) -> None:
    """Take every element out, in TensorFlow."""
    dataset.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1).numpy()


def features() -> dict[str, tf.io.FixedLenFeature]:
    """The schema in the form of TensorFlow's parsers."""
    return {column.name: tf.io.FixedLenFeature([], column.dtype) for column in SCHEMA}


def text_ways(file: Path, count: int) -> dict[str, tuple[tf.data.Dataset, int]]:
    """Name -> a way to decode lines, and the number of lines."""
    defaults = [tf.zeros([], column.dtype) for column in SCHEMA]
    lines = tf.data.TFRecordDataset(str(file))
    decoded = lines.map(lambda line: tf.io.decode_csv(line, defaults))
    window = decoded.group_by_window(
        lambda task, *_: task, lambda _, rows: rows.batch(ROWS), window_size=ROWS
    )
    batched = lines.batch(BATCH).map(lambda some: tf.io.decode_csv(some, defaults))
    return {"group_by_window": (window, count), "decode_csv": (batched, count)}


def tensorflow_ways(example: Path, slow_rows: int) -> dict[str, tuple[tf.data.Dataset, int]]:
    """Name -> a peer, and its number of rows: the slow ones get fewer."""
    records = tf.data.TFRecordDataset(shards(example))
    few = records.take(slow_rows)
    single = few.map(lambda record: tf.io.parse_single_example(record, features()))
    window = single.group_by_window(
        lambda row: row["task"], lambda _, rows: rows.batch(ROWS), window_size=ROWS
    )
    batched = records.batch(BATCH).map(lambda record: tf.io.parse_example(record, features()))
    return {
        "parse_single_example": (single.batch(BATCH), slow_rows),
        "group_by_window": (window, slow_rows),
        "parse_example": (batched, 0),
        "tfrecord": (records, 0),
    }


def read_bytes(files: list[str]) -> None:
    """Read bytes as fast as the file system supplies them."""
    buffer = bytearray(1 << 20)
    for file in files:
        with open(file, "rb", buffering=0) as source:  # noqa: PTH123
            while source.readinto(buffer):
                pass


def reading(folder: Path, groups: int, slow_rows: int, rounds: int) -> list[Result]:
    """Rows and bytes a second of every way."""
    columnar = write(folder / "columnar", "columnar", groups, ROWS)
    # Six times the bytes: fewer suffice.
    example = write(folder / "example", "example", groups // 4, ROWS)
    packed = write(folder / "packed", "columnar", groups // 2, ROWS, codec="zstd")
    rows = {columnar: groups * ROWS, example: groups // 4 * ROWS, packed: groups // 2 * ROWS}
    ways: dict[str, tuple[Callable[[int], object], Path, int]] = {}
    for name, path in (("columnar", columnar), ("example", example)):
        for shuffle in (False, True):
            for threads in (1, 2):
                dataset = io.groups(
                    path, groups_per_element=32, options=io.ReadOptions(shuffle=shuffle, threads=threads)
                )
                key = f"io/{name}/groups32/{'shuffled' if shuffle else 'in_order'}/threads{threads}"
                ways[key] = (lambda _, dataset=dataset: drain(dataset)), path, rows[path]
    for threads in (1, 2):
        samples = io.rows(columnar, batch_size=BATCH, label="f0", options=io.ReadOptions(threads=threads))
        key = f"io/columnar/rows{BATCH}/shuffled/threads{threads}"
        ways[key] = (lambda _, samples=samples: drain(samples)), columnar, rows[columnar]
    for threads in (1, 2):
        dataset = io.groups(
            packed, groups_per_element=32, options=io.ReadOptions(shuffle=False, threads=threads)
        )
        key = f"io/columnar_zstd/groups32/in_order/threads{threads}"
        ways[key] = (lambda _, dataset=dataset: drain(dataset)), packed, rows[packed]
    for name, (dataset, count) in tensorflow_ways(example, slow_rows).items():
        key = f"io/tensorflow/{name}"
        ways[key] = (lambda _, dataset=dataset: drain(dataset)), example, count or rows[example]
    lines = folder / "lines.tfrecord"
    rows[lines] = slow_rows
    text_bytes = write_text(lines, slow_rows // ROWS, ROWS)
    for name, (dataset, count) in text_ways(lines, slow_rows).items():
        ways[f"io/text/{name}"] = (lambda _, dataset=dataset: drain(dataset)), lines, count
    ways["io/disk"] = (lambda _: read_bytes(shards(columnar))), columnar, rows[columnar]
    seconds = interleave({key: run for key, (run, _, _) in ways.items()}, rounds=rounds, warm_up=1)

    def rate(key: str) -> float:
        return ways[key][2] / seconds[key]

    results = []
    for key, (_, path, count) in ways.items():
        peer = ("batched parse_example", rate("io/tensorflow/parse_example"))
        results.append(Result(key, rate(key), "rows/s", *(() if key.endswith("parse_example") else peer)))
        share = count / rows[path]
        of_all = text_bytes if path == lines else size(path)
        results.append(Result(f"{key}/bytes", of_all * share / seconds[key] / 1e6, "MB/s"))
    layouts = {"columnar": columnar, "columnar_zstd": packed, "example": example}
    sizes = {name: size(path) / rows[path] for name, path in layouts.items()}
    sizes["text"] = text_bytes / slow_rows
    return results + [Result(f"io/{name}/bytes_a_row", each, "bytes") for name, each in sizes.items()]


def training(folder: Path, groups: int, rounds: int) -> list[Result]:
    """Tasks a second of a small model, with data that are read and data in memory."""
    path = write(folder / "training", "columnar", groups, ROWS)
    names = [f"i{k}" for k in range(INTS) if k % 4 < 3]
    model = models.MetaModel(
        layers.EmbeddingCollection([layers.FeatureConfig(name, dim=8) for name in names]),
        layers.MLP({"fc": 32, "out": 1}),
        inner=meta.InnerLoop(steps=1, learning_rate=0.01),
    )
    model.compile("adam")
    warm = io.tasks(path, tasks_per_batch=32, query=8, label="f0", features=names)
    time, memory = ReadingTime(), from_memory(warm)
    read = time.of(warm)
    model.fit(memory.take(2), verbose=0)
    seconds = interleave(
        {
            "read": lambda _: model.fit(read, verbose=0),
            "memory": lambda _: model.fit(memory, verbose=0),
        },
        rounds=rounds,
        warm_up=1,
    )
    return [
        Result(
            "io/training/maml", groups / seconds["read"], "tasks/s", "from memory", groups / seconds["memory"]
        ),
        Result("io/training/waiting", time.read().share, "of the time"),
    ]


def main() -> None:
    """Measure both."""
    options = parser(__doc__)
    options.add_argument(
        "--groups", type=int, default=40_000, help="groups of 32 rows (default: %(default)s)"
    )
    given = options.parse_args()
    groups, slow_rows = (64, 256) if given.smoke else (given.groups, 20_480)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = reading(folder, groups, slow_rows, given.rounds)
        results += training(folder, 64 if given.smoke else 10_000, given.rounds)
    columns = f"{INTS} int64, {FLOATS} float32"
    report(
        "Reading groups",
        results,
        given.json,
        columns=columns,
        groups=groups,
        tensorflow=tf.__version__,
        gmeta=gmeta.__version__,
    )


if __name__ == "__main__":
    main()
