"""The ten steps of same_torch.py in JAX, once for each RANK of WORLD_SIZE: same_jax.py start.npz out.npz."""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

LAYERS = 2


def compute_loss(weights, images, labels):
    """The network of same_torch.py as a function of its weights, which have torch's names and shapes."""
    x = images
    for number in range(LAYERS):
        conv, norm = f"{3 * number}.weight", f"{3 * number + 1}."
        x = lax.conv_general_dilated(x, weights[conv], (2, 2), [(1, 1), (1, 1)])
        mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        scale, shift = (weights[norm + key].reshape(1, -1, 1, 1) for key in ("weight", "bias"))
        x = jax.nn.relu((x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift)
    logits = x.mean((2, 3)) @ weights["8.weight"].T + weights["8.bias"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def step(weights, velocity, images, labels):
    """One step of SGD with momentum, on each device's share of the batch."""
    loss, gradients = jax.value_and_grad(compute_loss)(weights, images, labels)
    gradients = lax.pmean(gradients, "rank")  # JAX's all-reduce: psum, divided by the number of devices
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
    weights = jax.tree.map(lambda w, v: w - 0.05 * v, weights, velocity)
    return weights, velocity, loss[None]


def train(start, dtype):
    """Takes a step with each batch of all ranks; returns rank 0's losses, and the weights at the end."""
    rank, mesh = jax.process_index(), jax.make_mesh((jax.device_count(),), ("rank",))
    every, share = PartitionSpec(), PartitionSpec("rank")
    specs = {"in_specs": (every, every, share, share), "out_specs": (every, every, share)}
    # check_vma=False: otherwise grad itself adds up over all devices, for weights that all share.
    take = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))

    def spread(own):
        """A global array, of which this process has its own share."""
        return jax.make_array_from_process_local_data(NamedSharding(mesh, share), own)

    weights = {name: jnp.asarray(one, dtype) for name, one in start.items() if name[0].isdigit()}
    velocity = jax.tree.map(jnp.zeros_like, weights)
    losses = []
    for images, labels in zip(start[f"images{rank}"], start[f"labels{rank}"], strict=True):
        batch = spread(images.astype(dtype)), spread(labels)
        weights, velocity, loss = take(weights, velocity, *batch)
        losses.append(loss.addressable_shards[0].data.item())
    return {"losses": losses} | {name: np.asarray(one) for name, one in weights.items()}


def main():
    """Meets the other processes, trains in float32 and in float64; process 0 writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("start", help="first weights, and the batches of each rank")
    parser.add_argument("out", help="for losses and weights")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # else JAX makes float32 of what is float64
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    # Process 0 listens there for the others: without the last argument, on all addresses of its machine.
    jax.distributed.initialize(place, size, rank, coordinator_bind_address=place)
    start = np.load(args.start)
    found = {f"{name}/{key}": one for name in ("float32", "float64") for key, one in train(start, name).items()}
    if jax.process_index() == 0:
        np.savez(args.out, **found)


if __name__ == "__main__":
    main()
