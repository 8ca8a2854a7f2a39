"""A script with its own ClusterCoordinator loop."""

import json

import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = tf.Variable(0.0, name="total")
    vector = tf.Variable(tf.zeros([10]), name="vector")


@tf.function
def step(number):
    def replica(number):
        total.assign_add(number)
        vector.assign_add(tf.ones([10]))

    strategy.run(replica, args=(number,))


for number in range(20):
    coordinator.schedule(step, args=(tf.constant(float(number)),))
coordinator.join()
devices = {"total": total.device, "vector": vector.device}
print("RESULT", json.dumps({"total": float(total), "count": float(vector[0]), "devices": devices}), flush=True)
