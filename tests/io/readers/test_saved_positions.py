"""What earlier versions saved of a position, in checkpoints and as JSON, still sets it."""

import base64
import zlib

import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.io import ReadingPosition
from gmeta.io.readers.epoch import EpochPlan
from gmeta.io.service.pieces import ServedPosition

# The files of tf.train.Checkpoint(reading=ReadingPosition(), served=ServedPosition(2)), compressed.
INDEX = """
eNpjYGDjYJRi4mBkkOGPd/ZwdfYO8Pf0C3F08nGN93fycnUOiXcPcgzw4GAXYlD4wKhxgN30/OajngxagkWpiSmZeen6yaVFxflF
xfp6jiEhQZ5OoSGuwfphjkGeYCPCHH1CXTk4hViEmDiYFAw0BEz9s6UdORS4UwvykzPw62HQ4DDdMNOTj0NeNCc1rQS/Yg6QBWBL
BDQUTIPMVmZxyPMWl6QWELBDgQNoy+7r8wUZ1AWLU4vKUlP0U/NSgCQR3skAeqeQUbYIaBMRvlFwANr0ahOLHbs8b1FiXjYh5RVA
5ZrMM9jZFQRLErNT84hxUQTQRcIlrqEccmL5OSnEhRi7QgOjRoGp5zeGSRxyvKVFeYQc5gF0GGPpPUd2Rd7yzJKMTIIaAoAaKtS5
TRiAgBFE6L18wQHnHPi0cAMDI3MJwxcWuNg5l1y1nywcbaz8DARB+O+GbpVS99sAlGSodw==
"""
DATA = """
eNqdkk9Lw0AQxZvm33arHgZBCHi1pQfrzZuaYNRiQahprxKa1YaWpCRp/W5+KfHoSXeTSYOJEslcZl+Y9yPzduVWVjr2NvYO9kPs
R9gV7F9YKmqp5NdK863SXF5N/Wrr95JLvVxv+vvn+Qc9pl0igR4x1/ODF0pJG7SYRVvmDdpEome0Q2RQ2TqcLyghCihxwtb8pIKy
Ys8Jd2ugzzdRHEZx6njgDr1wEFCSTRRwcAe0Vz9Z+AEfoKAm7pKJY5fPBh7z+OweKJEbLPlpn7vCVfYLt2DSg5k5GZnW2H6ameOp
jXijj789TOXw1HScyciaOvbj8KchBdlwWQGl6xi9nCNUI4zIosAIVYe5B7uCyYM0BjkJP9TBbuDqr4x62W3+L6JruKjuJu7POEGM
EHWUO7AqFLx7o4+cTDbaK305u71S1Swf8eyKfIRqlI94s7t8hGiWMn/vRcpc1FC+AQPMCJM=
"""
READING = {"epoch": 3, "step": 7, "left": [[2, 9], [20, 23]], "cursors": [4, -1]}
SERVED = {"epoch": 5, "turn": 1, "within": 2, "taken": [6, 4], "ended": [0, 1]}


def test_a_checkpoint_of_an_earlier_version(tmp_path):
    for suffix, text in ((".index", INDEX), (".data-00000-of-00001", DATA)):
        (tmp_path / f"positions{suffix}").write_bytes(zlib.decompress(base64.b64decode(text)))
    reading, served = ReadingPosition(), ServedPosition(2)
    checkpoint = tf.train.Checkpoint(reading=reading, served=served)
    checkpoint.read(str(tmp_path / "positions")).assert_consumed()
    assert reading.state() == READING
    assert served.state() == SERVED
    assert int(served.rank) == 0
    assert served.told.numpy().tolist() == [[5, 1, 2, 6, 4, 0, 1], [5, 0, 0, 3, 3, 0, 0]]


def test_a_state_of_an_earlier_version():
    served = ServedPosition(2)
    served.restore(SERVED)
    assert served.state() == SERVED
    plan = {"digest": "d", "seed": 1, "epoch": 3, "left": [[4, 5], [9, 10]]}
    assert EpochPlan.from_json(plan) == EpochPlan("d", 1, 3, ((4, 5), (9, 10)))


@pytest.mark.parametrize("state", [READING, {**READING, "left": [], "cursors": []}])
def test_a_state_is_restored(state):
    position = ReadingPosition()
    position.restore(state)
    assert position.state() == state


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"epoch": -1}, "epoch of the state is -1"),
        ({"step": [1]}, r"step of the state is \[1\]"),
        ({"left": [1, 2]}, r"left of the state is \[1, 2\]"),
        ({"cursors": "x"}, r"isn't what state\(\) returned"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(change, says):
    position = ReadingPosition(5)
    with pytest.raises(ConfigError, match=says):
        position.restore({**READING, **change})
    assert position.state() == {"epoch": 5, "step": 0, "left": [], "cursors": []}
