"""A TensorFlow 1 script as people write it for one machine: MODE LAST_STEP."""

import json
import os
import sys

import data
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
mode, last_step = sys.argv[1], int(sys.argv[2])
width = int(os.environ.get("WIDTH", "16"))
x = tf.placeholder(tf.float32, [None, 32])
y = tf.placeholder(tf.int32, [None])
with tf.device("/job:ps/task:0"):  # the plan knows better
    hidden_weights = tf.get_variable("hidden/weights", [32, width], initializer=tf.glorot_uniform_initializer(seed=1))
hidden_bias = tf.get_variable("hidden/bias", [width], initializer=tf.zeros_initializer())
hidden = tf.nn.relu(tf.matmul(x, hidden_weights) + hidden_bias)
weights = tf.get_variable("output/weights", [width, 10], initializer=tf.glorot_uniform_initializer(seed=2))
bias = tf.get_variable("output/bias", [10], initializer=tf.zeros_initializer())
logits = tf.matmul(hidden, weights) + bias
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
accuracy, update_accuracy = tf.metrics.accuracy(y, tf.argmax(logits, 1))
step = tf.train.get_or_create_global_step() if mode != "stepless" else None
optimizer = tf.train.AdamOptimizer(0.01)
hooks = [tf.train.StopAtStepHook(last_step=last_step)] if step is not None else []
if mode == "synchronous":
    optimizer = tf.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=1)
    hooks.append(optimizer.make_session_run_hook(is_chief=True))
train = optimizer.minimize(loss, global_step=step)
inputs, labels = data.samples(2000)
test_inputs, test_labels = data.samples(500, seed=1)
random = np.random.RandomState(os.getpid())
losses = []
measured = None


def batch():
    chosen = random.randint(0, len(inputs), 64)
    return {x: inputs[chosen], y: labels[chosen]}


if mode == "supervisor":
    tf.train.Supervisor(logdir="here")
elif mode == "stepless":
    with tf.train.MonitoredTrainingSession() as session:
        first = 0
        while len(losses) < last_step:
            losses.append(float(session.run([loss, train], batch())[0]))
elif mode in ("plain", "finetune"):
    with tf.Session() as session:
        if mode == "finetune":
            saver = tf.train.Saver()
            saver.restore(session, os.environ["PRETRAINED"])
            session.run(tf.local_variables_initializer())
        else:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        first = int(session.run(step))
        while session.run(step) < last_step:
            _, value = session.run([train, loss], batch())
            losses.append(float(value))
        session.run(update_accuracy, {x: test_inputs, y: test_labels})
        measured = float(session.run(accuracy))
else:
    scaffold = tf.train.Scaffold(saver=tf.train.Saver(max_to_keep=3)) if mode == "scaffold" else None
    with tf.train.MonitoredTrainingSession("", True, "elsewhere", scaffold, hooks) as session:
        first = int(session.run_step_fn(lambda step_context: step_context.session.run(step)))
        while not session.should_stop():
            value, _ = session.run([loss, train], batch())
            losses.append(float(value))
            if len(losses) == 5:
                session.run(update_accuracy, {x: test_inputs, y: test_labels})
                measured = float(session.run(accuracy))
print(
    "RESULT",
    json.dumps(
        {
            "first_step": first,
            "own_steps": len(losses),
            "losses": [losses[0], float(np.mean(losses[-5:]))] if losses else [],
            "accuracy": measured,
            "accuracy_devices": sorted(
                {variable.device for variable in tf.local_variables() if "accuracy" in variable.name}
            ),
            "replicas": getattr(optimizer, "_replicas_to_aggregate", None),
        }
    ),
    flush=True,
)
