"""Arrays of a model that are not the single value of a Variable."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import FSDP, DataParallel, Pipeline, Trainer, make_mesh
from nnx_parallel.errors import ModelError, ParallelWarning, StateStructureError
from nnx_parallel.layers import Stack
from nnx_parallel.optimizers import decay_mask
from nnx_parallel.sharding import FSDPRules, PathRules, resolve_shardings
from nnx_parallel.sharding.nnx_arrays import flatten_pure

pytestmark = pytest.mark.long

WIDTH = 16
TX = optax.adam(0.05)
CONSTANTS = pytest.mark.filterwarnings("ignore:Arrays in no Variable")
# `sow` creates a Variable, unlike `nnx.capture`.
SOWS = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")


def squares(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]).sum(-1) - batch["y"]) ** 2).mean()


def make_batches(count: int = 3, rows: int = 8) -> list[dict]:
    x = np.random.default_rng(0).normal(size=(count, rows, WIDTH)).astype(np.float32)
    return [{"x": part, "y": part.sum(1)} for part in x]


def plain(model: nnx.Module, batches: list[dict]) -> list[float]:
    """The losses in plain NNX, with an optimizer over pytrees."""

    @nnx.jit
    def step(model: Any, opt_state: Any, batch: Any) -> tuple[jax.Array, Any]:
        value, grads = nnx.value_and_grad(squares)(model, batch)
        state = nnx.state(model, nnx.Param)
        old = nnx.to_pure_dict(state)
        updates, opt_state = TX.update(nnx.to_pure_dict(grads), opt_state, old)
        for path, variable in nnx.to_flat_state(state):
            new: Any = optax.apply_updates(old, updates)
            for part in path:
                new = new[part]
            variable.set_value(new)
        return value, opt_state

    opt_state = TX.init(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    losses = []
    for batch in batches:
        value, opt_state = step(model, opt_state, batch)
        losses.append(float(value))
    return losses


def make_trainer(model: Any, **options: Any) -> Trainer:
    settings = {"strategy": FSDP(min_size=0), "loggers": ()} | options
    return Trainer(model, TX, squares, **settings)


# Variables with other values than one array


class Held(nnx.Module):
    """Parameters in a dict and in a list, and Variables that are still empty."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        kernel = jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH
        self.dense = nnx.Param({"kernel": kernel, "bias": jnp.zeros(WIDTH)})
        self.scales = nnx.Param([jnp.ones(WIDTH), (jnp.ones(WIDTH),)])
        self.nothing = nnx.Param(None)
        self.cache = nnx.Cache(None)
        self.seen = nnx.BatchStat({"rows": jnp.int32(0), "mean": jnp.zeros(WIDTH)})

    def __call__(self, x: jax.Array) -> jax.Array:
        dense: Any = self.dense.get_value()
        scales: Any = self.scales.get_value()
        first, (second,) = scales
        x = jnp.tanh(x @ dense["kernel"] + dense["bias"][None])
        self.sow(nnx.Intermediate, "hidden", x)
        seen = self.seen.get_value()
        mean = jax.lax.stop_gradient(x.mean(0))
        self.seen.set_value({"rows": seen["rows"] + 1, "mean": seen["mean"] + mean})
        return x * first[None] * second[None] + seen["mean"][None]


INNER = ["dense.bias", "dense.kernel", "scales.0", "scales.1.0"]


@SOWS
@pytest.mark.parametrize("is_built", [False, True])
def test_variables_may_hold_pytrees(tmp_path: Path, *, is_built: bool) -> None:
    batches = make_batches()
    expected = plain(Held(nnx.Rngs(0)), batches)
    model: Any = Held
    if is_built:
        model = Held(nnx.Rngs(0))
        before = model.seen.get_value()
        model(batches[0]["x"])  # its sown values are not state
        model.seen.set_value(before)
    trainer = make_trainer(model, checkpoint=str(tmp_path))
    history = trainer.fit(batches[:2], 2)
    np.testing.assert_allclose(history["loss"], expected[:2], rtol=1e-5)
    params: Any = flatten_pure(trainer.state.params)
    assert sorted(params) == INNER
    assert params["dense.kernel"].sharding.spec == P("fsdp")
    assert flatten_pure(trainer.state.variables)["seen.rows"] == 2
    rows = {row.info.path: row for row in trainer.describe().rows}
    assert {*INNER, "seen.mean", "seen.rows"} == rows.keys()
    # The arrays are saved and restored by these paths, under another strategy.
    other = make_trainer(Held, strategy=DataParallel(), checkpoint=str(tmp_path))
    found = other.fit(batches, 3)["loss"]
    np.testing.assert_allclose(found, expected[2:], rtol=1e-5)
    trained: Any = other.model
    assert trained.nothing.get_value() is None
    assert set(trained.dense.get_value()) == {"kernel", "bias"}
    assert isinstance(trained.scales.get_value(), list)
    if is_built:
        assert model.hidden.get_value()


def test_pytree_variables_follow_placements_and_rules() -> None:
    model = Held(nnx.Rngs(0))
    strategy = FSDP(min_size=0, rules=(PathRules((r"dense\.kernel", P(None, "fsdp"))),))
    state: Any = strategy.split(model)[1]
    assert state["dense"].get_value()["kernel"].sharding.spec == P(None, "fsdp")
    specs: Any = strategy.specs(nnx.state(model))
    assert specs["scales"].get_value() == [P("fsdp"), (P("fsdp"),)]
    mask = flatten_pure(decay_mask(model))
    assert mask == {path: path == "dense.kernel" for path in INNER}
    tree = resolve_shardings(
        nnx.state(model, nnx.Param), FSDPRules(min_size=0), make_mesh({"fsdp": None})
    )
    assert {s.spec for s in jax.tree.leaves(tree)} == {P("fsdp")}


class HeldBlock(nnx.Module):
    """A block with parameters in a dict, and a constant outside of Variables."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        kernel = jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH
        self.dense = nnx.Param({"kernel": kernel, "bias": jnp.zeros(WIDTH)})
        self.halves = jnp.full(WIDTH, 0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        dense = self.dense.get_value()
        x = x + jnp.tanh(x @ dense["kernel"] + dense["bias"][None])
        return x * self.halves[None]


class HeldBlocks(nnx.Module):
    """A Stack of such blocks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = Stack(HeldBlock, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks(x)


@CONSTANTS
def test_pytree_variables_train_in_stack() -> None:
    batches = make_batches(2)
    expected = plain(HeldBlocks(nnx.Rngs(0)), batches)
    # Layers are gathered one at a time, so the dim of the layers is not split.
    trainer = make_trainer(HeldBlocks)
    spec = trainer.state.params["blocks"]["layer"]["dense"]["kernel"].sharding.spec
    assert spec[0] is None
    assert spec[1] == "fsdp"
    found = trainer.fit(batches, 2)["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    options = {"num_microbatches": 2, "devices": jax.devices()[:2]}
    piped = make_trainer(HeldBlocks, strategy=Pipeline(2), **options)
    found = piped.fit(batches, 2)["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@SOWS
def test_changed_structure_of_variable_raises() -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        model.cache.set_value(batch["x"])
        return squares(model, batch)

    trainer = Trainer(Held, TX, loss, strategy=FSDP(min_size=0), loggers=())
    with pytest.raises(StateStructureError, match="structure: `cache` is new"):
        trainer.fit(make_batches(1), 1)


# Arrays outside of Variables


class Constants(nnx.Module):
    """Positions, a scale and a table outside of Variables, and a count that changes."""

    def __init__(self, rngs: nnx.Rngs, make: Any = jnp.arange) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.positions = make(WIDTH)
        self.scale = np.array(2.0, np.float32)
        self.tables = nnx.List([jnp.linspace(0.0, 1.0, WIDTH)])
        self.calls = jnp.zeros((), jnp.int32)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls = self.calls + 1
        table = self.tables[0] * (self.positions % 2) * self.scale * self.calls
        return self.linear(x) + table[None]


@pytest.mark.parametrize("make", [jnp.arange, np.arange])
@pytest.mark.parametrize("is_built", [False, True])
def test_arrays_outside_variables_are_constants(
    make: Any, tmp_path: Path, *, is_built: bool
) -> None:
    batches = make_batches()
    expected = plain(Constants(nnx.Rngs(0), make), batches)
    model: Any = Constants(nnx.Rngs(0), make)
    model = model if is_built else lambda rngs: Constants(rngs, make)
    # Scalars and integers cannot be weights. For the table, there is one warning.
    message = "Arrays in no Variable are constants and not trained: ['tables.0']. nnx"
    with pytest.warns(UserWarning, match=re.escape(message)):
        trainer = make_trainer(model, checkpoint=str(tmp_path))
    history = trainer.fit(batches[:2], 2)
    np.testing.assert_allclose(history["loss"], expected[:2], rtol=1e-5)
    state: Any = flatten_pure(trainer.state.variables)
    assert sorted(state) == ["calls", "positions", "scale", "tables.0"]
    assert all(x.sharding.spec == P() for x in state.values())
    rows = {row.info.path: row.placement.reason for row in trainer.describe().rows}
    assert rows["positions"].startswith("in no Variable")
    with pytest.warns(UserWarning, match="Arrays in no Variable"):
        other = make_trainer(model, strategy=DataParallel(), checkpoint=str(tmp_path))
    found = other.fit(batches, 3)["loss"]
    np.testing.assert_allclose(found, expected[2:], rtol=1e-5)
    trained: Any = other.model
    assert trained.calls == 3
    np.testing.assert_array_equal(trained.positions, np.arange(WIDTH))


class Forgotten(nnx.Module):
    """A weight that was not wrapped in a Variable."""

    def __init__(self, rngs: nnx.Rngs, wrap: Any = lambda x: x) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.gain = wrap(0.1 * jax.random.normal(rngs.params(), (WIDTH,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.gain[...][None]


def test_random_array_outside_variable_raises() -> None:
    message = "The model has randomly initialized arrays in no Variable: ['gain']. They"
    for use in (make_trainer, FSDP().describe):
        with pytest.raises(ModelError, match=re.escape(message)):
            use(Forgotten)
    # In an existing model, it is unknown how an array was made.
    message = "are constants and not trained: ['gain']. nnx.Param(x) would train one;"
    with pytest.warns(UserWarning, match=re.escape(message)):
        make_trainer(Forgotten(nnx.Rngs(0)))
    for kind in (nnx.Param, nnx.Variable):
        make_trainer(lambda rngs, kind=kind: Forgotten(rngs, kind))


@pytest.mark.parametrize("is_built", [False, True])
def test_filter_may_select_arrays_outside_variables(*, is_built: bool) -> None:
    built = Forgotten(nnx.Rngs(0))
    kernel, gain = np.asarray(built.linear.kernel[...]), np.asarray(built.gain)
    trainer = make_trainer(
        built if is_built else Forgotten, wrt=lambda path, _: path[-1] == "gain"
    )
    assert [*flatten_pure(trainer.state.params)] == ["gain"]
    assert trainer.state.params["gain"].sharding.spec == P("fsdp")
    trainer.fit(make_batches(1), 1)
    model: Any = trainer.model
    assert isinstance(model.gain, jax.Array)
    assert np.abs(np.asarray(model.gain) - gain).max() > 0
    np.testing.assert_array_equal(np.asarray(model.linear.kernel[...]), kernel)


class Nested(nnx.Module):
    """Arrays in a dict of lists, as in Flax's WeightNorm before 0.12.12."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.tables = nnx.data({("a", 1): [jnp.arange(WIDTH), np.arange(WIDTH)]})

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = self.tables["a", 1]
        return self.linear(x) + (first % 3 + second % 2)[None]


@pytest.mark.parametrize("is_built", [False, True])
def test_constants_may_be_in_lists_and_dicts(*, is_built: bool) -> None:
    batches, built = make_batches(2), Nested(nnx.Rngs(0))
    expected = plain(Nested(nnx.Rngs(0)), batches)
    trainer = make_trainer(built if is_built else Nested)
    found = trainer.fit(batches, 2)["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    models: Any = (trainer.model, built)
    for model in models:
        assert not isinstance(model.tables["a", 1][0], nnx.Variable)
    paths = {row.info.path for row in trainer.describe().rows}
    assert {"tables.('a', 1).0", "tables.('a', 1).1"} < paths


@dataclasses.dataclass
class Table:
    """An object that Flax does not look into."""

    values: Any


def as_partial(values: Any) -> Any:
    return functools.partial(jnp.multiply, values)


def as_closure(values: Any) -> Any:
    return lambda x: x * values


@pytest.mark.parametrize("hold", [Table, as_partial, as_closure])
def test_array_hidden_in_object_raises(hold: Any) -> None:
    class Holds(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.held = hold(jnp.arange(WIDTH) % 3)

        def __call__(self, x: jax.Array) -> jax.Array:
            held = self.held
            x = self.linear(x)
            return x * held.values if isinstance(held, Table) else held(x)

    message = re.escape("`held` is a ") + ".* with an array that __init__ has made"
    with pytest.raises(ModelError, match=message):
        make_trainer(Holds)
    # In an existing model, the array is a constant of the program, as in plain NNX.
    batches = make_batches(1)
    with jax.numpy_rank_promotion("allow"):
        expected = plain(Holds(nnx.Rngs(0)), batches)
        found = make_trainer(Holds(nnx.Rngs(0))).fit(batches, 1)["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def in_closure(rngs: nnx.Rngs) -> Any:
    hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    return lambda x: hidden(x)


def in_partial(rngs: nnx.Rngs) -> Any:
    layers = [nnx.Linear(WIDTH, WIDTH, rngs=rngs)]
    return functools.partial(lambda hidden, x: hidden[0](x), layers)


def in_inner_closure(rngs: nnx.Rngs) -> Any:
    inner = in_closure(rngs)
    return lambda x: inner(x)


@pytest.mark.parametrize("make", [in_closure, in_partial, in_inner_closure])
def test_module_hidden_in_closure_is_named(make: Any) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.block = make(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(self.block(x))

    where = re.escape("`block` is a ") + r"\w+ \(.*test_variables\.py:\d+\) "
    message = (
        where + r"with the Linear '\w+' that __init__ has made: .*`kernel` \(16, 16"
    )
    with pytest.raises(ModelError, match=message):
        make_trainer(Net)
    batches = make_batches(2)
    expected = plain(Net(nnx.Rngs(0)), batches)
    with pytest.warns(ParallelWarning, match=message + ".*are not trained, sharded or"):
        trainer = make_trainer(Net(nnx.Rngs(0)))
    np.testing.assert_allclose(trainer.fit(batches, 2)["loss"], expected, rtol=1e-5)


def test_function_of_its_own_module_is_named() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.apply = lambda x: self.head(x)

    with pytest.raises(ModelError, match=r"with the Net 'self'.*Write a method of"):
        make_trainer(Net)


def test_untrained_variables_are_named_once(capsys: Any) -> None:
    class Scaled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.scale = nnx.Variable(jnp.ones(WIDTH))
            self.count = nnx.Variable(jnp.arange(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(self.layer(x)) * self.scale[None]

    trainer = make_trainer(Scaled, loggers=None)
    for steps in (1, 2):
        trainer.fit(make_batches(2), steps)
    text = "`scale`: nnx.Variable; nnx.Param is trained"
    assert capsys.readouterr().out.count(text) == 1


class Weak(nnx.Module):
    """A Variable whose array has a weak type."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.full(WIDTH, 0.5))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen[...] = jax.lax.stop_gradient(self.seen[...] + x.mean(0))
        return self.linear(x) + self.seen[...][None]


def test_weak_type_does_not_recompile_step() -> None:
    traces = []

    def loss(model: Any, batch: Any) -> jax.Array:
        traces.append(model)
        return squares(model, batch)

    trainer = Trainer(Weak, TX, loss, strategy=DataParallel(), loggers=())
    batch = trainer.shard_batch(make_batches(1)[0])
    trainer.state, _ = trainer.train_step(trainer.state, batch)
    count = len(traces)
    for _ in range(2):
        trainer.state, _ = trainer.train_step(trainer.state, batch)
    assert len(traces) == count
