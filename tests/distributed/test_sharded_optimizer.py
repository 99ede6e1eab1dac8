"""Ranks that divide the optimizer's state train, save and resume what ranks do that each have all of it."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.checkpoint.callback import ShardedCheckpoint
from gmeta.core import collectives
from gmeta.core.errors import ConfigError, GmetaError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig, record_lookups
from gmeta.models import JointOptimizer, Model
from gmeta.training.dense_updates import balance
from gmeta.training.pipeline import Pipeline
from gmeta.training.token_limit import keep_state
from support.process_ranks import run_ranks
from support.tables import sorted_records

pytestmark = pytest.mark.ranks

ALL = "GMETA_ALL_CASES" in os.environ
SIZES = (2, 3, 4) if ALL else (2,)
SHAPES = {"kernel": (50, 40), "bias": (40,), "next": (40, 30), "scale": (), "idle": (7, 3), "rows": (90, 8)}
SETTINGS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True, "global_clipnorm": 0.5},
    "AdamW": {"clipnorm": 0.3},
    "RMSprop": {"momentum": 0.5, "centered": True, "clipvalue": 0.2},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


class Lamb(tf.keras.optimizers.Optimizer):
    """A user's optimizer, whose step of a number depends on the norms of its variable."""

    def __init__(self, rate: float, name: str = "lamb") -> None:
        super().__init__(name=name)
        self._learning_rate = self._build_learning_rate(rate)

    def build(self, var_list: Any) -> None:
        super().build(var_list)
        if not getattr(self, "_built", False):
            self._means = [self.add_variable_from_reference(each, "mean") for each in var_list]
            self._built = True

    def update_step(self, gradient: Any, variable: Any) -> None:
        mean = self._means[self._index_dict[self._var_key(variable)]]
        mean.assign(0.9 * mean + 0.1 * gradient)
        trust = tf.norm(variable) / (tf.norm(mean) + 1e-6)
        variable.assign_sub(self.learning_rate * trust * mean)


# Of Nadam, `test_state_of_all_variables_is_refused`.
KERAS = {
    name: found
    for name, found in vars(tf.keras.optimizers).items()
    if inspect.isclass(found) and issubclass(found, tf.keras.optimizers.Optimizer)
}
OPTIMIZERS = sorted({*KERAS, "Lamb"} - {"Optimizer", "Nadam"})
# Each clips, or reads a whole variable, in another way.
QUICK = ("Adagrad", "Adam", "AdamW", "Lamb")


def optimizer_of(name: str) -> Any:
    made = (KERAS | {"Lamb": Lamb})[name](0.05, **SETTINGS.get(name, {}))
    if name == "AdamW":
        made.exclude_from_weight_decay(var_names=["bias"])
    return made


def held(optimizer: Any) -> int:
    """The bytes of an optimizer's state on this rank."""
    return sum(variable.numpy().nbytes for variable in optimizer.variables)


def variables_of(shapes: dict[str, tuple[int, ...]]) -> list[tf.Variable]:
    return [
        tf.Variable(tf.random.stateless_normal(shape, [number, 1]), name=name)
        for number, (name, shape) in enumerate(shapes.items())
    ]


def learn(optimizer: Any, shard: bool, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Any]:
    """Some steps, in which one variable has no gradient, and another those of some rows."""
    rank, variables = collectives.world().rank, variables_of(shapes)
    joint = JointOptimizer(optimizer, shard_optimizer=shard)
    for number in range(3):
        with record_lookups() as nothing:
            pass
        gradients: list[Any] = [
            tf.random.stateless_normal(variable.shape, [place + 10 * rank, number])
            for place, variable in enumerate(variables)
        ]
        if shapes is SHAPES:
            gradients[4] = None
            rows = tf.constant([1, 5, 1, 80], tf.int64)
            gradients[5] = tf.IndexedSlices(gradients[5][:4], rows, tf.constant([90, 8], tf.int64))
        joint.step(gradients, variables, nothing, samples=3 + rank)
    size = held(optimizer)
    with joint.whole_slots(gather=True):
        slots = [slot.numpy() for slot in optimizer.variables]
    assert held(optimizer) == size
    return {"weights": [each.numpy() for each in variables], "slots": slots, "bytes": size}


def message(error: type[Exception], call: Any) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


LONGER = {
    "accumulated": {"accumulate_steps": 3},
    "traced": {"run_eagerly": False},
    "ahead": {"run_eagerly": False, "pipeline": Pipeline(depth=1, micro_batches=2)},
}
FEATURES = [FeatureConfig(n, TableConfig(n, 4, initializer=Normal(0.0, 0.3))) for n in ("user", "item")]


def make(shard: bool = True, optimizer: Any = None, **options: Any) -> Model:
    """A model whose tables follow its optimizer, and clip their gradients with those of the dense weights."""
    x = {each.name: tf.keras.Input([], name=each.name, dtype=tf.int64) for each in FEATURES}
    hidden = tf.keras.layers.Concatenate()(list(EmbeddingCollection(FEATURES, name="tables")(x).values()))
    for units in (6, 1):
        start = tf.keras.initializers.GlorotUniform(seed=units)
        hidden = tf.keras.layers.Dense(units, kernel_initializer=start, dtype="float32")(hidden)
    model = Model(x, hidden)
    optimizer = optimizer or tf.keras.optimizers.Adam(0.02, global_clipnorm=0.1)
    options = {"run_eagerly": True, **options}  # so few steps take less time than to trace one
    model.compile(optimizer, "mse", shard_optimizer=shard, **options)
    return model


def samples(epoch: int, n: int = 48) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng([3, epoch])
    return {f.name: rng.integers(0, 20, n) for f in FEATURES}, rng.normal(size=(n, 1)).astype("f")


def batches(epoch: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(samples(epoch)).batch(12 // collectives.world().size)


def state(model: Model) -> dict[str, Any]:
    with model.joint_optimizer.whole_slots(gather=True):
        slots = [slot.numpy() for slot in model.optimizer.variables]
    tables = [sorted_records(table) for table in model.get_layer("tables").tables]
    return {
        "tables": tables,
        "dense": [weight.numpy() for weight in model.trainable_variables],
        "slots": slots,
    }


def trained(shard: bool, **options: Any) -> dict[str, Any]:
    model = make(shard, **options)
    model.fit(batches(0), epochs=2, verbose=0)
    model.fit(batches(1), epochs=1, verbose=0)  # each rank begins with the state of its own variables
    return state(model)


def skipped() -> dict[str, Any]:
    """Loss scaling leaves out a step whose sum over the ranks isn't finite, though each rank's terms are."""
    found = {}
    for shard in (False, True):
        inner = tf.keras.optimizers.SGD(1.0, momentum=0.9)
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=64.0)
        variables = variables_of({"one": (3,), "two": (2,)})
        joint = JointOptimizer(optimizer, shard_optimizer=shard)
        scales = []
        for value in (1.0, 2e38, 1.0):  # the sum of two overflows
            with record_lookups() as nothing:
                pass
            optimizer.get_scaled_loss(tf.constant(0.0))
            optimizer.get_unscaled_gradients([tf.constant(0.0)])
            gradients = [tf.ones([3]), tf.fill([2], value)]
            joint.step(gradients, variables, nothing, samples=1)
            scales.append(float(optimizer.loss_scale))
        weights = [variable.numpy() for variable in variables]
        found[shard] = (weights, scales, int(optimizer.iterations))
    return found


def run(folder: str) -> dict[str, Any]:
    """Runs on every rank."""
    found: dict[str, Any] = {}
    for name in QUICK:
        found[name] = [learn(optimizer_of(name), shard) for shard in (False, True)]
    found["few"] = [learn(optimizer_of("Adam"), shard, {"one": (5,)}) for shard in (False, True)]
    found["fit"] = [trained(shard) for shard in (False, True)]
    found["skipped"] = skipped()
    found["nadam"] = message(ConfigError, lambda: learn(tf.keras.optimizers.Nadam(), True))
    used = optimizer_of("Adam")
    learn(used, True)
    found["used"] = message(ConfigError, lambda: learn(used, False))
    found["broadcast"] = message(ConfigError, lambda: collectives.broadcast_variables(used.variables))
    model = make()
    checkpoints = ShardedCheckpoint(Path(folder) / "checkpoints")
    model.fit(batches(0), epochs=1, verbose=0, callbacks=[checkpoints])
    found["saved"] = state(model)
    model.fit(batches(1), initial_epoch=1, epochs=2, verbose=0)
    found["went on"] = state(model)
    with keep_state(model):
        model.train_on_batch(*samples(2))
    found["kept"] = state(model)
    model.load_weights(Path(folder) / "alone.weights.h5")
    model.fit(batches(1), initial_epoch=1, epochs=2, verbose=0)
    found["from file"] = state(model)
    return found


def run_longer() -> dict[str, Any]:
    """Runs on every rank."""
    found: dict[str, Any] = {}
    for name in LONGER:
        found[name] = [trained(shard, **LONGER[name]) for shard in (False, True)]
    for name in sorted({*OPTIMIZERS} - {*QUICK}):
        found[name] = [learn(optimizer_of(name), shard) for shard in (False, True)]
    return found


def resume(folder: str, shard: bool) -> dict[str, Any]:
    """Go on with what others saved, in a model that has trained before, and in a new one."""
    used = make(shard)
    used.fit(batches(7), epochs=1, verbose=0)
    found = {}
    for name, model in (("used", used), ("new", make(shard))):
        checkpoints = ShardedCheckpoint(Path(folder) / "checkpoints")
        assert checkpoints.restore(model) == 1
        model.fit(batches(1), initial_epoch=1, epochs=2, verbose=0)
        found[name] = state(model)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    folder = tmp_path_factory.mktemp("sharded")
    model = make(False)
    model.fit(batches(0), epochs=1, verbose=0)
    model.save_weights(folder / "alone.weights.h5")
    return str(folder)


@pytest.fixture(scope="module")
def ranks(folder: str) -> dict[int, list[dict[str, Any]]]:
    found = {}
    for size in SIZES:
        own = Path(folder) / str(size)
        own.mkdir()
        os.link(Path(folder) / "alone.weights.h5", own / "alone.weights.h5")
        found[size] = run_ranks(run, size, str(own), timeout=400)
    return found


@pytest.fixture(scope="module")
def longer_ranks() -> dict[int, list[dict[str, Any]]]:
    return {size: run_ranks(run_longer, size, timeout=400) for size in SIZES}


def assert_equal(found: Any, expected: Any) -> None:
    """Of one structure, and with the same bits."""
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


def assert_stepped_alike(ranks: list[dict[str, Any]], name: str) -> None:
    whole, divided = ranks[0][name]
    assert_equal(divided["slots"], whole["slots"])  # rank 0 has gathered them
    for rank in ranks:
        assert_equal(rank[name][0]["weights"], whole["weights"])
        assert_equal(rank[name][1]["weights"], whole["weights"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*QUICK, "few"])
def test_an_optimizer_makes_the_same_step_to_the_last_bit(ranks: Any, size: int, name: str) -> None:
    assert_stepped_alike(ranks[size], name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {*QUICK}))
@pytest.mark.shown_by("test_an_optimizer_makes_the_same_step_to_the_last_bit")
def test_so_does_every_other_optimizer_of_keras(longer_ranks: Any, size: int, name: str) -> None:
    assert_stepped_alike(longer_ranks[size], name)


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_has_the_slots_of_its_own_variables(ranks: Any, size: int) -> None:
    names = list(SHAPES)
    numbers = [int(np.prod(shape)) for shape in SHAPES.values()]
    owners = balance(numbers, [0] * size)
    for number, rank in enumerate(ranks[size]):
        for name, slots in (("Adagrad", 1), ("AdamW", 2)):
            own = [n for n, owner in zip(numbers, owners, strict=True) if owner == number]
            scalars = [n for n in own if n == 1]
            foreign = 0 if scalars else names.count("scale")  # there is nothing to release
            assert rank[name][1]["bytes"] - 8 in (
                4 * slots * (sum(own) + foreign),
                4 * slots * (sum(own) + foreign) + 4,  # with the rate
            )


def assert_trained_alike(ranks: list[dict[str, Any]], name: str) -> None:
    for number, rank in enumerate(ranks):
        whole, divided = rank[name]
        for part in ("tables", "dense", *([] if number else ["slots"])):
            assert_equal(divided[part], whole[part])


@pytest.mark.parametrize("size", SIZES)
def test_fit_trains_the_same_to_the_last_bit(ranks: Any, size: int) -> None:
    assert_trained_alike(ranks[size], "fit")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LONGER)
@pytest.mark.shown_by("test_fit_trains_the_same_to_the_last_bit")
def test_each_way_of_training_does_so(longer_ranks: Any, size: int, name: str) -> None:
    assert_trained_alike(longer_ranks[size], name)


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_leave_out_a_step_whose_sum_is_not_finite(ranks: Any, size: int) -> None:
    for rank in ranks[size]:
        assert_equal(rank["skipped"][True], rank["skipped"][False])
        assert rank["skipped"][True][1:] == ([64.0, 32.0, 32.0], 3)


@pytest.mark.parametrize("size", SIZES)
def test_state_of_all_variables_is_refused(ranks: Any, size: int) -> None:
    for rank in ranks[size]:
        assert "one variable each, and Nadam has _u_product for several" in rank["nadam"]
        assert "Adam has been divided among the ranks" in rank["used"]
        assert "ranks disagree on variable" in rank["broadcast"]


def assert_resumed(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Up to the rounding of sums over another number of ranks."""
    for part in ("dense", "slots"):
        for mine, other in zip(found[part], expected[part], strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_one_rank_resumes_what_divided_ranks_saved(ranks: Any, folder: str, size: int) -> None:
    for found in resume(str(Path(folder) / str(size)), False).values():
        assert_resumed(found, ranks[size][0]["went on"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.shown_by("test_one_rank_resumes_what_divided_ranks_saved")
def test_any_number_of_ranks_resumes_divided_or_not(ranks: Any, folder: str, size: int) -> None:
    expected = ranks[size][0]["went on"]
    for of, shard in [(size, True), (size, False), (3, True)] if ALL else [(size, True)]:
        again = run_ranks(resume, of, str(Path(folder) / str(size)), shard)
        for name in ("used", "new"):
            if of == size:
                assert_equal(again[0][name], expected)
            assert_resumed(again[0][name], expected)


@pytest.mark.parametrize("size", SIZES)
def test_a_trial_step_leaves_no_trace(ranks: Any, size: int) -> None:
    for rank in ranks[size]:
        assert_equal(rank["kept"], rank["went on"])


@pytest.mark.parametrize("size", SIZES)
def test_divided_ranks_load_what_one_rank_saved(ranks: Any, size: int) -> None:
    """A file of one rank, whose first epoch is that of the ranks up to rounding."""
    found, expected = ranks[size][0]["from file"], ranks[size][0]["went on"]
    for part in ("dense", "slots"):
        for mine, other in zip(found[part], expected[part], strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "shard", "words"),
    [
        (tf.keras.optimizers.legacy.Adam(), True, "got the legacy Adam"),
        (tf.keras.optimizers.Adam(use_ema=True), True, "leave one of the two out"),
        (tf.keras.optimizers.Adam(), 2, "takes True or False, got 2"),
    ],
)
def test_what_cannot_be_divided_is_refused_at_compile(optimizer: Any, shard: Any, words: str) -> None:
    with pytest.raises(GmetaError, match=words):
        make(shard, optimizer)


def test_on_one_rank_nothing_changes() -> None:
    assert_equal(trained(True), trained(False))
