"""The methods of a strategy: init, split, merge, specs, shardings, describe."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.layers import Dense, Stack
from nnx_parallel.sharding import PathRules
from nnx_parallel.sharding.nnx_arrays import variables_of


class Stock(nnx.Module):
    """A stock NNX model with statistics, dropout, a list, and tied weights."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(64, 64, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(64, 64, use_bias=False, rngs=rngs)
        self.head.kernel = self.layers[0].kernel

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return self.head(self.dropout(self.norm(x)))


class Block(nnx.Module):
    """A linear layer with named dims, and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = Dense({"embed": 64}, {"mlp": 128}, use_bias=True, rngs=rngs)
        self.down = Dense({"mlp": 128}, {"embed": 64}, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(nnx.gelu(self.up(x))))


BUILDERS: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "stock": Stock,
    "stack": lambda rngs: Stack(Block, 2, rngs=rngs),
}
STRATEGIES: list[Strategy] = [
    DataParallel(),
    FSDP(min_size=0),
    FSDP(shard="optimizer"),
    TensorParallel(2),
    Composite(DataParallel(2), FSDP(2, min_size=0), TensorParallel(2)),
]


def mesh_of(strategy: Strategy) -> jax.sharding.Mesh:
    """A mesh over all devices, or over as many as the strategy's sizes cover."""
    sizes = [size for size in strategy.axis_sizes.values() if size is not None]
    stated = len(sizes) == len(strategy.axis_sizes)
    return strategy.make_mesh(jax.devices()[: int(np.prod(sizes))] if stated else None)


def host_arrays(model: object) -> dict[str, np.ndarray]:
    """Every array of a model by path; keys are replaced by their words."""
    return {
        jax.tree_util.keystr(path): as_numpy(x)
        for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(model))
    }


def as_numpy(x: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def assert_placed(state: nnx.State, shardings: nnx.State) -> None:
    placed = jax.tree.map(
        lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim),
        state,
        shardings,
    )
    leaves = jax.tree_util.tree_leaves_with_path(placed)
    assert [path for path, is_right in leaves if not is_right] == []


def assert_same_bits(found: object, expected: dict[str, np.ndarray]) -> None:
    arrays = host_arrays(found)
    assert arrays.keys() == expected.keys()
    assert [p for p, x in arrays.items() if x.tobytes() != expected[p].tobytes()] == []


@pytest.fixture(scope="module", params=BUILDERS)
def build(request: pytest.FixtureRequest) -> Callable[[nnx.Rngs], nnx.Module]:
    return BUILDERS[request.param]


@pytest.mark.filterwarnings("ignore:TensorParallel.* splits no parameter")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_init_values_match_under_every_strategy(
    build: Callable, strategy: Strategy
) -> None:
    one = DataParallel(1)
    expected = host_arrays(one.init(build, 3, mesh=one.make_mesh(jax.devices()[:1])))
    mesh = mesh_of(strategy)
    model = strategy.init(build, 3, mesh=mesh)
    assert_same_bits(model, expected)
    state = nnx.state(model)
    assert_placed(state, strategy.shardings(state, mesh=mesh))


def test_fsdp_splits_every_parameter(build: Callable) -> None:
    model = FSDP(min_size=0).init(build, 0)
    for path, variable in variables_of(model):
        if isinstance(variable, nnx.Param):
            x = variable.get_value()
            shards = [shard.data.nbytes for shard in x.addressable_shards]
            assert shards == [x.nbytes // 8] * 8, path


@pytest.mark.filterwarnings("ignore:TensorParallel.* splits no parameter")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_split_and_merge_round_trip(build: Callable, strategy: Strategy) -> None:
    model, mesh = build(nnx.Rngs(5)), mesh_of(strategy)
    expected = host_arrays(model)
    arrays = {path: v.get_value() for path, v in variables_of(model)}
    graphdef, state = strategy.split(model, mesh=mesh)
    assert_placed(state, strategy.shardings(state, mesh=mesh))
    merged = strategy.merge(graphdef, state)
    assert_same_bits(merged, expected)
    jax.tree.map(lambda x: x.delete(), state)
    assert_same_bits(model, expected)
    assert all(v.get_value() is arrays[path] for path, v in variables_of(model))
    assert all("placement" not in v.get_metadata() for _, v in variables_of(model))


def test_tied_weights_stay_tied() -> None:
    strategy = FSDP(min_size=0)
    merged = strategy.merge(*strategy.split(Stock(nnx.Rngs(0))))
    assert isinstance(merged, Stock)
    assert merged.head.kernel is merged.layers[0].kernel
    built = strategy.init(Stock, 0)
    assert isinstance(built, Stock)
    assert built.head.kernel is built.layers[0].kernel


def test_merged_model_matches_original() -> None:
    model = Stock(nnx.Rngs(0))
    tokens = jnp.arange(32).reshape(8, 4) % 64
    model.eval()
    expected = model(tokens)
    merged = FSDP(min_size=0).merge(*FSDP(min_size=0).split(model))
    np.testing.assert_allclose(
        jax.jit(lambda model, tokens: model(tokens))(merged, tokens),
        expected,
        rtol=1e-5,
        atol=1e-6,
    )


def test_init_does_not_advance_rngs() -> None:
    rngs = nnx.Rngs(7)
    model = FSDP().init(Stock, rngs)
    assert_same_bits(model, host_arrays(FSDP().init(Stock, 7)))
    assert int(rngs.default.count[...]) == 0


def test_specs_have_structure_of_state() -> None:
    model = Stock(nnx.Rngs(0))
    specs: Any = FSDP().specs(nnx.state(model))
    assert specs["embed"]["embedding"].get_value() == P("fsdp")
    assert specs["layers"][1]["bias"].get_value() == P()
    assert specs["norm"]["mean"].get_value() == P()
    shardings = FSDP().shardings(nnx.state(model))
    placed = jax.device_put(nnx.state(model), shardings)
    assert placed["embed"]["embedding"].get_value().sharding.spec == P("fsdp")


# Describe


def test_describe_adds_up_bytes_per_device() -> None:
    strategy = Composite(FSDP(4, shard="gradients"), TensorParallel(2))
    found = strategy.describe(BUILDERS["stack"], optimizer=optax.adamw(1e-3))
    params = [row for row in found.rows if row.info.is_param]
    assert found.params_bytes == sum(row.bytes_per_device for row in params)
    assert len(found.rows) > len(params)
    shardings = [
        (row.info.shape, row.placement.gradient, row.placement.optimizer)
        for row in params
    ]
    held = [
        4 * np.prod(found.layout.sharding(gradient).shard_shape(shape))
        for shape, gradient, _ in shardings
    ]
    assert found.gradients_bytes == sum(held)
    moments = [
        2 * 4 * np.prod(found.layout.sharding(optimizer).shard_shape(shape))
        for shape, _, optimizer in shardings
    ]
    assert found.optimizer_bytes == sum(moments) + 4  # and a counter
    assert found.params_bytes > found.gradients_bytes


def test_describe_gives_reasons() -> None:
    rules = (PathRules((r"head", P())),)
    found = FSDP(rules=rules).describe(Stock)
    why = {row.info.path: row.placement.reason for row in found.rows}
    assert why["embed.embedding"] == "fsdp: free dim 0"
    assert why["layers.1.bias"] == "64 elements < min_size 1024"
    assert why["norm.mean"] == "not a parameter"
    assert "layers.0.kernel" not in why or "head.kernel" not in why


def test_describe_lists_largest_replicated_first() -> None:
    found = TensorParallel().describe(Stock)
    sizes = [row.bytes_per_device for row in found.replicated]
    assert sizes == sorted(sizes, reverse=True)
    assert found.replicated[0].info.path == "embed.embedding"
    text = str(found)
    assert "replicated: embed.embedding (64, 64) 16 KiB (no rule names it)" in text
    assert "per device: parameters" in text
    assert "optimizer state" not in text
    assert "mesh tensor=8" in text


def test_describe_does_not_change_model() -> None:
    model = Stock(nnx.Rngs(0))
    by_model, by_function = FSDP().describe(model), FSDP().describe(Stock)
    assert by_model.rows == by_function.rows
    assert all("placement" not in v.get_metadata() for _, v in variables_of(model))


def test_trainer_describes_trained_parameters() -> None:
    trainer = Trainer(
        lambda rngs: nnx.LoRA(
            64, 8, 64, base_module=nnx.Linear(64, 64, rngs=rngs), rngs=rngs
        ),
        optax.sgd(0.1, momentum=0.9),
        lambda model, batch: model(batch).mean(),
        strategy=FSDP(min_size=0),
        wrt=nnx.LoRAParam,
        loggers=(),
    )
    found = trainer.describe()
    adapters = 2 * 64 * 8 * 4 // 8
    assert found.gradients_bytes == found.optimizer_bytes == adapters
    assert found.params_bytes == adapters + (64 * 64 + 64) * 4 // 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FSDP(shard="weights"),  # pyright: ignore[reportArgumentType]
            r"FSDP\(shard='weights'\): valid values are "
            r"\['params', 'gradients', 'optimizer'\]\.",
        ),
        (lambda: FSDP(min_size="1k"), r"FSDP\(min_size='1k'\): it must be 0"),  # pyright: ignore[reportArgumentType]
        (lambda: FSDP(min_size=-1), r"FSDP\(min_size=-1\): it must be 0 or more\."),
    ],
)
def test_invalid_fsdp_arguments_raise(make: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
