from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from gmeta.core.errors import ConfigError
from gmeta.core.settings import from_mapping, load_toml, override, to_mapping


@dataclass(frozen=True)
class Part:
    size: int = 1
    rate: float = 0.5
    names: tuple[str, ...] = ("a",)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ConfigError(f"size can't be negative, got {self.size}")


@dataclass(frozen=True)
class Whole:
    part: Part = field(default_factory=Part)
    parts: dict[str, Part] = field(default_factory=dict)


def test_what_is_left_out_keeps_its_default():
    assert from_mapping(Whole, {"part": {"size": 3}}) == Whole(Part(size=3))


def test_round_trip():
    whole = Whole(Part(2, 3.0, ("x", "y")), {"k": Part(4)})
    assert from_mapping(Whole, to_mapping(whole)) == whole


def test_an_integer_serves_as_a_float():
    rate = from_mapping(Part, {"rate": 2}).rate
    assert (rate, type(rate)) == (2.0, float)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"part": {"sise": 3}}, r"unknown keys: sise @ config\.part"),
        ({"part": {"size": "3"}}, r"expected int, got '3' @ config\.part\.size"),
        ({"part": {"size": 2.5}}, r"expected int, got 2\.5 @ config\.part\.size"),
        ({"part": {"size": True}}, r"expected int, got True @ config\.part\.size"),
        ({"part": {"names": ["a", 7]}}, r"expected str, got 7 @ config\.part\.names\[1\]"),
        ({"part": {"names": "ab"}}, r"expected a list, got 'ab' @ config\.part\.names"),
        ({"part": {"names": {"a": 1}}}, r"expected a list, got \{'a': 1\} @ config\.part\.names"),
        ({"parts": {"k": {"size": -1}}}, r"size can't be negative, got -1 @ config\.parts\['k'\]"),
        ({"part": {"size": "3"}, "more": 1}, r"unknown keys: more.*|expected int"),
    ],
)
def test_every_fault_names_its_place(value, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(Whole, value)


def test_toml(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[part]\nnames = ["b"]\n')
    assert load_toml(Whole, file) == Whole(Part(names=("b",)))
    for deep in ("x = " + "[" * 3000 + "]" * 3000, ".".join(3000 * "x") + " = 1"):
        file.write_text(deep)
        with pytest.raises(ConfigError, match=r"run\.toml: not TOML: its values are nested too deeply"):
            load_toml(Whole, file)
    file.write_text("[part\n")
    with pytest.raises(ConfigError, match=r"run\.toml: not TOML"):
        load_toml(Whole, file)
    with pytest.raises(ConfigError, match=r"gone\.toml: can't be read: No such file"):
        load_toml(Whole, tmp_path / "gone.toml")


def test_a_choice_is_made_by_what_stands_there():
    @dataclass(frozen=True)
    class Options:
        names: tuple[str, ...] | str | None = None
        part: Literal["whole", "half"] | Part | Whole = "whole"

    globals()["Options"] = Options  # where its annotations are looked up
    for value in (Options("all"), Options(("a", "b")), Options(None, "half"), Options(None, Part(3))):
        assert from_mapping(Options, to_mapping(value)) == value
    assert from_mapping(Options, {"part": {"parts": {"k": {"size": 2}}}}).part == Whole(parts={"k": Part(2)})
    for wrong in ({"part": {"sizes": 3}}, {"part": "third"}, {"names": 3}, {"part": [1]}):
        with pytest.raises(ConfigError, match="config"):
            from_mapping(Options, wrong)


def test_assignments_replace_single_values_and_the_later_one_counts():
    given = {"seeds": [0, 1], "methods": {"maml": {"epochs": 3, "label": "MAML"}}}
    found = override(given, ["methods.maml.epochs=5", 'rows = "random"', "seeds=[7]", "seeds=[8]"])
    assert found == {"seeds": [8], "rows": "random", "methods": {"maml": {"epochs": 5, "label": "MAML"}}}
    assert given["methods"]["maml"]["epochs"] == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seeds", "'seeds' isn't KEY=VALUE in TOML"),
        ("rows=random", "a text has quotes"),
        ("", "sets nothing"),
    ],
)
def test_an_assignment_that_isnt_one_is_named(line, message):
    with pytest.raises(ConfigError, match=message):
        override({}, [line])
