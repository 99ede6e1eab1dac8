"""Exports have warm-up requests that servers answer, and Triton's Python backend runs them."""

import importlib.util
import json
import re
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError, GmetaError
from gmeta.export import Publisher, export_model
from gmeta.export.model_server import LoadedModel
from gmeta.export.sequence_models import state_signatures
from gmeta.export.server_files import WARM_UP, read_warm_up, triton_version, write_triton
from gmeta.export.servers import array_of
from gmeta.export.signature import Signature
from gmeta.layers import HSTU, MLP, EmbeddingCollection, FeatureConfig
from gmeta.meta import InnerLoop
from gmeta.models import GRM, MetaModel, NextItemModel

K = tf.keras
RATED = {"user": np.array([1, 1, 1]), "item": np.array([3, 4, 5])}
LABEL = np.float32([1, 0, 1])
ASKED = {"user": np.array([1, 2]), "item": np.array([5, 900])}


def warmed(folder):
    """Signature -> inputs of the requests in a SavedModel, all of which a server answers."""
    requests = read_warm_up(folder)
    loaded = LoadedModel(folder, 1, "any")
    assert loaded.warm_up() == len(requests)
    loaded.retire()
    return {
        each.model_spec.signature_name: {e.key: array_of(e.value, 0) for e in each.inputs}
        for each in requests
    }


def clicks():
    """A model with a text, a list of ids and a number."""
    features = [FeatureConfig("city", dim=2, hash=True), FeatureConfig("tags", dim=2, combiner="mean")]
    inputs = {
        "city": K.Input([], name="city", dtype=tf.string),
        "tags": K.Input([None], name="tags", dtype=tf.int64, ragged=True),
    }
    rows = EmbeddingCollection(features)(inputs)
    return K.Model(inputs, K.layers.Dense(1, "sigmoid")(K.layers.Concatenate()(list(rows.values()))))


@pytest.fixture(scope="module")
def model():
    return clicks()


def test_a_request_of_one_sample_warms_each_signature(model, tmp_path):
    found = warmed(export_model(model, tmp_path / "1", label="click").folder)
    assert [*found] == ["serving_default"]
    assert found["serving_default"]["city"].tolist() == [b"1"]
    assert found["serving_default"]["tags"].tolist() == [[1]]


def test_a_user_names_the_requests(model, tmp_path):
    shown = {"city": ["Kyiv", "Oslo"], "tags": [[1, 2], [3, -1]]}
    found = warmed(export_model(model, tmp_path / "1", warm_up={"serving_default": shown}).folder)
    assert found["serving_default"]["tags"].tolist() == shown["tags"]
    assert not (export_model(model, tmp_path / "2", warm_up=False).folder / WARM_UP).exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"x": {}}, "there is no signature 'x'; there are serving_default"),
        ({"serving_default": {"city": ["Kyiv"]}}, r"warm_up\['serving_default'\] lacks tags"),
        ({"serving_default": {"city": ["a"], "tags": [1]}}, r"\['tags'\] must have shape \(None, None\)"),
        ({"serving_default": {"city": ["a"], "tags": [["b"]]}}, r"warm_up\['serving_default'\]\['tags'\]: "),
        ({"serving_default": {"city": ["a"], "tags": [[1]], "x": 1}}, "there is no input 'x'"),
    ],
)
def test_wrong_requests_of_a_user_are_errors(given, told, model, tmp_path):
    with pytest.raises(ConfigError, match=told):
        export_model(model, tmp_path / "1", warm_up=given)
    assert not (tmp_path / "1").exists()


def test_a_signature_that_refuses_the_sample_is_told_of(model, tmp_path):
    def picky(inputs):
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(inputs["x"] > 1), ["x is low"])]):
            return {"y": tf.identity(inputs["x"])}

    signatures = {"picky": Signature(picky, {"x": tf.TensorSpec([None], tf.float32)})}
    exported = export_model(model, tmp_path / "1", signatures=signatures)
    assert "`picky` has no warm-up request" in exported.notes[0]
    assert "(x is low)" in exported.notes[0]
    assert warmed(exported.folder) == {}
    with pytest.raises(ConfigError, match=r"warm_up\['picky'\] isn't answered: x is low"):
        export_model(model, tmp_path / "2", signatures=signatures, warm_up={"picky": {"x": [-1.0]}})
    warm = export_model(model, tmp_path / "3", signatures=signatures, warm_up={"picky": {"x": [2.0]}})
    assert [*warmed(warm.folder)] == ["serving_default", "picky"]


@pytest.mark.shown_by("test_triton_adapts_and_predicts")
def test_states_of_users_are_the_answers_of_another_signature(tmp_path):
    features = [FeatureConfig(name, dim=4) for name in ("item", "city", "action")]
    parts = {"contexts": ["city"], "history": ["item", "action"], "targets": ["item"], "time": "time"}
    model = GRM.of(features, **parts, dim=8, blocks=1, max_length=10, expert_units=[8], tower_units=[8])
    signatures = state_signatures(model, dtype="int8")
    exported = export_model(model, tmp_path / "1", signatures=signatures)
    assert exported.notes == ()
    found = warmed(exported.folder)
    assert {*found} == {*signatures, "serving_default"}
    assert found["read_on"]["state_bytes"].tolist() == found["score"]["state_bytes"].tolist()


@pytest.mark.shown_by("test_a_user_names_the_requests")
def test_rows_of_external_tables_are_absent_in_requests(model, tmp_path):
    found = warmed(export_model(model, tmp_path / "1", external="all").folder)
    assert {*found} == {"serving_default", "serving_default_ids"}
    asked = found["serving_default"]
    assert asked["tags_ids"].tolist() == [1]
    assert asked["tags_rows"].tolist() == [b""]


def test_a_published_model_is_warm_but_for_deltas(model, tmp_path):
    items = EmbeddingCollection([FeatureConfig("item", dim=8)])
    hstu = HSTU(blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=5, bias_by_time=False)
    model = NextItemModel(items, hstu, items=np.arange(12), max_length=5)
    model.compile("adam")
    model.predict(tf.data.Dataset.from_tensors({"item": tf.ragged.constant([[1, 2]], tf.int64)}))
    publisher = Publisher(model, tmp_path)
    version = publisher.publish().version
    publisher.close()
    found = warmed(tmp_path / "model" / str(version))
    assert {*found} == {"serving_default", "recommend", "query", "delta_version"}


def test_a_damaged_file_of_requests_is_an_error(model, tmp_path):
    folder = export_model(model, tmp_path / "1").folder
    (folder / WARM_UP).write_bytes((folder / WARM_UP).read_bytes()[:-2])
    with pytest.raises(GmetaError, match="tf_serving_warmup_requests"):
        read_warm_up(folder)
    with tf.io.TFRecordWriter(str(folder / WARM_UP)) as writer:
        writer.write(b"")
    with pytest.raises(GmetaError, match="record 1 isn't one of Predict"):
        read_warm_up(folder)


# Triton.


class Tensor:
    """`triton_python_backend_utils.Tensor`."""

    def __init__(self, name, array):
        assert array.ndim
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class Response:
    def __init__(self, output_tensors=(), error=None):
        self.tensors, self.error = {each.name(): each.as_numpy() for each in output_tensors}, error


def backend():
    """What Triton gives its Python models."""
    found = types.ModuleType("triton_python_backend_utils")
    found.Tensor, found.InferenceResponse, found.TritonError = Tensor, Response, str
    found.get_input_tensor_by_name = lambda request, name: Tensor(name, request[name])
    return found


def config_of(folder):
    """A config.pbtxt, as the parts of it that are given once and several times."""
    text = (folder / "config.pbtxt").read_text()
    tensors = re.findall(r'(input|output) \[ \{ name: "(\w+)" data_type: (\w+) dims: \[ (.*) \] \} \]', text)
    (signature,) = re.findall(r'parameters \{ key: "signature" value \{ string_value: "(\w+)" \} \}', text)
    assert re.search(r'^backend: "python"$', text, re.MULTILINE)
    assert re.search("^max_batch_size: 0$", text, re.MULTILINE)
    assert re.search(f'^name: "{folder.name}"$', text, re.MULTILINE)
    return {(kind, name): (dtype, dims) for kind, name, dtype, dims in tensors}, signature


class Triton:
    """Drives a model of a repository as Triton does."""

    def __init__(self, folder, version):
        self.tensors, signature = config_of(folder)
        path = folder / str(version) / "model.py"
        spec = importlib.util.spec_from_file_location(f"{folder.name}_model", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert "import gmeta" not in path.read_text()
        self.model = module.TritonPythonModel()
        config = {"parameters": {"signature": {"string_value": signature}}}
        arguments = {"model_repository": str(folder), "model_version": str(version)}
        self.model.initialize({**arguments, "model_config": json.dumps(config)})

    def ask(self, *requests):
        given = {name for kind, name in self.tensors if kind == "input"}
        assert all({*request} == given for request in requests)
        return self.model.execute([*requests])


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend())
    return Triton


def test_triton_adapts_and_predicts(triton, tmp_path):
    features = [FeatureConfig("user", dim=3), FeatureConfig("item", dim=3)]
    network, inner = MLP({"hidden": 4, "head": 1}), InnerLoop("anil", steps=1)
    model = MetaModel(EmbeddingCollection(features), network, inner=inner)
    model.compile()
    model.adapt(RATED, LABEL)
    exported = export_model(model, tmp_path / "saved")
    repository = tmp_path / "taste"
    assert triton_version(repository) == 1
    names = write_triton(exported.folder, repository, 1)
    assert names == [f"taste_{name}" for name in ("adapt", "adapt_many", "predict", "predict_with")]
    assert triton_version(repository) == 2
    adapts, predicts = (triton(repository / f"taste_{name}", 1) for name in ("adapt", "predict_with"))
    assert adapts.tensors == {
        ("input", "item"): ("TYPE_INT64", "-1"),
        ("input", "label"): ("TYPE_FP32", "-1"),
        ("input", "user"): ("TYPE_INT64", "-1"),
        ("output", "weights_bytes"): ("TYPE_STRING", "1"),
    }
    others = {"user": np.array([2]), "item": np.array([9]), "label": np.float32([0])}
    found = adapts.ask({**RATED, "label": LABEL}, others, {**RATED, "label": LABEL[:1]})
    assert [each.error is None for each in found] == [True, True, False]
    assert "must have equal numbers of samples" in found[2].error
    weights = found[0].tensors["weights_bytes"]
    assert weights.shape == (1,)
    (rated,) = predicts.ask({**ASKED, "weights_bytes": weights})
    expected = model.predict(ASKED, weights=model.adapt(RATED, LABEL))
    np.testing.assert_allclose(rated.tensors["rating"], np.reshape(expected, -1), rtol=1e-5)
    with pytest.raises(ConfigError, match="exists: name another --model-version"):
        write_triton(exported.folder, repository, 1)
    adapts.model.finalize()


def test_triton_gets_texts_and_no_deltas(triton, model, tmp_path):
    folder = export_model(model, tmp_path / "saved", label="click", warm_up=False).folder
    signature = {"predict": Signature(lambda given: {"y": given["x"]}, {"x": tf.TensorSpec([2], tf.string)})}
    folder = export_model(model, tmp_path / "other", signatures=signature).folder
    assert write_triton(folder, tmp_path / "shop", 3) == ["shop_predict"]
    (found,) = triton(tmp_path / "shop" / "shop_predict", 3).ask({"x": np.array([b"a", b"b\0"], object)})
    assert found.tensors["y"].tolist() == [b"a", b"b\0"]


def test_triton_refuses_what_it_has_no_dtype_for(model, tmp_path):
    signature = {
        "predict": Signature(lambda given: {"y": given["x"]}, {"x": tf.TensorSpec([], tf.complex64)})
    }
    folder = export_model(model, tmp_path / "1", signatures=signature, warm_up=False).folder
    with pytest.raises(ConfigError, match="Triton can't have input 'x' of predict: complex64"):
        write_triton(folder, tmp_path / "shop", 1)
