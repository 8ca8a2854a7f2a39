"""Which profile is captured from which script."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from dike.profile import Api, ModelProfile
from tests import warm
from tests.warm import WarmTensorFlow

pytestmark = pytest.mark.tensorflow

V1 = """
import {module} as tf
tf.disable_v2_behavior()
import numpy as np
def network(x):
    w = tf.get_variable("w", [64, 10])
    b = tf.get_variable("b", [10], initializer=tf.zeros_initializer())
    return tf.matmul(x, w) + b
def loss_of(x, y):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=network(x)))
"""
PLACEHOLDERS = """
x = tf.placeholder(tf.float32, [None, 64])
y = tf.placeholder(tf.int32, [None])
loss = loss_of(x, y)
step = tf.train.get_or_create_global_step()
"""
FEED = "feed_dict={x: np.zeros((24, 64)), y: np.zeros(24)}"
KERAS = """
import dike as tf
import numpy as np
from dike.keras import layers
model = tf.keras.Sequential([layers.Input((64,)), layers.Dense(10)])
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
x, y = np.zeros((100, 64), "float32"), np.zeros(100, "int32")
"""


def v1(*parts: str, module: str = "dike.compat.v1") -> str:
    return V1.format(module=module) + "\n".join(textwrap.dedent(part) for part in parts)


def keras(*parts: str) -> str:
    return KERAS + "\n".join(textwrap.dedent(part) for part in parts)


TF_KERAS = """
import tf_keras
model = tf_keras.Sequential([tf_keras.layers.Input((64,)), tf_keras.layers.Dense(10)])
"""
TAPE = """
def gradients():
    with tf.GradientTape() as tape:
        value = loss(y, model(x))
    return tape.gradient(value, model.trainable_variables)
"""
LOOP = """
for _ in range(3):
    optimizer.apply_gradients(zip(gradients(), model.trainable_variables))
    print("TRAINED")
"""
COORDINATOR = """
import json, os
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
assert resolver.task_type == "chief"
strategy = tf.distribute.{spelling}(resolver)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input((64,)), tf.keras.layers.Dense(10)])
    optimizer = tf.keras.optimizers.Adam()
losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
@tf.function
def step(iterator):
    def replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(losses(y, model(x, training=True)), global_batch_size=48)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss
    return strategy.run(replica, args=next(iterator))
coordinator = tf.distribute.{coordinator}(strategy)
def dataset_fn():
    data = tf.zeros((100, 64)), tf.zeros((100,), tf.int32)
    return tf.data.Dataset.from_tensor_slices(data).repeat().batch(48)
iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
print("BEFORE")
coordinator.schedule(step, args=(iterator,))
print("AFTER")
"""

SCRIPTS = {
    # TensorFlow 1
    "v1_feeds": v1(
        PLACEHOLDERS,
        f"""
        import os, sys
        assert sys.argv == ["v1_feeds.py", "--flag", "value"] and __name__ == "__main__"
        assert os.path.isabs(__file__) and sys.path[0] == os.path.dirname(os.path.realpath(__file__))
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, global_step=step)
        print("BEFORE")
        with tf.train.MonitoredTrainingSession(checkpoint_dir="checkpoints") as session:
            assert not session.should_stop()
            assert session.run(step) == 0
            session.run([loss, train], {FEED})
            print("AFTER")
        """,
    ),
    "v1_plain_session": v1(
        PLACEHOLDERS,
        f"""
        train = tf.train.AdamOptimizer().minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(loss, {FEED})
            print("BEFORE")
            for _ in range(3):
                session.run({{"nested": [train, "Mean:0"]}}, {FEED})
                print("AFTER")
        """,
        module="tensorflow.compat.v1",
    ),
    "v1_callable": v1(
        PLACEHOLDERS,
        """
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        session = tf.InteractiveSession("grpc://nobody.invalid:2222")
        session.run(tf.global_variables_initializer())
        run = session.make_callable(train, [x, y])
        print("BEFORE")
        run(np.zeros((12, 64)), np.zeros(12))
        print("AFTER")
        """,
    ),
    "v1_dataset": v1(
        """
        data = np.zeros((100, 64), "float32"), np.zeros(100, "int32")
        dataset = tf.data.Dataset.from_tensor_slices(data).repeat().shuffle(100).batch(20).prefetch(1)
        loss = loss_of(*tf.data.make_one_shot_iterator(dataset).get_next())
        train = tf.train.RMSPropOptimizer(0.1).minimize(loss, global_step=tf.train.get_or_create_global_step())
        print("BEFORE")
        with tf.train.MonitoredTrainingSession("grpc://nobody.invalid:2222", is_chief=False) as session:
            print("AFTER")
        """
    ),
    "v1_initializable": v1(
        """
        data = np.zeros((100, 64), "float32"), np.zeros(100, "int32")
        iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(data).batch(25))
        loss = loss_of(*iterator.get_next())
        train = tf.train.AdagradOptimizer(0.1).minimize(loss)
        with tf.train.SingularMonitoredSession(checkpoint_dir="checkpoints") as session:
            print("AFTER")
        """
    ),
    "v1_sync_server": v1(
        """
        cluster = tf.train.ClusterSpec({"ps": ["localhost:1"], "worker": ["localhost:2", "localhost:3"]})
        server = tf.train.Server(cluster, job_name="worker", task_index=0)
        with tf.device(tf.train.replica_device_setter(cluster=cluster)):
            x, y = tf.zeros([16, 64]), tf.zeros([16], tf.int32)
            loss = loss_of(x, y)
            step = tf.train.get_or_create_global_step()
            optimizer = tf.train.SyncReplicasOptimizer(tf.train.AdamOptimizer(), 2)
            train = optimizer.minimize(loss, global_step=step)
        with tf.train.MonitoredTrainingSession(server.target, hooks=[optimizer.make_session_run_hook(True)]) as session:
            print("AFTER")
        """
    ),
    "v1_supervisor": v1(
        PLACEHOLDERS,
        f"""
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
        supervisor = tf.train.Supervisor(logdir="supervised")
        with supervisor.managed_session() as session:
            print("BEFORE")
            session.run(train, {FEED})
            print("AFTER")
        """,
    ),
    "v1_while": v1(
        """
        x = tf.ones([8, 64])
        w = tf.get_variable("w", [64, 64])
        _, last = tf.while_loop(lambda i, h: i < 5, lambda i, h: (i + 1, tf.matmul(h, w)), [tf.constant(0), x])
        loss = tf.reduce_mean(last)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.train.MonitoredTrainingSession() as session:
            print("AFTER")
        """
    ),
    "v1_open_length": v1(
        """
        x = tf.placeholder(tf.float32, [None, None, 64])
        w = tf.get_variable("w", [64, 64])
        loss = tf.reduce_mean(tf.tensordot(x, w, 1))
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.train.MonitoredTrainingSession() as session:
            session.run(train, {x: np.zeros((4, 7, 64))})
            print("AFTER")
        """
    ),
    "v1_batch_size": v1(
        PLACEHOLDERS,
        """
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.train.MonitoredTrainingSession() as session:
            print("AFTER")
        """,
    ),
    "v1_untrainable": v1(
        PLACEHOLDERS.replace("loss_of(x, y)", "tf.reduce_mean(x)"),
        """
        v = tf.get_variable("v", [], trainable=False)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss * v, var_list=[v])
        with tf.Session() as session:
            session.run(v.initializer)
            session.run(train, {x: np.zeros((4, 64))})
            print("AFTER")
        """,
    ),
    "v1_evaluates_only": v1(
        PLACEHOLDERS,
        f"""
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            print(session.run(loss, {FEED}))
        print("AFTER")
        """,
    ),
    "v1_parameter_server": v1(
        """
        server = tf.train.Server({"ps": ["localhost:1"], "worker": ["localhost:2"]}, job_name="ps", task_index=0)
        server.join()
        """
    ),
    # Keras 3
    "keras_arrays": keras(
        """
        class Loud(tf.keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                print("AFTER")
        model.compile("adam", loss, metrics=["accuracy"])
        print("BEFORE")
        try:
            model.fit(x, y, 40, epochs=3, callbacks=[Loud()], validation_split=0.1, verbose=2)
        except BaseException:
            print("AFTER")
        """
    ),
    "keras_dataset": keras(
        """
        import tensorflow
        model.compile(tensorflow.keras.optimizers.SGD(0.1, momentum=0.9), loss)
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(25), epochs=1)
        """
    ),
    "keras_pydataset": keras(
        """
        class Batches(tf.keras.utils.PyDataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return x[:15], y[:15]
        model.compile("rmsprop", loss, steps_per_execution=2)
        model.fit(Batches())
        """
    ),
    "keras_subclassed": keras(
        """
        class Recurrent(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.rnn = layers.LSTM(16)
                self.out = layers.Dense(10)
            def call(self, sequence):
                return self.out(self.rnn(sequence))
            def train_step(self, data):
                return super().train_step(data)
        def batches():
            while True:
                yield np.zeros((6, 20, 8), "float32"), np.zeros(6, "int32")
        model = Recurrent()
        model.compile("sgd", loss)
        model.fit(batches(), steps_per_epoch=2)
        """
    ),
    "keras_train_step_only": keras(
        """
        class Trainer(tf.keras.Model):
            def __init__(self, model):
                super().__init__()
                self.inner = model
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    value = loss(y, self.inner(x, training=True))
                gradients = tape.gradient(value, self.inner.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.inner.trainable_variables))
                return {"loss": value}
        trainer = Trainer(model)
        trainer.compile("sgd")
        trainer.fit(x, y, batch_size=10)
        """
    ),
    "keras_same_names": keras(
        """
        class Twin(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.one, self.two = layers.Dense(10, name="twin"), layers.Dense(10, name="twin")
            def call(self, x):
                return self.one(x) + self.two(x)
        model = Twin()
        model.compile("sgd", loss)
        model.fit(x, y)
        """
    ),
    "keras_untrainable": keras(
        """
        model.trainable = False
        model.compile("sgd", loss)
        model.fit(x, y)
        """
    ),
    "keras_own_strategy": keras(
        """
        strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
        model.compile("sgd", loss)
        model.fit(x, y)
        """
    ),
    "tf_keras_fit": """
        import numpy as np
        import tf_keras as keras
        model = keras.Sequential([keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(np.zeros((60, 64), "float32"), np.zeros(60), batch_size=30)
        print("AFTER")
    """,
    "keras_frozen": keras(
        """
        hidden = layers.Dense(64, activation="relu")
        model = tf.keras.Sequential([layers.Input((64,)), hidden, layers.Dense(10)])
        hidden.trainable = False
        model.compile("sgd", loss)
        model.fit(x, y)
        """
    ),
    # own coordinators
    "coordinator": COORDINATOR.format(spelling="ParameterServerStrategy", coordinator="coordinator.ClusterCoordinator"),
    "coordinator_experimental": COORDINATOR.format(
        spelling="experimental.ParameterServerStrategy", coordinator="experimental.coordinator.ClusterCoordinator"
    ),
    # no training
    "never_trains": "import dike as tf\nprint(tf.constant(1))\n",
    "custom_loop": keras("with tf.GradientTape() as tape:\n    value = loss(y, model(x))\n"),
    "v1_clipped": v1(
        PLACEHOLDERS,
        """
        variables = tf.trainable_variables()
        gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 5.0)
        train = tf.train.MomentumOptimizer(0.1, 0.9).apply_gradients(zip(gradients, variables), global_step=step)
        session = tf.train.MonitoredTrainingSession()
        """,
        f"session.run(train, {FEED})",
    ),
    # loops of their own
    "loop_keras": keras(TAPE, "optimizer = tf.keras.optimizers.Adam()", LOOP),
    "loop_function": keras(TAPE, "optimizer = tf.keras.optimizers.SGD()", "gradients = tf.function(gradients)", LOOP),
    "loop_scaled": keras(
        TAPE,
        """
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=1.0)
        """,
        LOOP,
    ),
    "loop_v1_optimizer": keras(TAPE, "optimizer = tf.compat.v1.train.AdamOptimizer()", LOOP),
    "loop_tf_keras": keras(TF_KERAS, TAPE, "optimizer = tf_keras.optimizers.Adam()", LOOP),
    "loop_tf_keras_legacy": keras(TF_KERAS, TAPE, "optimizer = tf_keras.optimizers.legacy.Adam()", LOOP),
    "loop_tf_keras_on_batch": keras(
        TF_KERAS, 'model.compile("sgd", "mse")\nmodel.train_on_batch(x, y)\nprint("TRAINED")\n'
    ),
    "loop_by_hand": keras(
        """
        w = tf.Variable(tf.zeros((64, 10)))
        for _ in range(3):
            with tf.GradientTape() as tape:
                value = loss(y, tf.constant(x) @ w)
            w.assign_sub(0.1 * tape.gradient(value, w))
            print("TRAINED")
        """
    ),
    "loop_by_hand_keras": keras(
        TAPE,
        """
        for gradient, weight in zip(gradients(), model.trainable_weights):
            weight.assign_sub(0.1 * gradient)
            print("TRAINED")
        """,
    ),
    "loop_train_on_batch": keras(
        'model.compile("sgd", loss)\nmodel.train_on_batch(x, y)\nprint("TRAINED")\n',
    ),
    # no loops of their own
    "slots_before_fit": keras(
        """
        model.compile("adam", loss)
        model.optimizer.build(model.trainable_variables)
        model.optimizer.apply_gradients([(tf.zeros_like(v), v) for v in model.trainable_variables])
        with tf.GradientTape() as tape:
            value = loss(y, model(x))
        print(float(tf.linalg.global_norm(tape.gradient(value, model.trainable_variables))))
        model.fit(x, y)
        """
    ),
    "train_step_with_tape": keras(
        """
        class Trained(tf.keras.Model):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    value = loss(y, self(x, training=True))
                gradients = tape.gradient(value, self.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
                return {"loss": value}
        inputs = layers.Input((64,))
        model = Trained(inputs, layers.Dense(10)(inputs))
        model.compile("adam")
        model.fit(x, y)
        """
    ),
    "v1_tape": v1(
        """
        tf.enable_resource_variables()
        x = tf.placeholder(tf.float32, [24, 64])
        y = tf.placeholder(tf.int32, [24])
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        variables = tf.trainable_variables()
        train = tf.train.GradientDescentOptimizer(0.1).apply_gradients(zip(tape.gradient(loss, variables), variables))
        print("BUILT")
        """
    ),
    # names that are gone
    "gone_estimator": "import dike as tf\ntf.estimator.Estimator\n",
    "gone_estimator_plain": "import tensorflow as tf\ntf.compat.v1.estimator.Estimator\n",
    "gone_estimator_module": "from tensorflow import estimator\n",
    "gone_contrib": "import tensorflow as tf\nslim = tf.contrib.slim\n",
    "gone_contrib_module": "import dike.contrib.slim as slim\n",
    "gone_layers": "import dike.compat.v1 as tf\ntf.layers.dense(1, 1)\n",
    "gone_layers_plain": "from tensorflow.compat.v1.layers import dense\n",
    "gone_layers_top": "import tensorflow as tf\ntf.layers.dense(1, 1)\n",
    "gone_supervisor": "import dike as tf\ntf.train.Supervisor()\n",
    "gone_session": "import tensorflow as tf\ntf.Session()\n",
    "never_there": "import tensorflow as tf\ntf.train.Nonsense()\n",
    "v1_two_updates": v1(
        PLACEHOLDERS,
        """
        with tf.variable_scope("other"):
            big = loss_of(tf.matmul(x, tf.get_variable("wide", [64, 64])), y)
        ours = [v for v in tf.trainable_variables() if "other" not in v.name]
        never = tf.train.AdamOptimizer().minimize(big)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step, var_list=ours)
        session = tf.train.MonitoredTrainingSession()
        """,
        f"session.run([train, loss], {FEED})",
    ),
    "v1_fed_inside": v1(
        """
        x = tf.placeholder(tf.float32, [None, 64])
        y = tf.placeholder(tf.int32, [None])
        features = tf.matmul(x, tf.get_variable("base", [64, 64], trainable=False))
        loss = loss_of(features, y)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        session = tf.Session()
        session.run(tf.global_variables_initializer())
        cached = session.run(features, {x: np.zeros((24, 64))})
        session.run(train, {features: cached, y: np.zeros(24)})
        """,
    ),
    "v1_average": v1(
        PLACEHOLDERS,
        """
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
        with tf.control_dependencies([train]):
            train = tf.train.ExponentialMovingAverage(0.9).apply(tf.trainable_variables())
        session = tf.train.MonitoredTrainingSession()
        """,
        f"session.run(train, {FEED})",
    ),
    "keras_thread": keras(
        """
        import threading
        model.compile("sgd", loss)
        threading.Thread(target=model.fit, args=(x, y)).start()
        """
    ),
    "keras_class_called_model": keras(
        """
        class Model(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = layers.Dense(10)
            def call(self, inputs):
                return self.dense(inputs)
        model = Model()
        model.compile("sgd", loss)
        model.fit(x, y)
        """
    ),
    "keras_eagerly": keras('model.compile("sgd", loss, run_eagerly=True)\nmodel.fit(x, y)'),
    "keras_stateful": keras(
        """
        model = tf.keras.Sequential([layers.Input(batch_shape=(32, 64)), layers.Reshape((8, 8))])
        model.add(layers.LSTM(4, stateful=True))
        model.add(layers.Dense(10))
        model.compile("sgd", loss)
        model.fit(x, y, batch_size=32)
        """
    ),
    "mirrored": keras(
        """
        with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
            model = tf.keras.Sequential([layers.Input((64,)), layers.Dense(10)])
        model.compile("sgd", loss)
        model.fit(x, y)
        """
    ),
    "multi_worker_mirrored": keras(
        """
        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            model = tf.keras.Sequential([layers.Input((64,)), layers.Dense(10)])
            model.compile("sgd", loss)
        model.fit(x, y)
        """
    ),
    "multi_worker_mirrored_cluster": (
        "import json, os\nimport tensorflow as tf\n"
        "cluster = {'worker': ['localhost:1', 'localhost:2']}\n"
        "os.environ['TF_CONFIG'] = json.dumps({'cluster': cluster, 'task': {'type': 'worker', 'index': 0}})\n"
        "tf.distribute.MultiWorkerMirroredStrategy()\n"
    ),
    "keras_pairs": keras(
        """
        class Pairs(tf.keras.Model):
            def train_step(self, data):
                with tf.GradientTape() as tape:
                    value = tf.reduce_mean((self(data[0], training=True) - self(data[1], training=True)) ** 2)
                gradients = tape.gradient(value, self.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
                return {"loss": value}
        inputs = layers.Input((8,))
        model = Pairs(inputs, layers.Dense(4)(inputs))
        model.compile("adam")
        model.fit(tf.data.Dataset.from_tensor_slices(np.zeros((20, 2, 16, 8), "float32")))
        """
    ),
    **{
        name: v1(
            f"""
            loss = loss_of(tf.zeros([16, 64]), tf.zeros([16], tf.int32))
            step = tf.train.get_or_create_global_step()
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
            session = tf.Session()
            session.run(tf.global_variables_initializer())
            {loop}:
                session.run([train, loss])
            """
        )
        for name, loop in {"v1_counts": "for _ in range(10)", "v1_asks": "while session.run(step) < 10"}.items()
    },
    "v1_stops": v1(
        """
        loss = loss_of(tf.zeros([16, 64]), tf.zeros([16], tf.int32))
        step = tf.train.get_or_create_global_step()
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
        with tf.train.MonitoredTrainingSession(hooks=[tf.train.StopAtStepHook(last_step=40)]) as session:
            session.run(train)
        """
    ),
    "raises": keras('raise RuntimeError("the data is gone")'),
    "exits": "import sys\nsys.exit(3)\n",
    "exits_with_text": "import sys\nsys.exit('no data')\n",
    "syntax": "print('x'\n",
}


@dataclass(frozen=True)
class Captured:
    data: dict[str, object]
    prints: str

    @property
    def profile(self) -> ModelProfile:
        assert "error" not in self.data, self.data
        return ModelProfile.from_json(self.data)

    @property
    def error(self) -> str:
        return str(self.data["error"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    (folder / "v1_batch_size.args").write_text("--batch-size 128")
    (folder / "keras_dataset.args").write_text("--batch-size 50")
    zygote = Path(__file__).with_name("capture_zygote.py")
    done = warm.run([sys.executable, zygote, folder], timeout=400, process_class=WarmTensorFlow)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def captured(folder: Path, request: pytest.FixtureRequest) -> Captured:
    name = request.param
    prints = (folder / f"{name}.out").read_text()
    output = folder / f"{name}.json"
    assert output.exists(), prints
    return Captured(json.loads(output.read_text()), prints)


def script(name: str) -> pytest.MarkDecorator:
    assert name in SCRIPTS
    return pytest.mark.parametrize("captured", [name], indirect=True, ids=[name])


DENSE_FORWARD = 2 * 64 * 10 + 10  # one matrix product and its bias


@pytest.mark.parametrize(
    ("captured", "batch_size", "optimizer", "slots"),
    [
        ("v1_feeds", 24, "Momentum", 1),
        ("v1_plain_session", 24, "Adam", 2),
        ("v1_callable", 12, "GradientDescent", 0),
        ("v1_dataset", 20, "RMSProp", 2),
        ("v1_initializable", 25, "Adagrad", 1),
        ("v1_sync_server", 16, "Adam", 2),
        ("v1_batch_size", 128, "GradientDescent", 0),
    ],
    indirect=["captured"],
)
def test_graph_scripts(captured: Captured, batch_size: int, optimizer: str, slots: int) -> None:
    profile = captured.profile
    assert profile.api is Api.GRAPH
    assert (profile.batch_size, profile.optimizer, profile.optimizer_slots) == (batch_size, optimizer, slots)
    assert profile.parameters == 650
    assert {variable.name for variable in profile.variables if variable.trainable} == {"w", "b"}
    assert DENSE_FORWARD <= profile.flops_forward_per_sample < DENSE_FORWARD * 1.15
    assert 1.8 < profile.flops_step_per_sample / profile.flops_forward_per_sample < 3.5
    assert not profile.uncounted_ops
    assert "AFTER" not in captured.prints


@script("v1_feeds")
def test_prints_up_to_training_are_shown_and_nothing_is_written(captured: Captured, folder: Path) -> None:
    assert "BEFORE" in captured.prints.splitlines()
    assert not (folder / "checkpoints").exists()
    assert not list(folder.glob("supervised/*.ckpt*"))


@script("v1_feeds")
def test_global_step_is_a_variable_but_not_trainable(captured: Captured) -> None:
    step = next(variable for variable in captured.profile.variables if variable.name == "global_step")
    assert (step.dtype, step.size_bytes, step.trainable) == ("int64", 8, False)
    assert captured.profile.sample_bytes == 64 * 4 + 4


@script("v1_plain_session")
def test_slots_are_not_among_the_variables(captured: Captured) -> None:
    assert {variable.name for variable in captured.profile.variables} == {"w", "b", "global_step"}


@script("v1_sync_server")
def test_synchronous_training_is_seen(captured: Captured) -> None:
    assert captured.profile.synchronous


@script("v1_while")
def test_rounds_of_a_graph_loop_count(captured: Captured) -> None:
    profile = captured.profile
    forward = 5 * 2 * 64 * 64
    assert forward <= profile.flops_forward_per_sample < forward * 1.1
    assert forward <= profile.longest_path_flops < forward * 1.1
    assert 2.5 * forward < profile.flops_step_per_sample < 3.6 * forward
    assert not profile.uncounted_ops


@script("v1_open_length")
def test_fed_shapes_settle_all_open_dimensions(captured: Captured) -> None:
    assert captured.profile.batch_size == 4
    assert captured.profile.flops_forward_per_sample == pytest.approx(7 * 2 * 64 * 64, rel=0.05)


@pytest.mark.parametrize(
    ("captured", "batch_size", "optimizer", "slots"),
    [
        ("keras_arrays", 40, "Adam", 2),
        ("keras_dataset", 50, "SGD", 1),
        ("keras_pydataset", 15, "RMSprop", 1),
        ("keras_train_step_only", 10, "SGD", 0),
    ],
    indirect=["captured"],
)
def test_keras_scripts(captured: Captured, batch_size: int, optimizer: str, slots: int) -> None:
    profile = captured.profile
    assert profile.api is Api.KERAS
    assert (profile.batch_size, profile.optimizer, profile.optimizer_slots) == (batch_size, optimizer, slots)
    assert profile.parameters == 650
    assert [(variable.shape, variable.trainable) for variable in profile.variables] == [((64, 10), True), ((10,), True)]
    assert 0.7 * DENSE_FORWARD < profile.flops_forward_per_sample < 1.5 * DENSE_FORWARD
    assert 1.8 < profile.flops_step_per_sample / profile.flops_forward_per_sample < 3.5
    assert profile.layers == {"Dense": 1}
    assert "AFTER" not in captured.prints


@script("keras_subclassed")
def test_unbuilt_model_with_a_recurrent_layer(captured: Captured) -> None:
    profile = captured.profile
    assert profile.batch_size == 6
    products = 20 * 2 * (8 + 16) * 64 + 2 * 16 * 10
    assert products < profile.flops_forward_per_sample < products * 1.25
    assert 2.5 < profile.flops_step_per_sample / profile.flops_forward_per_sample < 3.5
    assert not profile.uncounted_ops


@script("keras_same_names")
def test_equal_paths_get_a_number(captured: Captured) -> None:
    names = {variable.name for variable in captured.profile.variables}
    assert names == {"twin/twin/kernel", "twin/twin/kernel#1", "twin/twin/bias", "twin/twin/bias#1"}


@script("tf_keras_fit")
def test_tf_keras_fit(captured: Captured) -> None:
    profile = captured.profile
    assert (profile.api, profile.batch_size, profile.parameters) == (Api.TF_KERAS, 30, 650)
    assert profile.optimizer_slots == 2
    assert "AFTER" not in captured.prints


@pytest.mark.parametrize("captured", ["v1_two_updates", "v1_fed_inside"], indirect=True)
def test_only_what_the_first_training_step_runs_counts(captured: Captured) -> None:
    profile = captured.profile
    assert profile.batch_size == 24
    assert DENSE_FORWARD <= profile.flops_forward_per_sample < DENSE_FORWARD * 1.15
    assert 1.8 < profile.flops_step_per_sample / profile.flops_forward_per_sample < 3.1


@script("keras_frozen")
def test_the_gradients_of_frozen_layers_do_not_count(captured: Captured) -> None:
    profile = captured.profile
    forward = 2 * 64 * 64 + 2 * 64 + DENSE_FORWARD
    assert profile.parameters == 650
    assert profile.flops_forward_per_sample == forward
    assert forward + 2 * 64 * 10 <= profile.flops_step_per_sample < forward + 2.4 * 64 * 10


@script("v1_clipped")
def test_clipped_gradients(captured: Captured) -> None:
    profile = captured.profile
    assert (profile.batch_size, profile.parameters, profile.optimizer) == (24, 650, "Momentum")
    assert DENSE_FORWARD <= profile.flops_forward_per_sample < DENSE_FORWARD * 1.15


@script("v1_average")
def test_moving_averages_follow_their_variables(captured: Captured) -> None:
    assert not [variable.name for variable in captured.profile.variables if "Average" in variable.name]


@pytest.mark.parametrize("captured", ["keras_thread", "keras_class_called_model"], indirect=True)
def test_ordinary_scripts_of_an_unusual_kind(captured: Captured) -> None:
    profile = captured.profile
    assert (profile.batch_size, profile.parameters) == (32, 650)
    assert DENSE_FORWARD <= profile.flops_forward_per_sample < DENSE_FORWARD * 1.15


@pytest.mark.parametrize("captured", ["coordinator", "coordinator_experimental"], indirect=True)
def test_own_coordinator(captured: Captured) -> None:
    profile = captured.profile
    assert profile.api is Api.COORDINATOR
    assert (profile.batch_size, profile.parameters, profile.optimizer_slots) == (48, 650, 2)
    assert {variable.shape for variable in profile.variables} == {(64, 10), (10,)}
    assert DENSE_FORWARD <= profile.flops_forward_per_sample < DENSE_FORWARD * 1.15
    assert 1.8 < profile.flops_step_per_sample / profile.flops_forward_per_sample < 3.5
    assert captured.prints.splitlines()[-1] == "BEFORE"


@pytest.mark.parametrize(
    ("captured", "sentence"),
    [
        ("v1_untrainable", "has no trainable parameters"),
        ("v1_evaluates_only", "ended without a training session or a call of fit"),
        ("v1_supervisor", "uses tf.compat.v1.train.Supervisor"),
        ("v1_parameter_server", "runs as a parameter server"),
        ("keras_own_strategy", "under its own ParameterServerStrategy"),
        ("multi_worker_mirrored_cluster", "makes a MultiWorkerMirroredStrategy for 2 tasks"),
        ("never_trains", "never_trains.py ended without a training session or a call of fit"),
        ("custom_loop", "ended without a training session or a call of fit"),
        ("raises", "failed (RuntimeError: the data is gone) before its training began"),
        ("exits", "ended itself before its training began (exit code 3)"),
        ("exits_with_text", "exit code 1"),
        ("syntax", "syntax.py has a syntax error in line 1"),
    ],
    indirect=["captured"],
)
def test_refusals_are_one_sentence(captured: Captured, sentence: str) -> None:
    assert sentence in captured.error
    assert captured.error.endswith(".")
    assert "\n" not in captured.error


@pytest.mark.parametrize(
    ("captured", "step"),
    [
        ("loop_keras", "Adam.apply_gradients"),
        ("loop_function", "SGD.apply_gradients"),
        ("loop_scaled", "SGD.apply_gradients"),
        ("loop_v1_optimizer", "AdamOptimizer.apply_gradients"),
        ("loop_tf_keras", "Adam.apply_gradients"),
        ("loop_tf_keras_legacy", "Adam.apply_gradients"),
        ("loop_tf_keras_on_batch", "Model.train_on_batch"),
        ("loop_by_hand", "Variable.assign_sub"),
        ("loop_by_hand_keras", "Variable.assign_sub"),
        ("loop_train_on_batch", "Model.train_on_batch"),
    ],
    indirect=["captured"],
)
def test_a_loop_of_its_own_is_one_plain_task_and_noticed_before_it_has_trained(captured: Captured, step: str) -> None:
    profile = captured.profile
    assert f"trains by {step} in a loop of its own; Dike distributes" in profile.why_alone
    assert (profile.api, profile.is_measurable, profile.batch_size) == (Api.LOOP, False, 0)
    assert sum(math.prod(one.shape) for one in profile.variables) == profile.parameters
    assert profile.parameters in (640, 650)
    assert "TRAINED" not in captured.prints


@pytest.mark.parametrize("captured", ["mirrored", "multi_worker_mirrored"], indirect=True)
def test_a_strategy_of_its_own_is_one_plain_task(captured: Captured) -> None:
    assert (captured.profile.api, captured.profile.parameters) == (Api.LOOP, 650)
    assert "trains under a tf.distribute strategy of its own" in captured.profile.why_alone


@script("keras_eagerly")
def test_what_no_cluster_does_but_one_process_is_read_and_one_plain_task(captured: Captured) -> None:
    assert (captured.profile.api, captured.profile.is_measurable, captured.profile.batch_size) == (Api.KERAS, True, 32)
    assert captured.profile.flops_step_per_sample > 0
    assert "run_eagerly=True" in captured.profile.why_alone


@pytest.mark.parametrize(
    ("captured", "can_split"),
    [("keras_arrays", True), ("keras_dataset", True), ("train_step_with_tape", True), ("keras_stateful", False)],
    indirect=["captured"],
)
def test_several_workers_may_share_the_batches_of_fit(captured: Captured, can_split: bool) -> None:
    assert captured.profile.can_split is can_split


@pytest.mark.parametrize("captured", ["slots_before_fit", "train_step_with_tape"], indirect=True)
def test_other_uses_of_tapes_and_optimizers_are_let_through(captured: Captured) -> None:
    assert captured.profile.parameters == 650


@script("v1_tape")
def test_an_optimizer_in_a_graph_only_adds_to_it(captured: Captured) -> None:
    assert "BUILT" in captured.prints


@pytest.mark.parametrize(
    ("captured", "gone", "instead"),
    [
        ("gone_estimator", "uses tf.estimator, which was removed in TensorFlow 2.16", "Model.fit"),
        ("gone_estimator_plain", "uses tf.estimator, which was removed in TensorFlow 2.16", "Model.fit"),
        ("gone_estimator_module", "uses tf.estimator, which was removed in TensorFlow 2.16", "Model.fit"),
        ("gone_contrib", "uses tf.contrib, which was removed in TensorFlow 2.0", "tf.keras"),
        ("gone_contrib_module", "uses tf.contrib, which was removed in TensorFlow 2.0", "tf.keras"),
        ("gone_layers", "uses tf.layers, which is in tf.compat.v1 alone since TensorFlow 2.0", "tf.keras.layers"),
        ("gone_layers_plain", "only with Keras 2 since TensorFlow 2.16", "TF_USE_LEGACY_KERAS=1"),
        ("gone_layers_top", "uses tf.layers, which is in tf.compat.v1 alone since TensorFlow 2.0", "tf.keras.layers"),
        (
            "gone_supervisor",
            "uses tf.train.Supervisor, which was removed in TensorFlow 2.0",
            "MonitoredTrainingSession",
        ),
        ("gone_session", "uses tf.Session, which was removed in TensorFlow 2.0", "tf.compat.v1.Session"),
        ("never_there", "never_there.py failed (AttributeError: module", "see above"),
    ],
    indirect=["captured"],
)
def test_what_tensorflow_no_longer_has(captured: Captured, gone: str, instead: str) -> None:
    assert gone in captured.error
    assert instead in captured.error[captured.error.index(gone) :]
    assert captured.error.endswith(".")
    assert "Traceback" in captured.prints


@script("raises")
def test_the_scripts_own_traceback_is_shown_as_python_shows_it(captured: Captured, folder: Path) -> None:
    trace = captured.prints[captured.prints.index("Traceback") :].splitlines()
    assert trace[1] == f'  File "{folder}/raises.py", line 8, in <module>'
    assert trace[-1] == "RuntimeError: the data is gone"
    assert "main_script" not in captured.prints


@script("syntax")
def test_a_syntax_error_is_shown_as_python_shows_it(captured: Captured, folder: Path) -> None:
    assert captured.prints.startswith(f'  File "{folder}/syntax.py", line 1')
    assert "SyntaxError" in captured.prints.splitlines()[-1]


@script("exits_with_text")
def test_the_text_of_an_exit_is_shown(captured: Captured) -> None:
    assert captured.prints.splitlines() == ["no data"]


@pytest.mark.parametrize(
    ("captured", "how"),
    [
        ("keras_untrainable", "trains nothing in its first call of fit"),
        ("keras_pairs", "trains by a train_step of its own, which Dike cannot read"),
    ],
    indirect=["captured"],
)
def test_a_fit_that_cannot_be_read_is_one_plain_task(captured: Captured, how: str) -> None:
    assert captured.profile.api is Api.LOOP
    assert how in captured.profile.why_alone


@pytest.mark.parametrize(
    ("captured", "counts", "needs_servers"),
    [
        ("v1_counts", True, False),
        ("v1_plain_session", True, False),
        ("v1_asks", False, False),
        ("v1_stops", False, False),
        ("v1_feeds", False, False),  # it asks for the step
        ("v1_sync_server", False, True),
    ],
    indirect=["captured"],
)
def test_what_several_workers_would_do_with_a_loop(captured: Captured, counts: bool, needs_servers: bool) -> None:
    assert (captured.profile.counts_own_steps, captured.profile.needs_servers) == (counts, needs_servers)
