"""A model that a pipeline cannot run raises before compilation, with a remedy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_parallel import (
    Composite,
    DataParallel,
    GPipe,
    Interleaved,
    Mean,
    OneFOneB,
    Pipeline,
    Strategy,
)
from nnx_parallel.errors import PipelineError, ScheduleError, StackError
from nnx_parallel.layers import Stack
from nnx_parallel.schedules import Schedule, Table
from nnx_parallel.schedules.schedules import Fixed
from tests.pipelines import assert_like_one_device, make_trainer

WIDTH = 8
BATCH = {"x": np.ones((8, WIDTH), np.float32), "index": np.zeros((8, 2), np.int32)}


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs)


class Model(nnx.Module):
    """A model that consists of one stack."""

    def __init__(self, rngs: nnx.Rngs, make_block: Any = linear) -> None:
        self.stack = Stack(make_block, 4, rngs=rngs)

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        return self.stack(x, *args)


class Nested(nnx.Module):
    """A stack whose block is a stack."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.outer = Stack(lambda rngs: Stack(linear, 2, rngs=rngs), 4, rngs=rngs)


def step(
    loss: Any, build: Any = Model, strategy: Strategy | None = None, **options: Any
) -> None:
    """Traces one training step."""
    trainer = make_trainer(build, loss, strategy or Pipeline(2), **options)
    batch = trainer.shard_batch(BATCH)
    trainer.train_step(trainer.state, batch)


def once(model: Any, batch: Any) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


# Models


@pytest.mark.parametrize(
    ("build", "strategy", "found"),
    [
        (linear, Pipeline(2), "Linear has no Stack.*one nnx_parallel.*Stack.*FSDP"),
        (Nested, Pipeline(2), "`outer.layer` is inside of `outer`.*unstack"),
        (Model, Pipeline(2, stack="blocks"), r"'blocks'.*has Stacks \['stack'\]"),
    ],
)
def test_missing_or_ambiguous_stack_raises(
    build: Any, strategy: Strategy, found: str
) -> None:
    with pytest.raises(PipelineError, match=found):
        make_trainer(build, once, strategy)


@pytest.mark.parametrize(
    ("strategy", "numbers"),
    [
        (Pipeline(8), "4 layers.*8 stages, which need.*There can be 1 to 4 stages"),
        (
            Pipeline(4, Interleaved(chunks=2)),
            "4 layers.*4 stages of 2 chunks.*there can be 1 to 2 stages",
        ),
        (
            Pipeline(2, Interleaved(chunks=5)),
            "2 stages of 5 chunks.*there can be no stages",
        ),
    ],
    ids=str,
)
def test_fewer_layers_than_chunks_raise(strategy: Strategy, numbers: str) -> None:
    with pytest.raises(PipelineError, match=numbers):
        make_trainer(Model, once, strategy)


# Calls


def twice(model: Any, batch: Any) -> jax.Array:
    return (model(model(batch["x"])) ** 2).mean()


def never(model: Any, batch: Any) -> jax.Array:
    return (model.stack.layer.kernel[...] ** 2).mean()


def in_vmap(model: Any, batch: Any) -> jax.Array:
    return (jax.vmap(model)(batch["x"]) ** 2).mean()


def in_checkpoint(model: Any, batch: Any) -> jax.Array:
    graphdef, state = nnx.split(model)
    run = jax.checkpoint(lambda state, x: nnx.merge(graphdef, state, copy=True)(x))
    return (run(state, batch["x"]) ** 2).mean()


def in_scan(model: Any, batch: Any) -> jax.Array:
    graphdef, state = nnx.split(model)

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return nnx.merge(graphdef, state, copy=True)(x), None

    return (jax.lax.scan(step, batch["x"], None, length=2)[0] ** 2).mean()


def in_grad(model: Any, batch: Any) -> jax.Array:
    graphdef, state = nnx.split(model)

    def energy(x: jax.Array) -> jax.Array:
        return (nnx.merge(graphdef, state, copy=True)(x) ** 2).sum()

    return (jax.grad(energy)(batch["x"]) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (twice, "calls a Stack 2 times"),
        (never, "calls no Stack|before it calls it"),
        (in_vmap, "under jax.vmap"),
        (in_scan, "inside scan"),
        (in_grad, "under jax.grad"),
    ],
)
def test_invalid_stack_calls_raise(loss: Any, found: str) -> None:
    with pytest.raises(PipelineError, match=found):
        step(loss)


def in_jit(model: Any, batch: Any) -> jax.Array:
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state, copy=True)(x))
    return (run(state, batch["x"]) ** 2).mean()


@pytest.mark.parametrize("loss", [in_jit, in_checkpoint])
def test_calls_around_stack_match_one_device(loss: Any) -> None:
    assert_like_one_device(Model, loss, Pipeline(2), lambda: BATCH)


# Inputs and outputs


def doubled_weights(model: Any, batch: Any) -> jax.Array:
    kernel = model.stack.layer.kernel
    kernel[...] = 2 * kernel[...]
    return once(model, batch)


def weight_of_the_output(model: Any, batch: Any) -> Mean:
    out = model(batch["x"])
    return Mean((out**2).sum(), (out > 0).sum())


def integers(model: Any, batch: Any) -> jax.Array:
    return (model(batch["index"]) ** 2).mean().astype(jnp.float32)


def random_key(model: Any, batch: Any) -> jax.Array:
    return (model(batch["x"], jax.random.key(0)) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (doubled_weights, "assigns trained parameters while it runs: `stack.layer.ke"),
        (weight_of_the_output, "weight of the loss depends.*come from the batch"),
        (integers, "must be floating-point.*arguments of the blocks"),
        (random_key, r"random key.*jax.random.key_data"),
    ],
)
def test_invalid_stack_arguments_raise(loss: Any, found: str) -> None:
    with pytest.raises(PipelineError, match=found):
        step(loss)


def test_block_that_changes_shape_raises() -> None:
    def widening(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)

    with pytest.raises(StackError, match="must have the structure, shapes and dtypes"):
        step(once, lambda rngs: Model(rngs, widening))


class Forking(nnx.Module):
    """A block that returns one more array than it takes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = linear(rngs)

    def __call__(self, x: jax.Array, other: jax.Array) -> tuple:
        return self.linear(x), other * 2


def test_block_that_changes_array_count_raises() -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        return model(batch["x"], batch["x"])[0].mean()

    with pytest.raises(StackError, match="must have the structure, shapes and dtypes"):
        step(loss, lambda rngs: Model(rngs, Forking))


class Counting(nnx.Module):
    """A block that counts its calls in a variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = linear(rngs)
        self.calls = nnx.Variable(jnp.float32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        return self.linear(x)


def reads_before(model: Any, batch: Any) -> jax.Array:
    calls = model.stack.layer.calls[...].mean()
    return once(model, batch) + calls


def reads_after(model: Any, batch: Any) -> jax.Array:
    return once(model, batch) + model.stack.layer.calls[...].mean()


@pytest.mark.parametrize("loss", [reads_before, reads_after])
def test_reading_layer_variables_in_loss_raises(loss: Any) -> None:
    message = r"`stack.layer.calls`.*let the blocks return the value"
    with pytest.raises(PipelineError, match=message):
        step(loss, lambda rngs: Model(rngs, Counting))


class Remembering(nnx.Module):
    """A model that reads a variable before the stack and writes it after the stack."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stack = Stack(linear, 4, rngs=rngs)
        self.last = nnx.Variable(jnp.float32(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.stack(x * self.last[...])
        self.last[...] = y.mean()
        return y


def test_schedule_dependent_variable_raises() -> None:
    with pytest.raises(PipelineError, match="`last` is read before the Stack"):
        step(once, Remembering)


# Programs that would end the process


class Choosing(nnx.Module):
    """A block that gathers at computed indices."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = linear(rngs)

    def __call__(self, x: jax.Array, index: jax.Array) -> jax.Array:
        return self.linear(x) + jnp.take_along_axis(x, index, axis=1).sum(-1)[:, None]


def chosen(model: Any, batch: Any) -> jax.Array:
    return (model(batch["x"], batch["index"]) ** 2).mean()


def build_choosing(rngs: nnx.Rngs) -> Model:
    return Model(rngs, Choosing)


def test_computed_indices_in_split_stage_raise() -> None:
    strategy = Composite(Pipeline(2), DataParallel(2))
    with pytest.raises(PipelineError, match=r"gather.*\['data'\].*one_hot"):
        step(chosen, build_choosing, strategy)


def test_computed_indices_in_unsplit_stage_run() -> None:
    step(chosen, build_choosing, Pipeline(2))


# Arguments


def test_invalid_pipeline_arguments_raise() -> None:
    with pytest.raises(ValueError, match=r"Pipeline\(0\): .* an integer of at least 1"):
        Pipeline(0)
    with pytest.raises(ValueError, match=r"stash='all'.*'policy', 'inputs'"):
        Pipeline(2, stash="all")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"gather='never'.*'microbatch', 'step'"):
        Pipeline(2, gather="never")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="must be a Schedule"):
        Pipeline(2, schedule="1f1b")  # pyright: ignore[reportArgumentType]


def test_table_of_other_sizes_raises() -> None:
    table: Table = OneFOneB().table(num_stages=2, num_microbatches=8)
    with pytest.raises(ScheduleError, match=r"8.*4|4.*8"):
        step(once, strategy=Pipeline(2, table), num_microbatches=4)
    step(once, strategy=Pipeline(2, table), num_microbatches=8)


class Careless(Schedule):
    """A schedule with two chunks that does not declare them."""

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        return Interleaved(chunks=2).table(num_stages, num_microbatches)


class Halving(Schedule):
    """A schedule with tables for half of the microbatches."""

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        return OneFOneB().table(num_stages, num_microbatches // 2)


@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        (Careless(), r"\(2, 4, 2\).*the step has \(2, 4, 1\).*`chunks`"),
        (Halving(), r"\(2, 2, 1\).*the step has \(2, 4, 1\)"),
    ],
    ids=str,
)
def test_schedule_with_wrong_table_raises(schedule: Schedule, found: str) -> None:
    with pytest.raises(ScheduleError, match=found):
        step(once, strategy=Pipeline(2, schedule))


def test_forward_table_for_training_raises() -> None:
    with pytest.raises(ScheduleError, match="no backward slots"):
        Pipeline(2, OneFOneB().forward_table(2, 4))


def weight_of_the_last_output(model: Any, batch: Any) -> Mean:
    weight = 1.0 + model.last[...]
    y = model.stack(batch["x"])
    model.last[...] = (y**2).mean()
    return Mean((y**2).mean() * weight, weight)


def test_loss_weight_from_stack_output_raises() -> None:
    with pytest.raises(PipelineError, match=r"weight of the loss.*or an earlier one"):
        step(weight_of_the_last_output, Remembering)


def test_omitted_prints_warn() -> None:
    def talking(model: Any, batch: Any) -> jax.Array:
        jax.debug.print("loss {}", batch["x"].sum())
        return once(model, batch)

    with pytest.warns(UserWarning, match=r"debug.print.*DataParallel\(1\)"):
        step(talking)


def test_stack_of_wrong_type_raises() -> None:
    stack: Any = 3
    message = r"Pipeline\(stack=3\): it must be the path of a Stack of the model"
    with pytest.raises(TypeError, match=message):
        Pipeline(2, stack=stack)


@pytest.mark.parametrize(
    ("schedule", "count", "text"),
    [
        (OneFOneB(), 1, "with 1 microbatch, 2 stages wait 50% of the time; "
         "num_microbatches=8 makes it 11%"),
        (GPipe(), 2, "with 2 microbatches, 2 stages wait 33% of the time; "
         "num_microbatches=8 makes it 11%"),
        (OneFOneB(), 8, ""),
        (Fixed(OneFOneB().table(2, 1)), 1, ""),
    ],
)  # fmt: skip
def test_start_of_run_names_enough_microbatches(
    schedule: Schedule, count: int, text: str
) -> None:
    strategy = Pipeline(2, schedule)
    trainer: Any = make_trainer(Model, once, strategy, num_microbatches=count)
    shown = trainer._repr_html_()
    assert text in shown
    assert ("pipeline</td>" in shown) == bool(text)
