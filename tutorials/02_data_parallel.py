# %% [markdown]
# # 2. Data parallel, on real images
#
# Data parallelism is the oldest strategy. Every device has a replica of the model, processes a part
# of the batch, and averages its gradients with the gradients of the other devices. The result is *the same
# numbers* as on one device. This tutorial checks that on scikit-learn's handwritten digits.

# %%
import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from nnx_parallel import (
    DataParallel,
    Trainer,
    audit,
    simulate_devices,
    visualize,
)

simulate_devices(8)

# %% [markdown]
# ## Data
#
# The data are 1,797 images of 8 by 8 pixels. A batch is a dict of NumPy arrays with all 256 rows of
# a step. The library distributes the rows over the devices.

# %%
digits = load_digits()
images = (digits.images / 16).astype(np.float32)[..., None]  # (1797, 8, 8, 1)
order = np.random.default_rng(0).permutation(len(images))
train, test = order[:1536], order[1536:]


def batches(num_epochs, rows=256):
    rng = np.random.default_rng(1)
    for _ in range(num_epochs):
        shuffled = rng.permutation(train)
        for start in range(0, len(train), rows):
            chosen = shuffled[start : start + rows]
            yield {"image": images[chosen], "label": digits.target[chosen]}


held_out = [{"image": images[test], "label": digits.target[test]}]

# %% [markdown]
# ## Model and loss
#
# Model and loss are plain Flax NNX. Nothing in them depends on the number of devices.


# %%
class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        # There is no bias, because the norm after it would subtract the bias again.
        self.conv = nnx.Conv(1, 32, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))  # (batch, 8, 8, 32)
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))  # (batch, 4, 4, 32)
        return self.head(x.reshape(x.shape[0], -1))  # (batch, 10)


def loss(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


# %% [markdown]
# ## Train on eight devices


# %%
def make_trainer(strategy, **options):
    return Trainer(
        CNN, optax.adamw(3e-3), loss, strategy=strategy, loggers=(), **options
    )


eight = make_trainer(DataParallel())
history = eight.fit(batches(num_epochs=20), num_steps=120)
accuracy = eight.evaluate(held_out)["accuracy"]
print(
    f"loss {history['loss'][0]:.3f} -> {history['loss'][-1]:.3f}, test accuracy {accuracy:.1%}"
)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert accuracy > 0.95

# %% [markdown]
# ## Train on one device
#
# The next run has the same seed and the same batches. Its losses differ only by rounding, because
# floating-point numbers are added in another order.

# %%
one = make_trainer(DataParallel(), devices=jax.devices()[:1])
alone = one.fit(batches(num_epochs=20), num_steps=120)
difference = np.abs(history["loss"] / alone["loss"] - 1)
print(f"largest relative difference over 20 steps: {difference[:20].max():.1e}")
print(f"and over 120:                              {difference.max():.1e}")

# %% [markdown]
# Even `BatchNorm` agrees, which is not obvious. Its mean and variance cover all 256 rows,
# although each device holds 32. In frameworks that run a copy of the program on each device, they
# would cover 32 rows, unless the norm is synchronized explicitly.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert difference[:20].max() < 1e-4
means = [np.asarray(trainer.model.norm.mean) for trainer in (eight, one)]
np.testing.assert_allclose(*means, atol=1e-3)

# %% [markdown]
# ## Where the arrays live
#
# The batch is sharded by rows. Each device gets 32 of the 256 images:

# %%
batch = eight.shard_batch(next(batches(1)))
visualize(batch["label"])

# %% [markdown]
# The parameters and the optimizer state are replicated. This is the price of data parallelism: more
# devices do not reduce the memory that each device needs.

# %%
kernel = eight.model.head.kernel
visualize(kernel)

# %%
print(eight.describe().summary())

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert kernel.sharding.is_fully_replicated

# %% [markdown]
# ## Communication
#
# Each device computes the gradients of its rows without any communication. The gradient of the
# whole batch is their mean, which an all-reduce computes. The all-reduce has as many bytes as the
# parameters, whatever the batch size. (The statistics of the norm are all-reduced too, but are
# small.)

# %%
report = audit(eight.train_step.lower(eight.state, batch).compile())
param_bytes = sum(x.nbytes for x in jax.tree.leaves(eight.state.params))
print(
    f"parameters: {param_bytes:,} bytes, all-reduced: {report.bytes('all-reduce'):,} bytes"
)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert {each.kind for each in report.collectives} == {"all-reduce"}
assert param_bytes <= report.bytes("all-reduce") < param_bytes + 2_000

# %% [markdown]
# So a larger batch hides the cost of communication: the computation grows with the number of rows,
# and the communication volume does not.
#
# ## Exercise
#
# Compute the gradient on each eighth of a batch by hand, average the eight gradients, and compare
# the average with the gradient of the full batch. Remove the `BatchNorm` first. Then put it back,
# and explain the difference.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
batch = next(batches(1))
eighths = [jax.tree.map(lambda x, i=i: x[i::8], batch) for i in range(8)]


def largest_difference(model):
    gradient = nnx.grad(lambda model, batch: loss(model, batch)[0])
    full = gradient(model, batch)
    parts = [gradient(model, eighth) for eighth in eighths]
    average = jax.tree.map(lambda *each: sum(each) / 8, *parts)
    apart = jax.tree.map(lambda a, b: abs(a - b).max(), average, full)
    return max(jax.tree.leaves(apart))


class NoNorm(CNN):
    def __call__(self, x):
        x = nnx.relu(self.conv(x))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.head(x.reshape(x.shape[0], -1))


without = largest_difference(NoNorm(nnx.Rngs(0)))
with_norm = largest_difference(CNN(nnx.Rngs(0)))
print(f"without the norm {without:.1e}, with it {with_norm:.1e}")
# A norm sees the mean and variance of 32 rows in an eighth, and of 256 rows in the full batch. So
# the gradients of eighths belong to another function, unless the statistics are shared.
assert without < 1e-5 < with_norm
