"""What batches say of items: which columns are attributes, and whose."""

from dataclasses import replace

import numpy as np
import tensorflow as tf

from gmeta.experiment.baselines.task_rows import ItemNumbers
from gmeta.experiment.measurement.methods import AttributeReader
from gmeta.testing import small_config


def batch(items, genres, **columns):
    columns = {name: tf.constant(values, tf.int64) for name, values in columns.items()}
    lists = tf.ragged.constant(genres, tf.int64, ragged_rank=1)
    return {"features": {"item": tf.constant(items, tf.int64), "genre": lists, **columns}}


def read(batches, columns):
    reader = AttributeReader("item", columns)
    assert len(list(reader.watch(batches))) == len(batches)
    return reader


def test_attributes_are_read_once_an_item_from_lists_and_single_values():
    first = batch([9, 5, 9], [[4, 2], [], [4, 2]], year=[1990, 1991, 1990])
    second = batch([7, 9], [[2], [2, 4]], year=[1990, 1990])  # a list in another order is the same
    empty = batch([], [], year=[])
    found = read([first, empty, second], ["genre", "year"]).attributes(
        ItemNumbers(np.array([5, 9]), np.array([7]))
    )
    assert found.items == 3
    genres = [[0, 0], [0.5**0.5, 0.5**0.5], [1, 0]]
    np.testing.assert_allclose(found.columns["genre"].toarray(), genres)
    np.testing.assert_array_equal(found.columns["year"].toarray(), [[0, 1], [1, 0], [1, 0]])


def test_what_changes_from_place_to_place_is_no_attribute():
    batches = [batch([1, 2], [[3], [4]], city=[hour, hour + 1]) for hour in range(5)]
    numbers = ItemNumbers(np.array([1, 2]))
    assert list(read(batches, ["genre", "city"]).attributes(numbers).columns) == ["genre"]
    assert read(batches, ["city"]).attributes(numbers) is None


def test_without_items_or_columns_there_are_no_attributes():
    for reader in (AttributeReader(None, ["genre"]), AttributeReader("item", [])):
        list(reader.watch([batch([1], [[3]])]))
        assert reader.attributes(ItemNumbers(np.array([1]))) is None


def test_the_item_and_columns_of_the_task_are_no_attributes():
    config = small_config()
    wanted = batch([1], [[3]], year=[1990])
    reader = AttributeReader.of(config)
    list(reader.watch([wanted]))
    assert list(reader.attributes(ItemNumbers(np.array([1]))).columns) == ["year", "genre"]
    assert AttributeReader.of(replace(config, item=None)).attributes(ItemNumbers(np.array([1]))) is None
