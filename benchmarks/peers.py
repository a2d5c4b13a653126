"""Training steps as an expert writes them by hand, to measure the library against.

They share the modules of `models.GPT` and the chunked loss with the library's step, so
that the mathematics is the same; shardings, gathering, rematerialisation, the scan over
layers, metrics and update are written out here, over plain nested dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import GPipe, Mean, TrainState
from nnx_parallel.data.rows import split_rows
from nnx_parallel.layers import Remat, default_remat, linear_cross_entropy
from nnx_parallel.models import GPT, next_token_loss
from nnx_parallel.pipeline.prologue_epilogue import PipelineInputs
from nnx_parallel.pipeline.run import PipelinedFunction, PipelineSchedule
from nnx_parallel.precision import cast_floating
from nnx_parallel.programs import trace
from nnx_parallel.sharding import Layout, using
from nnx_parallel.sharding.model import flatten
from nnx_parallel.state import StatePlan
from nnx_parallel.strategies import Claims

State = dict[str, Any]
Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]


def copy_state(state: TrainState) -> State:
    """Copies a Trainer's state, with its shardings, to the peers' nested dict."""
    names = ("params", "opt_state", "step", "key")
    return {name: copied(getattr(state, name)) for name in names}


def copied(tree: Any) -> Any:
    """Returns copies with the same shardings, which may be donated."""
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=shardings)(tree)


def make_step(
    loss: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    shardings: State,
) -> Step:
    """Returns a compiled step for a loss of pure arrays; the step donates its state."""

    def step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
            "key": state["key"],
        }
        return new, {"loss": value, "grad_norm": optax.tree.norm(grads)}

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def nnx_jit(model: GPT, tx: optax.GradientTransformation) -> tuple[Any, nnx.Optimizer]:
    """Flax's guide: `nnx.jit` over the model and `nnx.Optimizer`."""
    model.train()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model: GPT, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        def loss(model: GPT) -> jax.Array:
            return next_token_loss(model, batch).value

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return train_step, optimizer


def make_nnx_jit_step(
    model: GPT, tx: optax.GradientTransformation
) -> tuple[Step, tuple[GPT, nnx.Optimizer]]:
    """The step of `nnx_jit`, and its state: a copy of the model, sharded alike."""
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, copied(state))
    train_step, optimizer = nnx_jit(model, tx)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        return state, {"loss": train_step(*state, batch)}

    step.lower = lambda state, batch: train_step.lower(*state, batch)  # pyright: ignore[reportFunctionMemberAccess]
    return step, (model, optimizer)


def make_gpt_step(
    model: GPT,
    tx: optax.GradientTransformation,
    state: State,
    *,
    keeps_gathered: bool = False,
) -> Step:
    """A hand-written step of a GPT with GPT-2's parts.

    Parameters that ``state`` holds sharded are gathered where they are used, a layer's
    parameters inside the scan, and gathered again for the backward pass.

    Args:
        model: Structure of the model; arrays may be abstract.
        tx: The optimizer.
        state: The first state, for its shardings.
        keeps_gathered: Save gathered parameters for the backward pass instead.
    """
    block_def, norm_def = (nnx.split(m)[0] for m in (model.blocks.layer, model.norm))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    replicated = NamedSharding(shardings["step"].mesh, P())
    placed = dict(shardings["params"])
    placed_blocks = placed.pop("blocks")["layer"]
    placed_layer = jax.tree.map(_of_layer, placed_blocks)
    gathers = any(_is_sharded(s) for s in jax.tree.leaves(shardings["params"]))

    def remat(function: Callable, **options: Any) -> Callable:
        if keeps_gathered or not gathers:
            return function
        return jax.checkpoint(function, policy=_is_kept, **options)

    def look_up(table: jax.Array, rows: jax.Array) -> jax.Array:
        # Its gradient is all-reduced and sliced afterwards: otherwise XLA would
        # reshard the activations along the shards of the table.
        table = jax.lax.with_sharding_constraint(table, replicated)
        rows = jnp.where(rows < 0, table.shape[0], rows)
        return jnp.take(table, rows, axis=0, mode="fill")

    def run_block(x: jax.Array, params: State) -> tuple[jax.Array, None]:
        params = gathered(params, placed_layer)
        if not gathers:
            return nnx.merge(block_def, params)(x), None
            # FSDP's traced step has the jitted functions of jnp inlined. Otherwise XLA
            # keeps the broadcast constant of the mask as an array, in another kernel.
        block = trace(
            lambda x, params: nnx.merge(block_def, params)(x),
            x,
            params,
            inlined=lambda eqn: eqn.primitive.name == "jit",
        )
        return block(x, params), None

    def total_loss(params: State, batch: Mapping[str, jax.Array]) -> jax.Array:
        params = dict(params)
        blocks = params.pop("blocks")["layer"]
        params = gathered(params, placed)
        tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        positions = jnp.arange(tokens.shape[1])[None]
        table, position_table = (
            params[name]["embedding"] for name in ("embed", "positions")
        )
        x = look_up(table, tokens) + look_up(position_table, positions)
        x, _ = jax.lax.scan(remat(run_block, prevent_cse=False), x, blocks)
        x = nnx.merge(norm_def, params["norm"])(x)
        mesh = replicated.mesh
        assert isinstance(mesh, jax.sharding.Mesh)
        with using(Layout(mesh=mesh, claims=Claims(batch=mesh.axis_names))):
            mean = linear_cross_entropy(x, table, labels, vocab_dim=0)
        return jnp.asarray(mean.total)

    def loss(params: State, batch: Mapping[str, jax.Array]) -> jax.Array:
        return remat(total_loss)(params, batch) / batch["tokens"][:, 1:].size

    return make_step(loss, tx, shardings)


def _is_sharded(sharding: NamedSharding) -> bool:
    return any(sharding.spec)


def _of_layer(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    """Every residual except the results of `gather`."""
    return "sharding_constraint" not in str(params.get("call_jaxpr", primitive))


def gathered(params: State, shardings: State) -> State:
    """Gathers parameters on every device; their gradients are reduce-scattered."""
    return jax.tree.map(
        lambda x, s: gather(x, s) if _is_sharded(s) else x, params, shardings
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(x: jax.Array, stored: NamedSharding) -> jax.Array:
    """An array gathered on every device."""
    replicated = NamedSharding(stored.mesh, P())
    return jax.lax.with_sharding_constraint(x, replicated)


def _gather_forward(x: jax.Array, stored: NamedSharding) -> tuple[jax.Array, None]:
    return gather(x, stored), None


def _gather_backward(stored: NamedSharding, _: None, grad: jax.Array) -> tuple:
    return (jax.lax.with_sharding_constraint(grad, stored),)


gather.defvjp(_gather_forward, _gather_backward)


def make_gpipe_step(
    plan: StatePlan,
    loss: Callable[[Any, Any], Mean],
    num_microbatches: int,
    remat: Remat = "none",
) -> Step:
    """GPipe by autodiff: the gradient of a pipeline that only goes forward.

    The stages run the same layers in the same forward ticks as ours, and `jax.grad` of
    the scan over ticks is the backward pass. It saves the residuals of every tick,
    although fewer microbatches could be in flight.
    """
    pipeline = plan.layout.claims.execution
    assert isinstance(pipeline, PipelineSchedule)
    num_stages = plan.layout.mesh.shape[pipeline.axis]

    def run(params: dict, variables: dict, batch: Any, key: jax.Array) -> Any:
        model = plan.merge(params, variables, training=True, cast_stacked=False)
        return loss(model, batch), {}

    def mean_loss(params: dict, state: TrainState, batch: Any) -> jax.Array:
        keys = jax.vmap(partial(jax.random.fold_in, state.key))
        inputs = PipelineInputs(
            params=cast_floating(flatten(params), plan.precision.compute),
            variables=flatten(state.variables),
            batch=split_rows(plan.layout, batch, num_microbatches),
            keys=keys(jnp.arange(num_microbatches)),
        )
        table = GPipe().forward_table(num_stages, num_microbatches)
        mean = PipelinedFunction(
            plan, pipeline, plan.gathering(run), inputs, table
        ).outputs()
        return jnp.sum(mean.total) / jnp.sum(mean.weight)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict]:
        with using(plan.layout), default_remat(remat):
            value, grads = jax.value_and_grad(mean_loss)(state.params, state, batch)
            grads = plan.constrain(grads, "gradient")
            updates, opt_state = optax.with_extra_args_support(plan.tx).update(
                plan.constrain(grads, "optimizer"), state.opt_state, state.params
            )
            params = optax.apply_updates(state.params, updates)
            new = replace(
                state, step=state.step + 1, params=params, opt_state=opt_state
            )
            return new, {"loss": value, "grad_norm": optax.tree.norm(grads)}

    return jax.jit(step, donate_argnums=0, out_shardings=(plan.shardings, None))
