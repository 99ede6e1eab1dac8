"""An inner loop that solves for the head: against NumPy, by any network and loss, and in Keras."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.meta import HeadPrior, InnerLoop
from gmeta.models import MetaModel
from support.drawn_batches import make_batch

SIZES = [5, 2, 7]


def make_model(network=None, loss="mse", inner=None, **options):
    collection = EmbeddingCollection([FeatureConfig("user", dim=4), FeatureConfig("item", dim=4)], seed=1)
    network = MLP({"fc": 6, "out": 1}, seed=3) if network is None else network
    model = MetaModel(collection, network, inner=inner or InnerLoop("ridge"), **options)
    model.compile(tf.keras.optimizers.Adam(0.01), loss)
    return model


def functional():
    inputs = tf.keras.Input([8])
    hidden = tf.keras.layers.Dense(6, "relu", name="fc")(inputs)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1, name="out")(hidden))


def parts_of(model, batch):
    """Features with a column for the bias, labels and masks of support and query, in float64."""
    lookup = model.collection.lookup(batch["features"], insert=False)
    samples = model.collection.concat(lookup).numpy().astype(np.float64)
    kernel, bias, *head = (weight.numpy().astype(np.float64) for weight in model.network.weights)
    hidden = np.maximum(samples @ kernel + bias, 0)
    features = np.concatenate([hidden, np.ones([len(hidden), 1])], 1)
    found = []
    for part in ("support", "query"):
        index, mask = batch[part]["index"].numpy(), batch[part]["mask"].numpy()
        found.append((features[index], batch["label"].numpy()[index].astype(np.float64), mask))
    return found, np.concatenate([head[0], head[1][None]], 0)[:, 0]


def prior_of(model):
    return model.inner_rates.prior().numpy().astype(np.float64), float(model.inner_rates.noise())


def test_squared_error_is_solved_in_one_step():
    model, batch = make_model(), make_batch(SIZES)
    (support, query), start = parts_of(model, batch)
    variances, noise = prior_of(model)
    found = model.predict_after(batch, (0, 1, 2))
    for task, (x, y, m) in enumerate(zip(*support, strict=True)):
        precision = np.diag(1 / variances) + x.T @ (2 * m[:, None] / noise * x)
        head = start + np.linalg.solve(precision, x.T @ (2 * m / noise * (y - x @ start)))
        real = query[2][task] > 0
        np.testing.assert_allclose(found[0][task][real], (query[0][task] @ start)[real], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[1][task][real], (query[0][task] @ head)[real], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[2], found[1], rtol=1e-4, atol=1e-5)


def test_variances_are_those_of_the_posterior():
    model, batch = make_model(), make_batch(SIZES)
    (support, query), _ = parts_of(model, batch)
    variances, noise = prior_of(model)
    found = model.predict_variance(batch)
    for task, (x, m) in enumerate(zip(support[0], support[2], strict=True)):
        covariance = np.linalg.inv(np.diag(1 / variances) + x.T @ (2 * m[:, None] / noise * x))
        want = np.einsum("if,fg,ig->i", query[0][task], covariance, query[0][task])
        real = query[2][task] > 0
        np.testing.assert_allclose(found[task][real], want[real], rtol=1e-3)
    prior = (query[0] ** 2 * variances).sum(-1)
    assert np.all(found.numpy() < prior)
    with pytest.raises(ConfigError, match="only ridge knows how uncertain"):
        make_model(inner=InnerLoop("anil")).predict_variance(batch)


def test_a_logistic_loss_is_solved_by_newtons_steps():
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model, batch = make_model(loss=loss), make_batch(SIZES)
    batch["label"] = tf.cast(batch["label"] > 0, tf.float32)
    (support, query), start = parts_of(model, batch)
    variances, noise = prior_of(model)
    found = model.predict_after(batch, (8,))[8]
    for task, (x, y, m) in enumerate(zip(*support, strict=True)):
        head = start
        for _ in range(50):
            p = 1 / (1 + np.exp(-x @ head))
            slope = x.T @ (m * (p - y)) / noise + (head - start) / variances
            precision = np.diag(1 / variances) + x.T @ ((m * p * (1 - p))[:, None] / noise * x)
            head = head - np.linalg.solve(precision, slope)
        real = query[2][task] > 0
        np.testing.assert_allclose(found[task][real], (query[0][task] @ head)[real], rtol=1e-3, atol=1e-4)


def test_a_keras_network_is_solved_alike():
    ours, theirs, batch = make_model(), make_model(functional()), make_batch(SIZES)
    for mine, other in zip(theirs.network.weights, ours.network.weights, strict=True):
        mine.assign(other)
    for steps, found in ours.predict_after(batch, (0, 1)).items():
        np.testing.assert_allclose(theirs.predict_after(batch, (steps,))[steps], found, rtol=1e-4, atol=1e-5)


def test_several_outputs_are_several_regressions():
    both, batch = make_model(MLP({"fc": 6, "out": 2}, seed=3)), make_batch(SIZES)
    labels = batch["label"]
    together = both.predict_after({**batch, "label": tf.stack([labels, -3 * labels], -1)}, (1,))[1]
    for output, label in enumerate((labels, -3 * labels)):
        one = make_model()
        for mine, other in zip(one.network.weights[:2], both.network.weights[:2], strict=True):
            mine.assign(other)
        one.network.weights[2].assign(both.network.weights[2][:, output : output + 1])
        one.network.weights[3].assign(both.network.weights[3][output : output + 1])
        # The loss is the mean of two outputs, so each has half the curvature.
        one.inner_rates._log_noise.assign(tf.math.log(2.0))
        alone = one.predict_after({**batch, "label": label}, (1,))[1]
        np.testing.assert_allclose(together[..., output], alone, rtol=1e-3, atol=1e-4)


def test_the_outer_loop_learns_prior_and_noise():
    model, batch = make_model(), make_batch([9] * 8)
    before = prior_of(model)
    losses = model.fit(tf.data.Dataset.from_tensors(batch).repeat(30), epochs=2, verbose=0).history["loss"]
    after = prior_of(model)
    assert losses[1] < losses[0]
    assert not np.allclose(before[0], after[0])
    assert before[1] != after[1]


def test_a_task_is_adapted_and_predicted_as_in_a_batch(tmp_path):
    model, batch = make_model(), make_batch([6])
    expected = model.predict_after(batch, (1,))[1][0]
    index = {part: batch[part]["index"].numpy()[0] for part in ("support", "query")}
    rows = {
        part: {name: ids.numpy()[where] for name, ids in batch["features"].items()}
        for part, where in index.items()
    }
    weights = model.adapt(rows["support"], batch["label"].numpy()[index["support"]])
    np.testing.assert_allclose(model.predict(rows["query"], weights=weights), expected, rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "model.keras")
    again = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict_after(batch, (1,))[1][0], expected)


def test_what_it_cannot_solve_is_refused():
    with pytest.raises(ConfigError, match="takes no gradient steps, so optimizer"):
        InnerLoop("ridge", optimizer="adam")
    with pytest.raises(ConfigError, match="a loss that is twice differentiable"):
        make_model(loss="mae").predict_after(make_batch(SIZES), (1,))
    network = tf.keras.Sequential([tf.keras.layers.Dense(3), tf.keras.layers.LayerNormalization()])
    with pytest.raises(ConfigError, match="ridge solves for a last layer with a kernel and a bias"):
        make_model(network)


def test_the_prior_starts_where_it_is_told_and_moves_at_its_pace():
    starts = {}
    for pace in (1.0, 0.1):
        model = make_model(inner=InnerLoop("ridge", prior=HeadPrior(variance=0.4, noise=2.0, pace=pace)))
        model.compile(tf.keras.optimizers.SGD(1.0), "mse", run_eagerly=True)
        rates = model.learner.inner_rates
        np.testing.assert_allclose(rates.prior(), np.full(7, 0.4), rtol=1e-6)
        assert float(rates.noise()) == pytest.approx(2.0, rel=1e-6)
        model.train_on_batch(make_batch(SIZES))
        starts[pace] = np.log(rates.prior() / 0.4)
    # The gradient by theta is p times as small, and a step of theta moves the logarithm p times as far.
    np.testing.assert_allclose(starts[0.1], 0.01 * starts[1.0], rtol=0.02, atol=1e-6)


def test_a_prior_of_another_algorithm_is_refused():
    with pytest.raises(ConfigError, match="of ridge alone"):
        InnerLoop("maml", prior=HeadPrior())
    with pytest.raises(ConfigError, match="head prior: pace must be above 0, got 0"):
        HeadPrior(pace=0)
    with pytest.raises(ConfigError, match="head prior: unadapted must be at least 0, got -1"):
        HeadPrior(unadapted=-1)


def likely(**options):
    return InnerLoop("ridge", prior=HeadPrior(likelihood=True, **options))


def test_the_outer_loss_is_the_likelihood_of_the_query_under_predicted_variances():
    model, batch = make_model(inner=likely(noise=0.6)), make_batch(SIZES)
    (support, query), start = parts_of(model, batch)
    variances, noise = prior_of(model)
    losses = []
    for x, y, m, qx, qy, qm in zip(*support, *query, strict=True):
        covariance = np.linalg.inv(np.diag(1 / variances) + x.T @ (2 * m[:, None] / noise * x))
        head = start + covariance @ x.T @ (2 * m / noise * (y - x @ start))
        v = np.einsum("if,fg,ig->i", qx, covariance, qx) + noise / 2
        losses += list((0.5 * np.log(v) + (qy - qx @ head) ** 2 / (2 * v))[qm > 0])
    outer = model.compute_gradients(batch)
    assert float(outer.loss) == pytest.approx(np.mean(losses), rel=1e-5)
    lookup = model.collection.lookup(batch["features"], insert=False)
    view = model.learner.view(batch, lookup)
    outputs = model.learner.outer_loss(view, model.learner.adapt(view, steps=1).parameters).outputs
    np.testing.assert_allclose(outputs[..., 0], model.predict_after(batch, (1,))[1], rtol=1e-5, atol=1e-6)


@pytest.mark.shown_by("test_the_outer_loss_is_the_likelihood_of_the_query_under_predicted_variances")
def test_a_likelihood_teaches_variances_their_scale():
    ratios = {}
    for likelihood in (False, True):
        prior = HeadPrior(noise=8.0, pace=5.0, likelihood=likelihood)
        model, batch = make_model(inner=InnerLoop("ridge", prior=prior)), make_batch([12] * 16)
        model.fit(tf.data.Dataset.from_tensors(batch).repeat(60), epochs=3, verbose=0)
        real = batch["query"]["mask"].numpy() > 0
        labels = batch["label"].numpy()[batch["query"]["index"].numpy()]
        off = (model.predict_after(batch, (1,))[1].numpy() - labels) ** 2
        variance = model.predict_variance(batch).numpy() + float(model.inner_rates.noise()) / 2
        ratios[likelihood] = float((off / variance)[real].mean())
    assert abs(np.log(ratios[True])) < 0.2 < abs(np.log(ratios[False]))


def test_a_logistic_loss_stays_with_a_likelihood():
    loss, batch = tf.keras.losses.BinaryCrossentropy(from_logits=True), make_batch(SIZES)
    batch["label"] = tf.cast(batch["label"] > 0, tf.float32)
    found = [
        float(make_model(loss=loss, inner=inner).compute_gradients(batch).loss)
        for inner in (likely(), InnerLoop("ridge"))
    ]
    assert found[0] == found[1]


def test_a_likelihood_of_rows_that_a_head_has_seen_is_refused():
    with pytest.raises(ConfigError, match='take outer_samples="query"'):
        make_model(inner=likely(), outer_samples="all")
    with pytest.raises(ConfigError, match="learns from what solved heads predict, got steps=0"):
        InnerLoop("ridge", steps=0, prior=HeadPrior(likelihood=True))
    with pytest.raises(ConfigError, match="likelihood must be True or False, got 1"):
        HeadPrior(likelihood=1)
    with pytest.raises(ConfigError, match="which aren't computed in groups"):
        make_model(inner=likely()).compile("adam", "mse", form="grouped")


def test_labels_of_a_large_unit_are_solved_as_those_of_a_small_one():
    found = {}
    for unit in (1.0, 1000.0):
        model = make_model(loss=lambda y, f, u=unit: tf.reduce_mean(((y - f) / u) ** 2, -1), inner=likely())
        for weight in model.network.weights[2:]:
            weight.assign(tf.zeros_like(weight))
        # Variances are in the square of the labels' unit.
        model.learner.inner_rates._log_prior.assign_add(tf.fill([7], 2 * float(np.log(unit))))
        batch = make_batch(SIZES)
        found[unit] = model.predict_after({**batch, "label": unit * batch["label"]}, (1,))[1] / unit
        assert model.learner.learns_variance
    np.testing.assert_allclose(found[1000.0], found[1.0], rtol=1e-3, atol=1e-5)


@pytest.mark.shown_by("test_the_outer_gradient_has_a_share_of_the_loss_before_adaptation")
def test_tasks_without_support_are_predicted_as_the_shared_head_has_learnt():
    model, batch = make_model(), make_batch([9] * 8)
    batch["label"] += 4.0
    model.compile(tf.keras.optimizers.Adam(0.03), "mse")
    model.fit(tf.data.Dataset.from_tensors(batch).repeat(150), verbose=0)
    off = model.predict_after(batch, (0,))[0] - tf.gather(batch["label"], batch["query"]["index"])
    assert float(tf.reduce_mean(tf.abs(off))) < 1.0  # 2.4 if only adapted tasks taught the head


@pytest.mark.parametrize(("likelihood", "outer_samples"), [(False, "query"), (False, "all"), (True, "query")])
def test_the_outer_gradient_has_a_share_of_the_loss_before_adaptation(likelihood, outer_samples):
    batch, found = make_batch(SIZES), {}
    for unadapted in (0.0, 0.5):
        inner = InnerLoop("ridge", prior=HeadPrior(noise=0.6, likelihood=likelihood, unadapted=unadapted))
        model = make_model(inner=inner, outer_samples=outer_samples)
        found[unadapted] = model.compute_gradients(batch)
    assert float(found[0.0].loss) == float(found[0.5].loss)
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        lookup = model.collection.lookup(batch["features"], insert=False)
        tape.watch(lookup.rows)
        view = model.learner.view(batch, lookup)
        part = "all" if outer_samples == "all" else "query"
        outputs = model.learner.task_outputs(view, part, model.learner.start_weights(view))[..., 0]
        losses = (outputs - view.labels(part)) ** 2
        if likelihood:
            kernel, bias = model.network.weights[:2]
            hidden = tf.nn.relu(view.inputs(part) @ kernel + bias)
            prior = model.learner.inner_rates.prior()
            variance = tf.reduce_sum(hidden**2 * prior[:-1], -1) + prior[-1]
            variance += model.learner.inner_rates.noise() / 2
            losses = (tf.math.log(variance) + losses / variance) / 2
        real = view.mask(part)
        loss = 0.5 * tf.reduce_sum(losses * real) / tf.reduce_sum(real)
    expected = tape.gradient(loss, [*variables, *lookup.rows])
    pairs = zip([*found[0.5].dense, *found[0.5].rows], [*found[0.0].dense, *found[0.0].rows], strict=True)
    for (whole, adapted), share in zip(pairs, expected, strict=True):
        share = tf.zeros_like(whole) if share is None else tf.convert_to_tensor(share)
        np.testing.assert_allclose(whole - adapted, share, rtol=1e-3, atol=1e-5)
