# %% [markdown]
# # 2. Data parallel, on real images
#
# The oldest strategy: every device has a replica of the model, each processes a part of the
# batch, and the gradients are averaged. The point of this page: it computes *the same numbers*
# as one device. We check that on scikit-learn's handwritten digits.

# %%
import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from nnx_parallel import DataParallel, Trainer, audit, simulate_devices, visualize

simulate_devices(8)

# %% [markdown]
# ## Data
#
# 1,797 images of 8 by 8 pixels. A batch is a dict of NumPy arrays with all 256 rows of a
# step; the library distributes the rows.

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
# Plain Flax NNX. Nothing here depends on the number of devices.


# %%
class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        # No bias: the norm after it would subtract it again.
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
assert accuracy > 0.95

# %% [markdown]
# ## The same on one device
#
# Same seed, same batches. The losses of 120 steps agree up to the order in which
# floating-point numbers are added.

# %%
one = make_trainer(DataParallel(), devices=jax.devices()[:1])
alone = one.fit(batches(num_epochs=20), num_steps=120)
difference = np.abs(history["loss"] / alone["loss"] - 1)
print(f"largest relative difference over 20 steps: {difference[:20].max():.1e}")
print(f"and over 120:                              {difference.max():.1e}")
assert difference[:20].max() < 1e-4

# %% [markdown]
# Even `BatchNorm` agrees, which is not obvious: its mean and variance are those of all 256
# rows, although each device holds 32. In frameworks that run a copy of the program on each
# device they would be those of 32 rows, unless the norm is synchronized explicitly.

# %%
means = [np.asarray(trainer.model.norm.mean) for trainer in (eight, one)]
np.testing.assert_allclose(*means, atol=1e-3)

# %% [markdown]
# ## Where the arrays live
#
# The batch is sharded by rows; a device gets 32 images.

# %%
batch = eight.shard_batch(next(batches(1)))
visualize(batch["label"])

# %% [markdown]
# The parameters are replicated, and so is the optimizer state. That is the price: memory per
# device does not fall with more devices.

# %%
kernel = eight.model.head.kernel
assert kernel.sharding.is_fully_replicated
print(eight.describe().summary())

# %% [markdown]
# ## Communication
#
# The gradient of a mean over rows is the mean of the gradients of the devices' rows. So each
# device works independently until its gradients are computed. Then one all-reduce adds them: as
# many bytes as the parameters, whatever the batch size. (The statistics of the norm are
# all-reduced too, and are small.)

# %%
report = audit(eight.train_step.lower(eight.state, batch).compile())
param_bytes = sum(x.nbytes for x in jax.tree.leaves(eight.state.params))
print(
    f"parameters: {param_bytes:,} bytes, all-reduced: {report.bytes('all-reduce'):,} bytes"
)
assert {each.kind for each in report.collectives} == {"all-reduce"}
assert param_bytes <= report.bytes("all-reduce") < param_bytes + 2_000

# %% [markdown]
# So a larger batch hides the cost of communication: compute grows with the rows, the
# communication volume does not.
#
# ## Exercise
#
# Compute the gradient by hand on each eighth of a batch, average the eight, and compare it
# with the gradient of the full batch. Remove the `BatchNorm` first. Then put it back, and explain
# the difference.
