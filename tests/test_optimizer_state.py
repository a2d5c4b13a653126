"""All optimizer state is split like the parameters that it belongs to."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import FSDP, Composite, TensorParallel, Trainer
from nnx_parallel.errors import OptimizerError
from nnx_parallel.layers import Dense, Embed, Stack
from nnx_parallel.optimizers import decay_mask, muon_dimension_numbers
from nnx_parallel.optimizers.steps import learning_rates
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.sharding.names import path_of
from nnx_parallel.sharding.nnx_arrays import flatten_pure
from nnx_parallel.sharding.optimizer import as_transformation

pytestmark = pytest.mark.long

WIDTH, HIDDEN, VOCAB = 32, 64, 64


class Block(nnx.Module):
    """A residual block of two products and a norm, as in a transformer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        heads = {"heads": 4, "head_dim": 16}
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = Dense({"embed": WIDTH}, heads, use_bias=True, rngs=rngs)
        self.down = Dense(heads, {"embed": WIDTH}, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """Embedding, stacked blocks, and a stock linear layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = Stack(Block, 2, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.blocks(self.embed(tokens)))


ABSTRACT = abstract_model(Model, nnx.Rngs(0))


def loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["labels"]
    ).mean()


def make_batches(count: int) -> list[dict]:
    rng = np.random.default_rng(0)
    return [
        {name: rng.integers(0, VOCAB, (8, 4)).astype(np.int32) for name in NAMES}
        for _ in range(count)
    ]


NAMES = ("tokens", "labels")


def labels(model: nnx.Module) -> dict:
    return jax.tree.map(
        lambda decays: "matrix" if decays else "rest", decay_mask(model)
    )


def schedule(step: Any) -> Any:
    return 0.01 * (1 + step)


OPTIMIZERS: dict[str, Any] = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-2),
    "scheduled": optax.adam(schedule),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "adafactor_whole": optax.adafactor(1e-2, factored=False),
    "lion": optax.lion(1e-3),
    "masked": lambda model: optax.adamw(1e-2, mask=decay_mask(model)),
    "chain": optax.chain(
        optax.clip_by_global_norm(0.5), optax.scale_by_adam(), optax.scale(-1e-2)
    ),
    "multi_transform": lambda model: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "rest": optax.sgd(0.1, momentum=0.9)},
        labels(model),
    ),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=schedule),
    "muon": lambda model: optax.contrib.muon(
        1e-2, muon_weight_dimension_numbers=muon_dimension_numbers(model)
    ),
}


class Tried(NamedTuple):
    """The state of one optimizer, and its last updates."""

    state: Any
    updates: Any


def side_by_side(model: nnx.Module) -> optax.GradientTransformation:
    """All optimizers in one compiled step; the first one changes the parameters."""
    chosen = {name: as_transformation(o, model) for name, o in OPTIMIZERS.items()}

    def init(params: Any) -> dict[str, Tried]:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {name: Tried(tx.init(params), zeros) for name, tx in chosen.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple:
        found = {
            name: Tried(*reversed(tx.update(updates, state[name].state, params)))
            for name, tx in chosen.items()
        }
        return next(iter(found.values())).updates, found

    return optax.GradientTransformation(init, update)


def make_trainer(optimizer: Any, *, num_devices: int = 8, **options: Any) -> Trainer:
    return Trainer(
        Model,
        optimizer,
        loss,
        strategy=options.pop("strategy", FSDP(min_size=0)),
        devices=jax.devices()[:num_devices],
        loggers=(),
        **options,
    )


def train(trainer: Trainer, num_steps: int = 2) -> list[float]:
    """Runs ``num_steps`` steps and returns their losses."""
    losses = []
    for batch in make_batches(num_steps):
        batch = trainer.shard_batch(batch)
        trainer.state, metrics = trainer.train_step(trainer.state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def optimizer_arrays(trainer: Trainer) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(trainer.state.opt_state)
    return {path_of(path): leaf for path, leaf in leaves}


@pytest.fixture(
    scope="module",
    params=[
        "params",
        pytest.param("gradients", marks=pytest.mark.deep),
        pytest.param("optimizer", marks=pytest.mark.deep),
    ],
)
def strategy(request: pytest.FixtureRequest) -> FSDP:
    """All kinds of ZeRO, without a minimum size of split arrays."""
    return FSDP(shard=request.param, min_size=0)


@pytest.fixture(scope="module")
def split(strategy: FSDP) -> Trainer:
    """A Trainer after two steps on eight devices."""
    trainer = make_trainer(side_by_side, strategy=strategy)
    train(trainer)
    return trainer


@pytest.fixture(scope="module")
def whole() -> Trainer:
    """A Trainer after two steps on one device."""
    trainer = make_trainer(side_by_side, num_devices=1)
    train(trainer)
    return trainer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_optimizers_match_one_device(
    name: str, split: Trainer, whole: Trainer
) -> None:
    states: list[Any] = [trainer.state.opt_state for trainer in (split, whole)]
    found, expected = (state[name] for state in states)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        largest = max(float(jnp.abs(b).max()), 1e-3)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-4 * largest)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(found.updates)) > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_arrays_are_split(name: str, split: Trainer) -> None:
    for path, x in optimizer_arrays(split).items():
        if not path.startswith(f"{name}.") or ".v_row." in path or ".v_col." in path:
            continue
        parts = x.size // x.addressable_shards[0].data.size
        assert parts == (8 if x.size >= WIDTH else 1), path


def test_step_keeps_placement_of_state(split: Trainer, strategy: FSDP) -> None:
    placed = make_trainer(side_by_side, strategy=strategy).state.opt_state
    same = jax.tree.map(
        lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim),
        split.state.opt_state,
        placed,
    )
    assert all(jax.tree.leaves(same))


def test_adafactor_factors_follow_parameter_dims() -> None:
    strategy = Composite(FSDP(4, min_size=0), TensorParallel(2))
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=16)
    rows = strategy.describe(Model, optimizer=optimizer).optimizer_rows
    specs = {row.path: (row.shape, row.spec) for row in rows}
    factors = {
        path.split(".", 1)[1]: found
        for path, found in specs.items()
        if "embed.embedding" in path or "head.kernel" in path
    }
    assert factors["v_row.embed.embedding"] == ((WIDTH,), P("fsdp"))
    assert factors["v_col.embed.embedding"] == ((VOCAB,), P("tensor"))
    assert factors["v_row.head.kernel"] == ((WIDTH,), P("fsdp"))
    assert factors["v_col.head.kernel"] == ((VOCAB,), P())
    assert factors["v.head.kernel"] == ((1,), P())


def test_replicated_optimizer_state_is_reported() -> None:
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=16)
    found = Composite(FSDP(4, min_size=0), TensorParallel(2)).describe(
        Model, optimizer=optimizer
    )
    (row,) = found.replicated_optimizer
    assert (row.path, row.bytes_per_device) == ("0.v_col.head.kernel", 4 * VOCAB)
    assert (
        "replicated: optimizer state 0.v_col.head.kernel (64,) 256 B "
        "(lacks the split dim of head.kernel)"
    ) in found.summary()
    by_adam = FSDP(min_size=0).describe(Model, optimizer=optax.adam(1e-2))
    assert by_adam.replicated_optimizer == ()


@pytest.mark.parametrize("shard", ["gradients", "optimizer"])
def test_zero_1_and_2_split_moments(shard: Any) -> None:
    trainer = make_trainer(optax.adam(1e-2), strategy=FSDP(shard=shard, min_size=0))
    train(trainer, 1)
    kernel = trainer.state.params["head"]["kernel"]
    assert kernel.sharding.is_fully_replicated
    moment = optimizer_arrays(trainer)["0.mu.head.kernel"]
    assert moment.addressable_shards[0].data.size == moment.size // 8


def test_injected_learning_rate_is_logged_per_step() -> None:
    trainer = make_trainer(OPTIMIZERS["injected"])
    history = trainer.fit(make_batches(3), 3)
    np.testing.assert_allclose(history["learning_rate"], [0.01, 0.02, 0.03], rtol=1e-6)


def halved(count: Any) -> Any:
    return 1.0 / 2.0**count


def kinds(params: Any) -> Any:
    def kind_of(path: Any, x: Any) -> str:
        return "matrix" if "kernel" in jax.tree_util.keystr(path) else "bias"

    return jax.tree_util.tree_map_with_path(kind_of, params)


RATE, TWICE = [0.01, 0.02, 0.03], [1.0, 0.5, 0.25]
SCHEDULED: dict[str, tuple[Any, dict[str, list[float]]]] = {
    "argument": (optax.adam(schedule), {"learning_rate": RATE}),
    "chain": (
        optax.chain(optax.clip(1.0), optax.adamw(schedule)),
        {"learning_rate": RATE},
    ),
    "scale after schedule is not a rate": (
        optax.chain(optax.scale_by_schedule(halved), optax.sgd(schedule)),
        {"learning_rate": RATE},
    ),
    "constant": (optax.adam(0.1), {}),
    "schedule that is not a rate": (optax.scale_by_schedule(halved), {}),
    "only a negative schedule": (
        optax.scale_by_schedule(lambda count: -schedule(count)),
        {"learning_rate": RATE},
    ),
    "schedule, then the sign": (
        optax.chain(
            optax.scale_by_adam(), optax.scale_by_schedule(schedule), optax.scale(-1)
        ),
        {"learning_rate": RATE},
    ),
    "negative schedule": (
        optax.chain(
            optax.clip(1.0),
            optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1)),
            optax.scale_by_schedule(lambda count: -schedule(count)),
        ),
        {"learning_rate": RATE},
    ),
    "constant rate and schedule": (
        optax.chain(optax.adam(2.0), optax.scale_by_schedule(schedule)),
        {"learning_rate": [0.02, 0.04, 0.06]},
    ),
    "schedule of the gradients": (
        optax.chain(optax.scale_by_schedule(schedule), optax.adam(2.0)),
        {},
    ),
    "labels and negative schedule": (
        optax.multi_transform(
            {
                "matrix": optax.chain(
                    optax.scale_by_adam(),
                    optax.scale(0.5),
                    optax.scale_by_schedule(schedule),
                    optax.scale(-2.0),
                ),
                "bias": optax.adam(halved),
            },
            kinds,
        ),
        {"learning_rate/matrix": RATE, "learning_rate/bias": TWICE},
    ),
    "several": (
        optax.chain(optax.sgd(schedule), optax.sgd(halved)),
        {"learning_rate/0": RATE, "learning_rate/1": TWICE},
    ),
    "labels": (
        optax.multi_transform(
            {"matrix": optax.sgd(schedule), "bias": optax.adam(halved)}, kinds
        ),
        {"learning_rate/matrix": RATE, "learning_rate/bias": TWICE},
    ),
    "labels and injected": (
        optax.multi_transform(
            {
                "matrix": optax.inject_hyperparams(optax.sgd)(learning_rate=schedule),
                "bias": optax.adam(halved),
            },
            kinds,
        ),
        {"learning_rate/matrix": RATE, "learning_rate/bias": TWICE},
    ),
    "masked": (
        optax.masked(optax.sgd(schedule), lambda x: jax.tree.map(lambda _: True, x)),
        {"learning_rate": RATE},
    ),
    "accumulated": (
        optax.MultiSteps(optax.sgd(schedule), every_k_schedule=2),
        {"learning_rate": [0.01, 0.01, 0.02]},
    ),
}


def test_rates_keep_the_order_of_labels_or_are_left_out() -> None:
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    numbered = optax.multi_transform(
        {2: optax.sgd(lambda _: 0.2), 10: optax.sgd(lambda _: 10.0)},
        {"a": 2, "b": 10},
    )
    state = numbered.init(params)
    found = learning_rates(numbered, state, state)
    assert {k: float(x) for k, x in found.items()} == pytest.approx(
        {"learning_rate/2": 0.2, "learning_rate/10": 10.0}
    )
    # Nothing says which state belongs to which of these two optimizers.
    both = optax.contrib.sam(optax.sgd(schedule), optax.sgd(halved))
    state = both.init(params)
    assert learning_rates(both, state, state) == {}


@pytest.mark.parametrize(("tx", "rates"), SCHEDULED.values(), ids=SCHEDULED)
def test_learning_rate_of_schedule_is_logged(
    tx: Any, rates: dict[str, list[float]]
) -> None:
    history = make_trainer(tx).fit(make_batches(3), 3)
    assert {name for name in history if "learning_rate" in name} == {*rates}
    for name, expected in rates.items():
        np.testing.assert_allclose(history[name], expected, rtol=1e-6)


def test_optimizer_receives_loss() -> None:
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=0, atol=1e9)
    trainer = make_trainer(optax.chain(optax.sgd(0.1), plateau))
    train(trainer, 3)
    scale = optimizer_arrays(trainer)["1.scale"]
    assert float(scale) < 1


SGD = optax.sgd(0.1)
SAM = optax.contrib.sam(SGD, SGD)
PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5)


@pytest.mark.parametrize(
    "optimizer", [SAM, optax.chain(optax.clip(1.0), SAM), optax.polyak_sgd(0.1)]
)
def test_optimizer_receives_only_accepted_arguments(optimizer: Any) -> None:
    """SAM does not accept the loss; Polyak's step requires it."""
    trainer = make_trainer(optimizer)
    before = flatten_pure(jax.device_get(trainer.state.params))
    train(trainer, 2)
    after = flatten_pure(trainer.state.params)
    assert any((after[path] != x).any() for path, x in before.items())


@pytest.mark.parametrize(
    ("optimizer", "needed"),
    [
        (optax.lbfgs(), "required keyword-only argument: 'value_fn'"),
        (optax.contrib.sam(SGD, SGD, opaque_mode=True), "grad_fn must be provided"),
        (optax.chain(SAM, PLATEAU), "required keyword-only argument: 'value'"),
    ],
)
def test_optimizer_with_unknown_arguments_raises(optimizer: Any, needed: str) -> None:
    with pytest.raises(OptimizerError, match=re.escape(needed)):
        train(make_trainer(optimizer), 1)


def test_decay_mask_uses_dims_of_one_layer() -> None:
    mask = flatten_pure(decay_mask(ABSTRACT))
    assert mask == {
        "embed.embedding": True,
        "blocks.layer.norm.scale": False,
        "blocks.layer.norm.bias": False,
        "blocks.layer.up.kernel": True,
        # (heads, head_dim) in one layer, which is still a bias.
        "blocks.layer.up.bias": False,
        "blocks.layer.down.kernel": True,
        "head.kernel": True,
        "head.bias": False,
    }


def test_muon_dimension_numbers_use_one_layer() -> None:
    numbers = muon_dimension_numbers(ABSTRACT)
    dims = optax.contrib.MuonDimensionNumbers
    layer = numbers["blocks"]["layer"]
    assert layer["up"] == {"kernel": dims((1,), (2, 3)), "bias": None}
    assert layer["down"] == {"kernel": dims((1, 2), (3,))}
    assert layer["norm"] == {"scale": None, "bias": None}
    assert numbers["head"] == {"kernel": dims((0,), (1,)), "bias": None}
    assert numbers["embed"] == {"embedding": None}


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: optax.adamw(1e-2, mask=decay_mask(model, nnx.LoRAParam)),
        lambda model: optax.contrib.muon(
            1e-2,
            muon_weight_dimension_numbers=muon_dimension_numbers(model, nnx.LoRAParam),
        ),
    ],
)
def test_masks_cover_only_trained_parameters(optimizer: Callable) -> None:
    trainer = Trainer(
        lambda rngs: nnx.LoRA(
            16, 8, 16, base_module=nnx.Linear(16, 16, rngs=rngs), rngs=rngs
        ),
        optimizer,
        lambda model, batch: (model(batch["x"]) ** 2).mean(),
        strategy=FSDP(min_size=0),
        wrt=nnx.LoRAParam,
        loggers=(),
    )
    history = trainer.fit([{"x": np.ones((8, 16), np.float32)}] * 2, 2)
    assert history["loss"][1] < history["loss"][0]


@pytest.mark.parametrize("wrong", [0.1, "adam", lambda model: None])
def test_invalid_optimizer_raises(wrong: Any) -> None:
    kind = "NoneType" if callable(wrong) else type(wrong).__name__
    message = (
        f"optimizer is of type {kind}. Pass an Optax transformation such as "
        "optax.adamw(3e-4), optax.MultiSteps(...), or a function of the abstract model "
        "that returns one."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        as_transformation(wrong, None)
