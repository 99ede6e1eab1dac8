"""The dense weights of a checkpoint, and the optimizer's state, in TensorFlow's format.

TensorFlow finds a variable by its place among the objects of a model, and refuses a whole checkpoint if one
variable has another shape. `read_fitting` loads what fits. Places change when layers are added, so a weight
of a layer that the user named is found by its name, and a slot of the optimizer follows its weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint.restore import CheckpointPosition
from tf_keras.src.utils.generic_utils import to_snake_case

from gmeta.core.errors import DataError, GmetaError, first_line, warn_caller
from gmeta.ops.table.records import tables_saved_elsewhere

FOLDER = "dense"  # also the prefix of TensorFlow's files in it


def write_dense(model: tf.keras.Model, folder: Path) -> None:
    """Write a model's dense weights and its optimizer's state into a folder, within `whole_slots`.

    Raises:
      GmetaError: They can't be written.
    """
    try:
        with tables_saved_elsewhere():
            tf.train.Checkpoint(**_parts(model)).write(str(folder / FOLDER))
    except tf.errors.OpError as error:
        raise GmetaError(
            f"{folder}: the dense weights can't be written: {first_line(error)}; "
            "make room or mend the folder: the checkpoints before it are whole"
        ) from error


def whole_slots(model: tf.keras.Model, *, gather: bool) -> AbstractContextManager[None]:
    """Return a context in which optimizer slots that ranks have divided can be saved or loaded.

    Args:
      model: The model.
      gather: Whether rank 0 gets all slots, to save them; all ranks must then enter the context together.
    """
    joint = getattr(model, "_joint_optimizer", None)
    return nullcontext() if joint is None else joint.whole_slots(gather)


def read_dense(model: tf.keras.Model, checkpoint: Path) -> None:
    """Load what `write_dense` wrote into the folder of a checkpoint.

    Weights that the model hasn't created yet are loaded when it creates them.

    Raises:
      DataError: Weights are missing, or have other shapes.
    """
    try:
        with tables_saved_elsewhere(), whole_slots(model, gather=False):
            status = tf.train.Checkpoint(**_parts(model)).read(_prefix(checkpoint))
            status.assert_existing_objects_matched()
    except GmetaError:
        raise
    except (tf.errors.OpError, AssertionError, ValueError) as error:
        raise DataError(
            f"its dense weights don't fit this model: {first_line(error)}",
            path=checkpoint,
            advice="build the model as it was when it was saved, or load what fits with partial=True",
        ) from error


@dataclass(frozen=True)
class DenseReport:
    """What `read_fitting` didn't load.

    Attributes:
      new: Weights that stay new, each with the reason.
      left: Saved weights that no weight of the model uses.
      slots: How many of the optimizer's slots are reinitialized.
      later: Whether the model has yet to create weights, which are compared when it does.
    """

    new: tuple[str, ...]
    left: tuple[str, ...]
    slots: int
    later: bool


def read_fitting(model: tf.keras.Model, checkpoint: Path) -> DenseReport:
    """Load the dense weights that fit a model, with their optimizer slots.

    Raises:
      DataError: The files can't be read.
    """
    root, parts = tf.train.Checkpoint(), _parts(model)
    if model.built and hasattr(parts.get("optimizer"), "build"):
        parts["optimizer"].build(model.trainable_variables)  # creates slots, so that they can be compared now
    try:
        with tables_saved_elsewhere(), whole_slots(model, gather=False):
            root.read(_prefix(checkpoint)).expect_partial()  # the report names the rest
            # The root has none of the saved parts, so their places wait here for objects.
            waiting = {name: places[-1] for name, places in root._deferred_dependencies.items()}
            saved = _SavedWeights(checkpoint, waiting["model"], waiting.get("optimizer"))
            fit = _Fit(model, saved)
            # The model also holds its optimizer, but slots are loaded after their weights.
            saved.hide_optimizer(root)
            FittingPosition(saved.coordinator, saved.model, fit.take).restore(model)
            optimizer = saved.show_optimizer()
            if optimizer is not None and "optimizer" in parts:
                fit.load_slots(parts["optimizer"], saved.below([optimizer]))
                FittingPosition(saved.coordinator, optimizer, fit.take_slot).restore(parts["optimizer"])
    except GmetaError:
        raise
    except (tf.errors.OpError, KeyError, ValueError) as error:
        raise DataError(f"its dense weights can't be read: {first_line(error)}", path=checkpoint) from error
    return fit.report()


class _SavedWeights:
    """The numbered objects in TensorFlow's files; those with a value are weights.

    Args:
      checkpoint: The folder of the checkpoint.
      model: The place of the model.
      optimizer: The place of its optimizer, if it was saved.

    Attributes:
      coordinator: TensorFlow's coordinator of this restore.
      model: The number of the model.
      weights: The numbers of the model's weights, without its optimizer's state.
    """

    def __init__(
        self, checkpoint: Path, model: CheckpointPosition, optimizer: CheckpointPosition | None
    ) -> None:
        self.checkpoint, self.coordinator, self.model = checkpoint, model.checkpoint, model.proto_id
        self._optimizer = None if optimizer is None else optimizer.proto_id
        self.nodes = self.coordinator.object_graph_proto.nodes
        own = self.below([self.model], apart_from=[] if self._optimizer is None else [self._optimizer])
        self.weights = sorted(filter(self.is_value, own))

    def hide_optimizer(self, nobody: Any) -> None:
        """Make a restore of the model skip the optimizer."""
        if self._optimizer is not None:
            self.coordinator.object_by_proto_id[self._optimizer] = nobody

    def show_optimizer(self) -> int | None:
        """Undo `hide_optimizer`, and return the number of the optimizer."""
        self.coordinator.object_by_proto_id.pop(self._optimizer, None)
        return self._optimizer

    def name(self, number: int) -> str:
        """Return the name of a weight."""
        return str(self.nodes[number].attributes[0].full_name)

    def value(self, number: int) -> Any:
        """Read the value of a weight."""
        return tf.train.load_variable(
            _prefix(self.checkpoint), self.nodes[number].attributes[0].checkpoint_key
        )

    def is_value(self, number: int) -> bool:
        """Return whether an object is a weight."""
        return [each.name for each in self.nodes[number].attributes] == ["VARIABLE_VALUE"]

    def below(self, roots: Sequence[int], apart_from: Sequence[int] = ()) -> Iterator[int]:
        """Iterate over objects and all their children, visiting each once."""
        seen, queue = set(apart_from), list(roots)
        while queue:
            number = queue.pop()
            if number not in seen:
                seen.add(number)
                yield number
                queue += [child.node_id for child in self.nodes[number].children]

    def waiting(self) -> set[int]:
        """Return the weights that wait until the model creates them."""
        held = list(self.coordinator.object_by_proto_id.items())
        places = [
            place.proto_id
            for number, each in held
            for deferred in (each._deferred_dependencies.values() if number else ())  # the root holds nothing
            for place in deferred
            if place.checkpoint is self.coordinator
        ]
        return set(filter(self.is_value, self.below(places))) - set(self.coordinator.matched_proto_ids)


class _Fit:
    """Decides which saved values fit a model's variables."""

    def __init__(self, model: tf.keras.Model, saved: _SavedWeights) -> None:
        self._model, self._saved = model, saved
        self._names: dict[str, str] = {}  # name of a loaded weight -> its name when it was saved
        self._reasons: dict[int, str] = {}  # a weight that isn't loaded -> the reason
        self._loaded: set[int] = set()  # weights
        self._taken: set[int] = set()  # saved weights in use
        self._slots, self._reported = 0, False
        self._load_by_names()
        self._by_name = frozenset(self._taken)

    def take(self, weight: tf.Variable, place: FittingPosition) -> bool:
        """Return whether a weight loads the value at its place."""
        if id(weight) in self._loaded:
            return False  # it is found by its name
        number, shape = place.proto_id, place.value_shape()
        if number in self._by_name:
            self._refuse(weight, f"its place was that of {self._saved.name(number)}")
        elif shape != weight.shape:
            why = f"its shape is {tuple(weight.shape)}, and was {tuple(shape)}"
            if getattr(weight, "grows", False) and shape[1:] == weight.shape[1:]:
                value = self._saved.value(number)
                weight.assign(tf.concat([value[: weight.shape[0]], weight[len(value) :]], axis=0))
                why += "; the rows that it had are loaded"
            self._taken.add(number)
            self._refuse(weight, why)
        else:
            self._note(weight, number)
            return True
        return False

    def load_slots(self, optimizer: Any, places: Iterable[int]) -> None:
        """Load the slots of the loaded weights, wherever the optimizer stored them.

        Args:
          optimizer: The optimizer.
          places: The objects of the saved optimizer.
        """
        there = {self._saved.name(number): number for number in places if self._saved.is_value(number)}
        variables = optimizer.variables
        for slot in variables() if callable(variables) else variables:
            name = self._saved_slot(_name_of(slot))
            if name is not None:
                fits = name in there and self._saved.value(there[name]).shape == slot.shape
                if fits:
                    slot.assign(self._saved.value(there[name]))
                self._slots += not fits
                self._loaded.add(id(slot))

    def take_slot(self, variable: tf.Variable, place: FittingPosition) -> bool:
        """Return whether a variable of the optimizer loads the value at its place."""
        if id(variable) in self._loaded:
            return False  # it is found by its name, or stays new
        name = self._saved_slot(_name_of(variable))
        fits = bool(place.value_shape() == variable.shape) and name in (
            None,
            self._saved.name(place.proto_id),
        )
        self._slots += not fits
        return fits

    def report(self) -> DenseReport:
        """Return what wasn't loaded."""
        self._reported = True
        weights, later = self._model.weights if self._model.built else [], self._saved.waiting()
        return DenseReport(
            tuple(
                f"{_name_of(each)} ({self._reasons.get(id(each), 'it was not saved')})"
                for each in weights
                if id(each) not in self._loaded
            ),
            tuple(self._saved.name(n) for n in self._saved.weights if n not in self._taken | later),
            self._slots,
            bool(later),
        )

    def _note(self, weight: tf.Variable, number: int) -> None:
        self._names[_name_of(weight)] = self._saved.name(number)
        self._loaded.add(id(weight))
        self._taken.add(number)

    def _refuse(self, weight: tf.Variable, why: str) -> None:
        self._reasons[id(weight)] = why
        if self._reported:
            warn_caller(f"{self._saved.checkpoint}: the weight {_name_of(weight)} stays new: {why}")

    def _saved_slot(self, name: str) -> str | None:
        """Return the name under which a weight's slot was saved; "" for a new weight, None for no slot."""
        weights = (own for own in map(_name_of, self._model.trainable_weights) if name.endswith(f"/{own}"))
        mine = max(weights, key=len, default=None)
        if mine is None:  # such as the number of steps
            return None
        return name.removesuffix(mine) + self._names[mine] if mine in self._names else ""

    def _load_by_names(self) -> None:
        """Load the weights of layers that the user named."""
        there: dict[str, list[int]] = {}
        for number in self._saved.weights:
            there.setdefault(_within_layer(self._saved.name(number)), []).append(number)
        for layer in self._model._flatten_layers(include_self=False):
            automatic = re.fullmatch(rf"{to_snake_case(type(layer).__name__)}(_\d+)?", layer.name)
            for weight in () if automatic else (*layer._trainable_weights, *layer._non_trainable_weights):
                name = _within_layer(_name_of(weight))
                if name.startswith(f"{layer.name}/") and len(there.get(name, ())) == 1:
                    value = self._saved.value(there[name][0])
                    if value.shape == weight.shape:
                        weight.assign(value)
                        self._note(weight, there[name][0])


class FittingPosition(CheckpointPosition):
    """A place in a checkpoint that restores a variable only if it fits.

    Args:
      checkpoint: As of `CheckpointPosition`.
      proto_id: As of `CheckpointPosition`.
      fits: Returns whether a variable loads the value at its place.
    """

    __slots__ = ("_fits",)

    def __init__(
        self, checkpoint: Any, proto_id: int, fits: Callable[[tf.Variable, FittingPosition], bool]
    ) -> None:
        super().__init__(checkpoint, proto_id)
        self._fits = fits

    def create_child_position(self, node_id: int) -> FittingPosition:
        """Return the place of a child."""
        return FittingPosition(self.checkpoint, node_id, self._fits)

    def is_simple_variable(self) -> bool:
        """Return False: a variable is created with its own initial value, and compared then."""
        return False

    def create_slot_variable_position(
        self, optimizer_object: Any, variable: Any, slot_variable_id: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the place of a legacy optimizer's slot, if it fits the weight."""
        if FittingPosition(self.checkpoint, slot_variable_id, self._fits).value_shape() != variable.shape:
            return None, None
        return super().create_slot_variable_position(
            optimizer_object, variable, slot_variable_id, *args, **kwargs
        )

    def _single_restore(self) -> Any:
        held = self.trackable
        if isinstance(held, tf.Variable) and self.value_shape() is not None and not self._fits(held, self):
            held._maybe_initialize_trackable()
            held._update_uid = self.checkpoint.restore_uid
            return (), {}, (), {}
        return super()._single_restore()


def _parts(model: tf.keras.Model) -> dict[str, Any]:
    optimizer = getattr(model, "optimizer", None)
    return {"model": model, **({} if optimizer is None else {"optimizer": optimizer})}


def _prefix(checkpoint: Path) -> str:
    return str(checkpoint / FOLDER / FOLDER)


def _name_of(variable: tf.Variable) -> str:
    return str(variable.name).partition(":")[0]


def _within_layer(name: str) -> str:
    """Return the layer's name and the last part of a weight's name, without the model's name."""
    return "/".join(name.split("/")[-2:])
