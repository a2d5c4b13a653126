# %% [markdown]
# # 12. Migrating
#
# This tutorial is for users of plain `nnx.jit`, scalax, DistJax, PyTorch's FSDP and Lightning. It
# first shows one script before and after, with equal losses. Then it has a table of corresponding
# names for each library.

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
# This is the script of Flax's guide for several devices. It makes a mesh, shards each
# batch by hand, and calls `nnx.jit` with model and optimizer. The result is data
# parallelism. To shard the parameters too, you would write the spec of each one into
# the model.

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
# Model and loss stay as they are. The mesh, the shardings, the step and the loop are gone. The
# parameters are sharded now, because the strategy is `FSDP()`.

# %%
trainer = Trainer(MLP, optax.adamw(1e-2), loss, strategy=FSDP(), loggers=())
after = trainer.fit(batches, num_steps=5)["loss"]
print(after)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
np.testing.assert_allclose(after, before, rtol=1e-5)

# %% [markdown]
# The Trainer's step is `jax.jit` over pure state, built once. `nnx.jit` traverses the
# model in Python at each call, and this takes longer for a larger model: see the
# [benchmarks](../benchmarks.md).
#
# To keep your loop: `trainer.state, metrics = trainer.train_step(trainer.state, batch)`.
#
# ## From scalax
#
# scalax shards arrays by rules and leaves the step to you. `sharded_jit` does the same, and takes the
# rules in the same places. Here is the example of scalax's README, line by line. FSDP shards the
# state, the batch is split when it arrives, and intermediate values are placed by rules or names.

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
# `sharded_jit` returns a function with `lower`, `trace` and `eval_shape`, as `jax.jit` does. It takes
# keyword arguments and compiles methods. Using a donated array raises a named error.
#
# | scalax | here |
# |---|---|
# | `MeshShardingHelper([-1], ["fsdp"])` | `make_mesh({"fsdp": None})` |
# | `mesh.sjit(f, in_shardings=, out_shardings=)` | `sharded_jit(f, mesh, in_shardings=, out_shardings=)` |
# | `args_sharding_constraint=` | `constrain_args=` |
# | `annotation_shardings=` | `annotations=` |
# | `static_argnums=`, `donate_argnums=` | the same, or `static_argnames=`, `donate_argnames=` |
# | `with_sharding_annotation(x, name)` | `annotate(x, name)` |
# | `get_global_mesh()` | `active_mesh()` |
# | `with_sharding_constraint(x, rule)` | `constrain(x, rule)` |
# | `FSDPShardingRule(min_fsdp_size=2**20)`, the default | `FSDPRules(min_size=2**20)`; the default is 1,024 |
# | `TreePathShardingRule((regex, spec), ...)`, strict | `PathRules((regex, spec), ..., strict=True)`; by default a warning lists the arrays that no regex matches |
# | a path `up/kernel` | `up.kernel`: write `\.` where a regex had `/` |
# | `PolicyShardingRule(lambda path, leaf: spec)` | `PolicyRules(lambda info: spec)`, with `info.path`, `info.shape` and `info.dtype` |
# | `mesh.match_sharding_rule(rule, tree)` | `resolve_shardings(tree, rule, mesh)` |
# | `mesh.make_shard_and_gather_fns(tree, rule)` | `shard(tree, rule, mesh)`, `gather(tree)` |
# | `mesh.local_data_to_global_array(batch)` | `process_local_to_global(batch, mesh)` |
# | `float_to_dtype(tree, "bf16")`, `get_float_dtype_by_name` | `cast_floating(tree, "bf16")`, `Precision(compute="bf16")` |
# | `named_tree_map(f, tree, sep="/")` | `named_tree_map(f, tree, separator="/")` |
# | `JaxRNG` | `nnx.Rngs` |
#
# ## From DistJax's linen modules
#
# DistJax wraps modules in `shard_map`: each layer knows its mesh axis, and calls the collective
# itself. Here a layer stays as it is for one device, and its dims get names.
#
# | DistJax | here |
# |---|---|
# | `shard_map` around the training step, `sync_gradients` | nothing: the Trainer's step is written for global arrays |
# | `shard_module_params(Module, axis_name="data")` | `strategy=FSDP()` |
# | `ModelParallelismWrapper`, `TPDense` | `layers.Dense({"embed": 64}, {"mlp": 256}, rngs=rngs)`, or names on a stock layer; `TensorParallel(n)` |
# | async TP: a ring in the module | `TensorParallel(n, overlap="ring")` |
# | `PipelineModule` | `layers.Stack` in the model, `Pipeline(n)` |
# | `fold_rng_over_axis` | nothing: dropout draws the same masks under every strategy |
# | `accumulate_gradients` | `Trainer(num_microbatches=)` |
# | linen `module.init`, `module.apply(params, x)` | NNX: `Module(rngs=...)`, `module(x)` |
#
# ## From PyTorch FSDP and Lightning
#
# | PyTorch, Lightning | here |
# |---|---|
# | `DistributedDataParallel`, `strategy="ddp"` | `DataParallel()` |
# | `fully_shard(model)`, `strategy="fsdp"` | `FSDP()` |
# | ZeRO stage 1, 2, 3 | `FSDP(shard="optimizer")`, `"gradients"`, `"params"` |
# | `HYBRID_SHARD` | `Composite(DataParallel(2), FSDP())` |
# | `SHARD_GRAD_OP`, `reshard_after_forward=False` | the nearest is `FSDP(shard="gradients")`: its parameters stay replicated between steps too |
# | `fully_shard` of each block, `auto_wrap_policy` | nothing: a `Stack` gathers one layer at a time, other modules each array where it is used |
# | `backward_prefetch`, `set_modules_to_forward_prefetch` | `FSDP(prefetch="first")` |
# | a model on the `meta` device | `model=` is a function: its arrays are initialized in shards |
# | `full_tensor()`, `summon_full_params` | arrays are global: `np.asarray(x)`; with several processes `gather` |
# | `init_device_mesh` | the strategy builds it; `strategy.make_mesh()` |
# | `ColwiseParallel`, `RowwiseParallel` | names `embed`, `mlp`, `heads` in the model; `TensorParallel(n)` |
# | `SequenceParallel` | `TensorParallel(n, sequence=True)` |
# | `ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B` | `Pipeline(n, GPipe())`, `OneFOneB()`, `Interleaved(chunks=)` |
# | `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble` | the nearest is `ZeroBubble()`: ZB-H1, one chunk a stage |
# | `LightningModule.training_step` | the `loss` function |
# | `self.log("accuracy", ...)` | `return loss, {"accuracy": ...}` |
# | `configure_optimizers`, schedulers, `gradient_clip_val=1.0` | Optax: `optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))` |
# | `Trainer.fit(model, datamodule)` | `Trainer(...).fit(batches, num_steps=)` |
# | `max_steps=`, `max_epochs=` | `fit(..., num_steps=)` or `num_epochs=`: the total of the run |
# | `val_dataloaders`, `val_check_interval=` | `fit(..., eval_data=, eval_every=)` |
# | `DistributedSampler` | one process yields the global batch; with several, each process yields its rows (`trainer.data_share`) |
# | `accumulate_grad_batches=` | `num_microbatches=` (of one batch, not more batches) |
# | `precision="bf16-mixed"` | `precision=Precision.mixed_bfloat16()` |
# | `ModelCheckpoint`, `ckpt_path="last"` | `checkpoint="directory"`; `fit` resumes automatically |
# | `EarlyStopping` | `EarlyStopping`, a `Callback` |
# | `SyncBatchNorm` | nothing: statistics cover all rows of a microbatch |
# | `if dist.get_rank() == 0: print(...)` | `print_once(...)`; metrics and checkpoints need nothing |
# | `torchrun`, `num_nodes=` | `initialize()` in the script, `python -m nnx_parallel launch` |
# | `activation_checkpointing` | `remat="full"` |
# | `CPUOffload` | `Offload()`: the optimizer's state, not the parameters |
# | `context_parallel` | `ContextParallel(n)` |
# | float8 | not here |
#
# One habit has to change: do not think of one device at a time. `loss` gets the global batch, or a global
# microbatch, and its mean is the mean over all rows. Only the loading of data depends on the
# process.
#
# ## Exercise
#
# Take one of your training scripts, and write its loss as `loss(model, batch)`. First run it on 8
# simulated devices with `Debugging(fast_dev_run=True)`, which takes two steps as a test. Then compare
# five losses with the original's.

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
