"""The ten steps of same_torch.py in TensorFlow, a worker per RANK: same_tensorflow.py start.npz out.npz CONFIGS."""

import argparse
import os

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}  # TensorFlow reads these at its import

import numpy as np
import tensorflow as tf
from keras import Sequential, config, layers


def build(padding, epsilon):
    """The network of same_torch.py; ``padding="torch"`` is a border of one pixel on each side."""
    stack = []
    for channels in (16, 32):
        if padding == "torch":
            stack += [layers.ZeroPadding2D(1)]
        own = {"padding": "valid" if padding == "torch" else padding, "use_bias": False}
        stack += [layers.Conv2D(channels, 3, strides=2, **own)]
        stack += [layers.BatchNormalization(epsilon=epsilon), layers.ReLU()]
    return Sequential([layers.Input((32, 32, 3)), *stack, layers.GlobalAveragePooling2D(), layers.Dense(10)])


def to_keras(array):
    """A convolution's weights are (out, in, height, width) in torch, and a linear layer's (out, in)."""
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T


def to_torch(array):
    """The way back."""
    return array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T


def train(start, strategy, rank, dtype="float32", padding="torch", epsilon=1e-5):
    """Takes a step with each batch of this worker, which has one device; returns losses, and weights at the end."""
    config.set_dtype_policy(dtype)
    names = [name for name in start.files if name[0].isdigit()]
    with strategy.scope():
        model = build(padding, epsilon)
        variables = model.trainable_variables  # in torch's order
        for variable, name in zip(variables, names, strict=True):
            variable.assign(to_keras(start[name]).astype(dtype))
        velocity = [tf.Variable(tf.zeros_like(one.value)) for one in variables]

    def step(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, variables)
        # By hand, like the step: a Keras optimizer would add the gradients up over all workers, and not average.
        gradients = tf.distribute.get_replica_context().all_reduce("MEAN", gradients)
        for variable, v, gradient in zip(variables, velocity, gradients, strict=True):
            v.assign(0.9 * v + gradient)
            variable.value.assign_sub(0.05 * v)
        return loss

    take = tf.function(lambda images, labels: strategy.run(step, (images, labels)))
    images = start[f"images{rank}"].astype(dtype).transpose(0, 1, 3, 4, 2)  # channels last
    losses = [float(take(*map(tf.constant, batch))) for batch in zip(images, start[f"labels{rank}"], strict=True)]
    return {"losses": losses} | {n: to_torch(v.numpy()) for n, v in zip(names, variables, strict=True)}


def main():
    """Meets the other workers, trains as torch does, and in TensorFlow's own way; worker 0 writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("start", help="first weights, and the batches of each rank")
    parser.add_argument("out", help="for losses and weights")
    parser.add_argument("configs", nargs="+", help="the text of TF_CONFIG of each worker")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    os.environ["TF_CONFIG"] = args.configs[rank]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    start = np.load(args.start)
    ways = {"float32": {}, "float64": {"dtype": "float64"}}
    ways |= {"padding": {"padding": "same"}, "epsilon": {"epsilon": 1e-3}}
    found = {}
    for way, how in ways.items():
        found |= {f"{way}/{key}": one for key, one in train(start, strategy, rank, **how).items()}
    if rank == 0:
        np.savez(args.out, **found)


if __name__ == "__main__":
    main()
