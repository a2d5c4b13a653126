"""An optimizer treats the layers of a `Stack` like the separate arrays of a list."""

import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Checkpoint,
    Composite,
    DataParallel,
    Pipeline,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import OptimizerError
from nnx_parallel.layers import Dense, Stack
from nnx_parallel.optimizers import by_layer, decay_mask, muon, muon_dimension_numbers
from nnx_parallel.optimizers.by_layer import warn_of_stacked_updates
from nnx_parallel.sharding import PathNames
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.sharding.optimizer import as_transformation
from nnx_parallel.state import plan_state

pytestmark = pytest.mark.long

WIDTH = 8


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, scale: float = 1.0) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        kernel, bias = self.linear.kernel, self.linear.bias
        assert bias is not None
        kernel[...], bias[...] = scale * kernel[...], bias[...] + 0.1 * scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x))


class Model(nnx.Module):
    """Layers of two sizes: as lists, or as two stacks of different lengths."""

    def __init__(self, rngs: nnx.Rngs, *, stacked: bool) -> None:
        blocks = [Block(rngs, 0.5 + 0.5 * index) for index in range(6)]
        self.embed = nnx.Linear(4, WIDTH, rngs=rngs)
        groups = [blocks[:4], blocks[4:]]
        self.groups = nnx.List(
            [Stack.of(x) if stacked else nnx.List(x) for x in groups]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for group in self.groups:
            for block in [group] if isinstance(group, Stack) else group:
                x = block(x)
        return x


def listed(rngs: nnx.Rngs) -> Model:
    return Model(rngs, stacked=False)


def stacked(rngs: nnx.Rngs) -> Model:
    return Model(rngs, stacked=True)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def kinds(params: Any) -> Any:
    return jax.tree.map(lambda x: "lamb" if x.ndim > 1 else "sgd", params)


lamb = optax.lamb(1e-2)
clipped_lamb = optax.chain(optax.clip_by_global_norm(0.5), lamb)
by_kind: dict[Any, Any] = {"lamb": lamb, "sgd": optax.sgd(0.1)}

# These optimizers update a stack differently from a list.
MIXING: dict[str, optax.GradientTransformation] = {
    "lamb": lamb,
    "lars": optax.lars(0.1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "novograd": optax.novograd(1e-2),
    "fromage": optax.fromage(1e-2),
    "sm3": optax.sm3(1e-2),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "mask by rank": optax.adamw(1e-2, weight_decay=0.5, mask=matrices),
    "labels by rank": optax.multi_transform(by_kind, kinds),
    "with a global norm": clipped_lamb,
    "every second step": optax.MultiSteps(lamb, 2).gradient_transformation(),
    "warm-up": optax.lamb(optax.linear_schedule(0.0, 0.1, 100)),
    "injected": optax.inject_hyperparams(optax.lamb)(learning_rate=1e-2),
}
SAME: dict[str, Any] = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "lion": optax.lion(1e-2),
    "adamw, global norm": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0, 1, 9))
    ),
    "adamw, every second": optax.MultiSteps(optax.adamw(1e-2), 2),
    "guarded": optax.apply_if_finite(optax.adamw(1e-2), 3),
    "prodigy": optax.contrib.prodigy(),
    "momo": optax.contrib.momo(1e-2),
    "noise": optax.noisy_sgd(1e-2, key=0),
    "decay_mask": lambda model: optax.adamw(1e-2, mask=decay_mask(model)),
    "muon": lambda model: muon(
        1e-2, muon_weight_dimension_numbers=muon_dimension_numbers(model)
    ),
    "by_layer": optax.chain(optax.clip_by_global_norm(1.0), by_layer(lamb)),
}


def check(model: Any, optimizer: Any) -> None:
    layout = (strategy := DataParallel(1)).layout(strategy.make_mesh(jax.devices()[:1]))
    warn_of_stacked_updates(
        plan_state(abstract_model(model, nnx.Rngs(0)), layout, optimizer)
    )


@pytest.mark.parametrize("name", MIXING)
def test_optimizer_that_mixes_layers_warns(name: str) -> None:
    message = r"from a list of the same layers: with test values, an update of `groups"
    with pytest.warns(UserWarning, match=message):
        check(stacked, MIXING[name])
    check(listed, MIXING[name])
    check(stacked, by_layer(MIXING[name]))


@pytest.mark.parametrize("name", SAME)
def test_optimizer_that_separates_layers_does_not_warn(name: str) -> None:
    check(stacked, SAME[name])


@pytest.mark.parametrize("make", [optax.contrib.muon, muon])
def test_muon_warns_only_without_dimension_numbers(make: Any) -> None:
    """Optax's dimension numbers count the dims of 3-D kernels from either end."""

    def model(rngs: nnx.Rngs) -> nnx.Module:
        return Stack(
            lambda r: Dense({"heads": 2, "head_dim": 4}, {"embed": 8}, rngs=r),
            3,
            rngs=rngs,
        )

    def numbered(model: Any) -> Any:
        numbers = muon_dimension_numbers(model)
        return make(0.02, muon_weight_dimension_numbers=numbers)

    check(model, numbered)
    with pytest.warns(UserWarning, match="an update of `groups"):
        check(stacked, make(0.02))  # treats the stacked biases as a matrix


def test_factors_of_large_matrices_are_compared() -> None:
    """Adafactor factors dims of at least 128; the number of layers does not matter."""

    def model(rngs: nnx.Rngs) -> nnx.Module:
        return Stack(lambda r: nnx.Linear(300, 300, rngs=r), 3, rngs=rngs)

    with pytest.warns(UserWarning, match="layer.bias|layer.kernel"):
        check(model, optax.adafactor(1e-2))


def trees(seed: int) -> tuple[dict, dict]:
    """Parameter values as lists of layers, and the same values stacked."""
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)}
    groups, joined = {}, {}
    for index, count in enumerate((4, 2)):
        layers = [
            {k: 3.0**i * rng.normal(size=s) for k, s in shapes.items()}
            for i in range(count)
        ]
        layers = jax.tree.map(jnp.float32, layers)
        groups[index] = {i: {"linear": x} for i, x in enumerate(layers)}
        layer = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
        joined[index] = {"layer": {"linear": layer}}
    embed = {
        k: jnp.float32(rng.normal(size=(4, *s)[-len(s) :])) for k, s in shapes.items()
    }
    return {"embed": embed, "groups": groups}, {"embed": embed, "groups": joined}


def join(tree: dict) -> dict:
    """Stacks the layers of a tree of lists."""
    groups = {
        index: {"layer": jax.tree.map(lambda *xs: jnp.stack(xs), *layers.values())}
        for index, layers in tree["groups"].items()
    }
    return {"embed": tree["embed"], "groups": groups}


@pytest.mark.parametrize("name", MIXING)
def test_updates_match_list_of_layers(name: str) -> None:
    plain = optax.with_extra_args_support(MIXING[name])
    wrapped = optax.with_extra_args_support(
        as_transformation(by_layer(MIXING[name]), abstract_model(stacked, nnx.Rngs(0)))
    )

    @jax.jit
    def run(params: list, grads: list) -> tuple[Any, Any]:
        found = []
        for tx, x, own in zip(
            (plain, wrapped), params, zip(*grads, strict=True), strict=True
        ):
            state = tx.init(x)
            for g in own:
                updates, state = tx.update(g, state, x)
                x = optax.apply_updates(x, updates)
            found.append(x)
        return join(found[0]), found[1]

    expected, found = run(list(trees(0)), [trees(1), trees(2), trees(3)])
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(expected),
        jax.tree.leaves(found),
        strict=True,
    ):
        np.testing.assert_allclose(y, x, rtol=2e-5, atol=1e-6, err_msg=str(path))


@pytest.mark.parametrize("name", MIXING)
def test_maps_layers_unless_arrays_depend_on_each_other(name: str) -> None:
    model, (_, params) = abstract_model(stacked, nnx.Rngs(0)), trees(0)
    tx = as_transformation(by_layer(MIXING[name]), model)
    state = jax.eval_shape(tx.init, params)
    program = str(jax.make_jaxpr(tx.update)(params, state, params))
    assert ("stack[" in program) == (name == "with a global norm")


DATA = [
    np.random.default_rng(seed).normal(size=(16, 4)).astype(np.float32)
    for seed in range(4)
]


def squares(model: Any, batch: np.ndarray) -> jax.Array:
    return ((model(batch) - 1) ** 2).mean()


class Piped(nnx.Module):
    """A model with one group of blocks."""

    def __init__(self, rngs: nnx.Rngs, *, stacked: bool) -> None:
        self.embed = nnx.Linear(4, WIDTH, rngs=rngs)
        blocks = [Block(rngs, 0.5 + 0.5 * index) for index in range(4)]
        self.blocks = nnx.List([Stack.of(blocks)] if stacked else blocks)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


STRATEGIES = {
    "fsdp": FSDP(min_size=0),
    "pipeline": Composite(Pipeline(2), FSDP(min_size=0)),
    "tensor": Composite(TensorParallel(2), FSDP(2, min_size=0), DataParallel()),
}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("fsdp", "adafactor"),
        ("pipeline", "lamb"),
        ("pipeline", "with a global norm"),
        ("tensor", "adafactor"),
    ],
)
def test_training_matches_list_on_one_device(
    name: str, optimizer: str, tmp_path: Path
) -> None:
    def train(stacked: bool, strategy: Any, tx: Any, steps: int, **options: Any) -> Any:
        trainer = Trainer(
            lambda rngs: Piped(rngs, stacked=stacked),
            tx,
            squares,
            strategy=strategy,
            num_microbatches=2,
            loggers=(),
            names=PathNames((r"linear\.kernel", ("embed", "mlp"))),
            **options,
        )
        return trainer, trainer.fit(DATA, steps)["loss"]

    tx = MIXING[optimizer]
    with warnings.catch_warnings():
        one = {"devices": jax.devices()[:1]}
        _, expected = train(False, DataParallel(1), tx, 4, **one)
        saved = {"checkpoint": Checkpoint(tmp_path, every=2)}
        first, losses = train(True, STRATEGIES[name], by_layer(tx), 2, **saved)
        np.testing.assert_allclose(losses, expected[:2], rtol=1e-5)
        # The state is sharded like its parameters, and restores under other strategies.
        planned = first._run.plan.shardings.opt_state
        for x, sharding in zip(
            jax.tree.leaves(first.state.opt_state),
            jax.tree.leaves(planned),
            strict=True,
        ):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
        _, losses = train(
            True,
            FSDP(2),
            by_layer(tx),
            4,
            devices=jax.devices()[:2],
            **saved,
        )
        np.testing.assert_allclose(losses, expected[2:], rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by_layer(optax.lamb), "by_layer got a function. It must be an Optax"),
        (lambda: by_layer(lamb).init({}), "by_layer is used outside a Trainer"),
    ],
)
def test_wrong_uses_raise(make: Any, message: str) -> None:
    with pytest.raises(OptimizerError, match=re.escape(message)):
        make()
