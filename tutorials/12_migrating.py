# %% [markdown]
# # 12. Migrating
#
# This tutorial shows one script of plain `nnx.jit` and of scalax before and after, with equal
# losses. [Coming from another library](../migrating.md) has tables of corresponding names for these
# and seven other libraries.

# %%
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Debugging,
    Trainer,
    constrain,
    make_mesh,
    sharded_jit,
    simulate_devices,
    visualize,
)
from nnx_parallel.sharding import FSDPRules, annotate

simulate_devices(8)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(32, 256, rngs=rngs)
        self.down = nnx.Linear(256, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, 32) -> (batch, 32)
        return self.down(nnx.gelu(self.up(x)))


def loss(model, batch):
    return ((model(batch) - batch[:, ::-1]) ** 2).mean()


rng = np.random.default_rng(0)
batches = [rng.normal(size=(32, 32)).astype(np.float32) for _ in range(5)]

# %% [markdown]
# ## From `nnx.jit`: before
#
# This is the script of Flax's guide for several devices. To shard the parameters too, you would
# write the spec of each one into the model.

# %%
mesh = make_mesh({"data": None})
model = MLP(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
everywhere = NamedSharding(mesh, P())
for part in (model, optimizer):
    nnx.update(part, jax.device_put(nnx.state(part), everywhere))


@nnx.jit
def train_step(model, optimizer, batch):
    value, grads = nnx.value_and_grad(lambda model: loss(model, batch))(model)
    optimizer.update(model, grads)
    return value


before = []
for batch in batches:
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    before.append(float(train_step(model, optimizer, batch)))
print(np.array(before))

# %% [markdown]
# ## After
#
# Model and loss stay as they are. The mesh, the shardings, the step and the loop are gone, and the
# parameters are sharded.

# %%
trainer = Trainer(MLP, optax.adamw(1e-2), loss, strategy=FSDP(), loggers=())
after = trainer.fit(batches, num_steps=5)["loss"]
print(after)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
np.testing.assert_allclose(after, before, rtol=1e-5)

# %% [markdown]
# To keep your loop: `trainer.state, metrics = trainer.train_step(trainer.state, batch)`.
#
# ## From scalax
#
# scalax shards arrays by rules and leaves the step to you. `sharded_jit` does the same, and takes
# the rules in the same places. Here is the example of scalax's README.

# %%
graphdef, start = nnx.split(MLP(nnx.Rngs(0)))
tx = optax.adamw(1e-2)


@sharded_jit(
    mesh=make_mesh({"fsdp": None}),
    in_shardings=(FSDPRules(), None),
    out_shardings=(FSDPRules(), None),
    constrain_args=(FSDPRules(), P("fsdp")),
    annotations={"weights": FSDPRules(), "activations": P("fsdp")},
)
def readme_step(train_state, batch):
    def objective(params):
        params = annotate(params, "weights")
        model = nnx.merge(graphdef, params)
        hidden = annotate(nnx.gelu(model.up(batch)), "activations")
        return ((model.down(hidden) - batch[:, ::-1]) ** 2).mean()

    value, grads = jax.value_and_grad(objective)(train_state["params"])
    grads = constrain(grads, FSDPRules())
    updates, opt = tx.update(grads, train_state["opt"], train_state["params"])
    params = optax.apply_updates(train_state["params"], updates)
    return {"params": params, "opt": opt}, {"loss": value}


params = nnx.to_pure_dict(start)
train_state = {"params": params, "opt": tx.init(params)}
readme = []
for batch in batches:
    train_state, metrics = readme_step(train_state, batch)
    readme.append(float(metrics["loss"]))
print(np.array(readme))

# %% [markdown]
# The optimizer's moments are sharded like their parameters:

# %%
moment = train_state["opt"][0].mu["up"]["kernel"]
print(moment.sharding.spec)
visualize(moment)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
np.testing.assert_allclose(readme, before, rtol=1e-5)
assert moment.sharding.spec == P(None, "fsdp")

# %% [markdown]
# `sharded_jit` returns a function with `lower`, `trace` and `eval_shape`, as `jax.jit` does. Using
# a donated array raises a named error.
#
# One habit has to change: do not think of one device at a time. `loss` gets the global batch, or a
# global microbatch, and its mean is the mean over all rows. Only the loading of data depends on the
# process.
#
# ## Exercise
#
# Take one of your training scripts, and write its loss as `loss(model, batch)`. First run it on 8
# simulated devices with `Debugging(fast_dev_run=True)`. Then compare five losses with the
# original's.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
# This is the answer for the script above. In your script, replace model, optimizer, loss and batches.
smoke = Trainer(
    MLP,
    optax.adamw(1e-2),
    loss,
    strategy=FSDP(),
    loggers=(),
    debugging=Debugging(fast_dev_run=True),
)
smoke.fit(batches, num_steps=5)
assert smoke.step == 2
full = Trainer(MLP, optax.adamw(1e-2), loss, strategy=FSDP(), loggers=())
np.testing.assert_allclose(full.fit(batches, num_steps=5)["loss"], before, rtol=1e-5)
print("equal")
