# %% [markdown]
# # 12. Migrating
#
# From plain `nnx.jit`, from scalax, from DistJax, from PyTorch's FSDP and Lightning. First one
# script before and after, with equal losses. Then the names side by side.

# %%
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    FSDPRules,
    Trainer,
    make_mesh,
    sharded_jit,
    simulate_devices,
)

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
# Flax's guide for several devices: a mesh, a batch placed by hand, and `nnx.jit` over model and
# optimizer. This is data parallel. For more, each parameter's spec is written into the model.

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
# The model and the loss stay. The mesh, the placement, the step and the loop go. And the
# parameters are sharded now, which took one word.

# %%
trainer = Trainer(MLP, optax.adamw(1e-2), loss, strategy=FSDP(), loggers=())
after = trainer.fit(batches, num_steps=5)["loss"]
print(after)
np.testing.assert_allclose(after, before, rtol=1e-5)

# %% [markdown]
# The step underneath is `jax.jit` over pure state, built once; `nnx.jit` walks the model in
# Python at each call. How much that is depends on the size of the model:
# see the [benchmarks](../benchmarks.md).
#
# To keep your loop: `trainer.state, metrics = trainer.train_step(trainer.state, batch)`.
#
# ## From scalax
#
# scalax places arrays by rules and leaves the step to you. So does `sharded_jit`; the rules go
# where they went.

# %%
graphdef, start = nnx.split(MLP(nnx.Rngs(0)))


@sharded_jit(
    mesh=make_mesh({"fsdp": None}),
    in_shardings=(FSDPRules(), P("fsdp")),
    out_shardings=None,
)
def evaluate(params, batch):
    return loss(nnx.merge(graphdef, params), batch)


first = float(evaluate(nnx.to_pure_dict(start), batches[0]))
np.testing.assert_allclose(first, before[0], rtol=1e-5)

# %% [markdown]
# | scalax | here |
# |---|---|
# | `MeshShardingHelper([-1], ["fsdp"])` | `make_mesh({"fsdp": None})` |
# | `mesh.sjit(f, in_shardings=, out_shardings=)` | `sharded_jit(f, mesh, in_shardings=, out_shardings=)` |
# | `args_sharding_constraint=` | `constrain_args=` |
# | `annotation_shardings=` | `annotations=` |
# | `static_argnums=`, `donate_argnums=` | `static_argnames=`, `donate_argnames=` |
# | `with_sharding_annotation(x, name)` | `annotate(x, name)` |
# | `with_sharding_constraint(x, rule)` | `constrain(x, rule)` |
# | `FSDPShardingRule(...)` | `FSDPRules(...)` |
# | `TreePathShardingRule((regex, spec), ...)` | `PathRules((regex, spec), ...)` |
# | `PolicyShardingRule(policy)` | `PolicyRules(policy)` |
#
# ## From DistJax's linen modules
#
# DistJax wraps modules in `shard_map`: each layer knows its axis, and calls the collective
# itself. Here the layer stays as it was and its dims get names.
#
# | DistJax | here |
# |---|---|
# | `shard_map` around the training step, `psum` of the gradients | nothing: the Trainer's step is written for whole arrays |
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
# | `init_device_mesh` | the strategy makes it; `strategy.make_mesh()` |
# | `ColwiseParallel`, `RowwiseParallel` | names `embed`, `mlp`, `heads` in the model; `TensorParallel(n)` |
# | `SequenceParallel` | `TensorParallel(n, sequence=True)` |
# | `ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B` | `Pipeline(n, GPipe())`, `OneFOneB()`, `Interleaved(chunks=)` |
# | `LightningModule.training_step` | the `loss` function |
# | `Trainer.fit(model, datamodule)` | `Trainer(...).fit(batches, num_steps)` |
# | `accumulate_grad_batches=` | `num_microbatches=` (of one batch, not more batches) |
# | `precision="bf16-mixed"` | `precision=Precision.mixed_bfloat16()` |
# | `ModelCheckpoint`, `ckpt_path="last"` | `checkpoint="directory"`; `fit` resumes by itself |
# | `dist.get_rank() == 0` | nothing: one program, whole arrays |
# | `activation_checkpointing` | `remat="full"` |
#
# One habit to leave behind: per-device thinking. `batch` has all rows, `loss` is the mean over all
# of them, and `len(batch)` is the global size. There is no rank in your code.
#
# ## Exercise
#
# Take a training script of yours. Write its loss as `loss(model, batch)`, run it with
# `fast_dev_run=True` on 8 simulated devices, and compare five losses with the ones you had.
