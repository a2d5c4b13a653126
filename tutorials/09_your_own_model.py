# %% [markdown]
# # 9. Bring your own: model, rules, training step
#
# The library has few layers, and requires none of them. This tutorial shards a stock Flax model in
# four ways: unchanged, with names in the model, with rules from outside, and with a training step
# that you write. [Tutorial 13](13_your_transformer.py) does the same for a transformer, with a
# pipeline.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Composite,
    TensorParallel,
    Trainer,
    constrain,
    errors,
    make_mesh,
    shard,
    sharded_jit,
    simulate_devices,
    visualize,
)
from nnx_parallel.sharding import ChainRules, FSDPRules, PathRules

simulate_devices(8)

# %% [markdown]
# ## A model as it is
#
# `FSDP` needs no help with a model: it may shard any dim that its axis divides.


# %%
class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(32, 256, rngs=rngs)
        self.down = nnx.Linear(256, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, 32) -> (batch, 32)
        return self.down(nnx.gelu(self.up(x)))


def loss(model, batch):
    return ((model(batch) - batch[:, ::-1]) ** 2).mean()  # learn to reverse a row


rng = np.random.default_rng(0)
batches = [rng.normal(size=(32, 32)).astype(np.float32) for _ in range(5)]


def train(model, strategy):
    trainer = Trainer(model, optax.adamw(1e-2), loss, strategy=strategy, loggers=())
    return trainer, trainer.fit(batches, num_steps=5)["loss"]


plain, expected = train(MLP, FSDP())
print(expected)

# %%
visualize({name: plain.state.params[name]["kernel"] for name in ("up", "down")})

# %%
for row in plain.describe().rows:
    print(f"{row.info.path:12} {row.placement.stored!s:18} {row.placement.reason}")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert not plain.state.params["up"]["kernel"].sharding.is_fully_replicated

# %% [markdown]
# Tensor parallelism needs to know more. It shards matmuls, and only the model knows
# which dims a matmul contracts. Names or rules pass this knowledge on.
#
# ## Names in the model
#
# Flax can store a name for each dim in the metadata of a parameter. A name gives the dim's meaning,
# not where it is placed, so the model still mentions no mesh. `constrain` names the dims of an
# activation; outside of a strategy it does nothing.


# %%
def named(*names):
    init = nnx.initializers.lecun_normal()
    return nnx.with_partitioning(init, names, eager_sharding=False)


class NamedMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(32, 256, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(256, 32, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = constrain(nnx.gelu(self.up(x)), "batch", "mlp")
        return constrain(self.down(hidden), "batch", "embed")


both = Composite(FSDP(4), TensorParallel(2))
with_names, losses = train(NamedMLP, both)
print(losses)

# %%
visualize({name: with_names.state.params[name]["kernel"] for name in ("up", "down")})

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
np.testing.assert_allclose(losses, expected, rtol=1e-5)
# Outside of a strategy the model is unchanged.
x = jnp.ones((2, 32))
np.testing.assert_array_equal(NamedMLP(nnx.Rngs(0))(x), MLP(nnx.Rngs(0))(x))

# %% [markdown]
# ## Rules
#
# A model that you cannot change gets its shardings by rules. A rule has a regular expression for the
# path of an array, and a spec. Rules take precedence over names, and names over FSDP's choice.
# FSDP adds nothing to an array that a rule matches, so the specs below mention both axes. All other
# arrays are left to FSDP.

# %%
rules = PathRules(
    (r"up\.kernel", P("fsdp", "tensor")),
    (r"up\.bias", P("tensor")),
    (r"down\.kernel", P("tensor", "fsdp")),
)
with_rules, losses = train(MLP, Composite(FSDP(4), TensorParallel(2), rules=(rules,)))
print(losses)

# %%
for row in with_rules.describe().rows:
    print(f"{row.info.path:12} {row.placement.stored!s:26} {row.placement.reason}")

# %% [markdown]
# The kernels have the shardings that the names gave them.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
np.testing.assert_allclose(losses, expected, rtol=1e-5)
for name in ("up", "down"):
    by_rule, by_name = (
        t.state.params[name]["kernel"] for t in (with_rules, with_names)
    )
    assert by_rule.sharding == by_name.sharding

# %% [markdown]
# ## Your training step
#
# If you write the loop, call `trainer.train_step`, the compiled step. You can also
# write the step yourself, in any library, and use only the shardings: `sharded_jit` is
# `jax.jit` that takes rules in place of shardings. The state below is a plain dict.

# %%
mesh = make_mesh({"fsdp": None})
graphdef, start = nnx.split(MLP(nnx.Rngs(0)))
tx = optax.adamw(1e-2)
params = nnx.to_pure_dict(start)
state = {"params": params, "opt": tx.init(params)}
placed = ChainRules(PathRules((r"bias", P())), FSDPRules(min_size=0))


@sharded_jit(
    mesh=mesh,
    in_shardings=(placed, P("fsdp")),  # state by rules, batch by rows
    out_shardings=(placed, None),
    donate_argnames="state",
)
def step(state, batch):
    def objective(params):
        return loss(nnx.merge(graphdef, params), batch)

    value, grads = jax.value_and_grad(objective)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


state = shard(state, placed, mesh)
losses = []
for batch in batches:
    state, value = step(state, batch)
    losses.append(float(value))
print(np.array(losses))

# %% [markdown]
# The optimizer's moments are sharded like their parameters, since the rules match their paths too,
# such as `opt.0.mu.up.kernel`:

# %%
kernel, moment = state["params"]["up"]["kernel"], state["opt"][0].mu["up"]["kernel"]
visualize(moment)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
np.testing.assert_allclose(losses[0], expected[0], rtol=1e-4)
assert kernel.sharding == moment.sharding
assert kernel.addressable_shards[0].data.size * 8 == kernel.size

# %% [markdown]
# ## Exercise
#
# Add a third `nnx.Linear` to `MLP`, and make the rules strict: `PathRules(..., strict=True)`. Read
# the error, and complete the rules.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
class Deeper(MLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.last = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.last(super().__call__(x))


strict = PathRules(*rules.pairs, strict=True)
try:
    Composite(FSDP(4), TensorParallel(2), rules=(strict,)).describe(Deeper)
except errors.UnmatchedRuleError as error:
    print(error)
else:
    raise AssertionError("no error")

# The last pair matches all remaining arrays.
strict = PathRules(*rules.pairs, (r"down\.bias|last", P()), strict=True)
described = Composite(FSDP(4), TensorParallel(2), rules=(strict,)).describe(Deeper)
assert {row.info.path for row in described.replicated} >= {"last.kernel", "last.bias"}
