"""LoRA: the numbers of the factors, their placement, and merging."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import ModelError, RuleError
from nnx_parallel.layers import Dense, Stack, lora, merge_lora
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding import PathNames
from tests.parity.checks import assert_gradients_close, assert_params_close
from tests.parity.runs import first_gradients, recording, to_host

RANK, ALPHA = 3, 6.0

LAYERS: dict[str, tuple[Callable[[nnx.Rngs], Any], tuple[int, ...]]] = {
    "dense": (
        lambda rngs: Dense(
            {"embed": 8}, {"heads": 2, "head_dim": 4}, rngs=rngs, use_bias=True
        ),
        (2, 5, 8),
    ),
    "dense, two dims in": (
        lambda rngs: Dense({"heads": 2, "head_dim": 4}, {"embed": 8}, rngs=rngs),
        (2, 5, 2, 4),
    ),
    "linear": (lambda rngs: nnx.Linear(8, 6, rngs=rngs), (2, 8)),
    "general": (
        lambda rngs: nnx.LinearGeneral((3, 8), (2, 4), axis=(1, -1), rngs=rngs),
        (2, 3, 5, 8),
    ),
    "stack": (
        lambda rngs: Stack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 3, rngs=rngs),
        (2, 8),
    ),
}


def factors(model: nnx.Module) -> dict:
    return dict(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))


def trained(model: nnx.Module) -> nnx.Module:
    """The model with random second factors, which are zeros before training."""
    for path, variable in factors(model).items():
        if path[-1] == "lora_b":
            key = jax.random.key(len(path))
            variable.set_value(jax.random.normal(key, variable.get_value().shape) / 4)
    return model


@pytest.mark.parametrize("name", LAYERS)
def test_merged_layer_matches_factors(name: str) -> None:
    build, shape = LAYERS[name]
    layer, x = build(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), shape)
    model = lora(layer, targets="", rank=RANK, alpha=ALPHA)
    # The adapted model starts with the same outputs; the original layer is unchanged.
    np.testing.assert_array_equal(model(x), layer(x))
    assert not factors(layer)
    out = trained(model)(x)
    assert not np.allclose(out, layer(x), atol=0.1)
    merged = merge_lora(model)
    np.testing.assert_allclose(merged(x), out, rtol=1e-5, atol=1e-5)
    assert jax.tree.structure(nnx.state(merged)) == jax.tree.structure(nnx.state(layer))
    np.testing.assert_array_equal(model(x), out)  # the merge copied the model


def test_output_matches_formula_of_paper() -> None:
    layer, x = nnx.Linear(8, 6, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    model: Any = trained(lora(layer, targets="", rank=RANK, alpha=ALPHA))
    a, b = (np.asarray(model.lora_a[...]), np.asarray(model.lora_b[...]))
    expected = np.asarray(layer(x)) + ALPHA / RANK * (x @ a) @ b
    np.testing.assert_allclose(model(x), expected, rtol=1e-5)
    # PEFT's initializer is kaiming_uniform with a = sqrt(5): within 1 / sqrt(fan_in).
    assert 0.2 < np.abs(a).max() <= 8**-0.5


class Classifier(nnx.Module):
    """Stock layers, whose dims are named from outside."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attention(x)
        return self.embed.attend(x + self.down(jax.nn.gelu(self.up(x))))


def classifier_loss(model: Any, batch: jax.Array) -> jax.Array:
    logits, labels = model(batch[:, :-1]), batch[:, 1:]
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


NAMES = PathNames(
    (r"(query|key|value)\.kernel", ("embed", "heads", "head_dim")),
    (r"attention\.out\.kernel", ("heads", "head_dim", "embed")),
    (r"up\.kernel", ("embed", "mlp")),
    (r"down\.kernel", ("mlp", "embed")),
)
CONFIG = GPTConfig.tiny_llama(num_layers=2, vocab_size=32, seq_len=16, embed_dim=32)
MODELS: dict[str, tuple[Any, Any, str, PathNames | None]] = {
    "gpt": (
        lambda rngs: GPT(CONFIG, rngs=rngs),
        next_token_loss,
        r"attention\.(query|value|out)|mlp",
        None,
    ),
    "stock": (Classifier, classifier_loss, r"query|out|up|down", NAMES),
}
STRATEGIES: dict[str, tuple[Strategy, int]] = {
    "alone": (DataParallel(1), 1),
    "data": (DataParallel(), 8),
    "fsdp": (FSDP(min_size=0), 8),
    "tensor": (Composite(TensorParallel(2, sequence=True), FSDP(min_size=0)), 8),
    "pipeline": (Pipeline(2), 2),
}
QUICK = {("stock", "tensor")}
BATCHES = [
    np.random.default_rng(i).integers(0, 32, (16, 17), dtype=np.int32) for i in range(3)
]


def make_trainer(model: str, strategy: str) -> Trainer:
    build, loss, targets, names = MODELS[model]
    placed, num_devices = STRATEGIES[strategy]
    return Trainer(
        lora(build, targets=targets, rank=RANK, alpha=ALPHA),
        recording(optax.adam(1e-2, eps=1e-3)),
        loss,
        strategy=placed,
        names=names,
        wrt=nnx.LoRAParam,
        num_microbatches=2 if strategy == "pipeline" else 1,
        devices=jax.devices()[:num_devices],
        loggers=(),
    )


@pytest.fixture(autouse=True)
def _as_others_run_them() -> Iterator[None]:
    # Flax's attention combines masks of different ranks.
    with jax.numpy_rank_promotion("allow"):
        yield


@cache
def trained_alone(model: str) -> tuple[dict, np.ndarray, dict]:
    trainer = make_trainer(model, "alone")
    gradients = first_gradients(trainer, BATCHES[0])
    losses = trainer.fit(BATCHES, num_steps=3)["loss"]
    return gradients, losses, to_host(nnx.to_pure_dict(nnx.state(trainer.model)))


def pairs() -> list[Any]:
    return [
        pytest.param(m, s, marks=() if (m, s) in QUICK else pytest.mark.deep)
        for m in MODELS
        for s in STRATEGIES
        # The stock model has no list of equal blocks.
        if s != "alone" and (m, s) != ("stock", "pipeline")
    ]


@pytest.mark.parametrize(("model", "strategy"), pairs())
def test_training_matches_one_device(model: str, strategy: str) -> None:
    gradients, losses, expected = trained_alone(model)
    assert losses[-1] < losses[0] - 1e-3
    trainer = make_trainer(model, strategy)
    start = to_host(nnx.to_pure_dict(nnx.state(trainer.model)))
    assert_gradients_close(first_gradients(trainer, BATCHES[0]), gradients)
    found = trainer.fit(BATCHES, num_steps=3)["loss"]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    after = to_host(nnx.to_pure_dict(nnx.state(trainer.model)))
    assert_params_close(after, expected)
    # The base is bit for bit unchanged; every factor has changed.
    for path, x in start.items():
        is_same = np.array_equal(x, after[path])
        assert is_same != ("lora_" in path), path
    # Adam has two moments and a count, only for the factors. `recording` adds the
    # gradients.
    adapted = nnx.state(trainer.model, nnx.LoRAParam)
    num = sum(x.size for x in jax.tree.leaves(adapted))
    assert sum(x.size for x in jax.tree.leaves(trainer.state.opt_state)) == 3 * num + 1
    tokens = BATCHES[0][:, :-1]
    merged = nnx.jit(merge_lora(trainer.model))(tokens)
    np.testing.assert_allclose(nnx.jit(trainer.model)(tokens), merged, atol=1e-5)


def test_factors_inherit_dim_names_of_kernel() -> None:
    strategy = Composite(TensorParallel(2), FSDP(4, min_size=0))
    build, loss, targets, names = MODELS["stock"]
    trainer = Trainer(
        lora(build, targets=targets, rank=8),
        optax.sgd(0.1),
        loss,
        strategy=strategy,
        names=names,
        wrt=nnx.LoRAParam,
        loggers=(),
    )
    found = {
        ".".join(map(str, path)): variable.get_metadata()["placement"].stored
        for path, variable in factors(trainer.model).items()
    }
    specs = {path: tuple(spec) for path, spec in found.items()}
    # Query: (embed, rank) and (rank, heads, head_dim). Down: (mlp, rank) and (rank,
    # embed).
    assert "tensor" not in str(specs["attention.query.lora_a"])
    assert specs["attention.query.lora_b"][1] == "tensor"
    assert specs["down.lora_a"][0] == "tensor"
    assert "tensor" not in str(specs["down.lora_b"])
    assert all("fsdp" in str(spec) for spec in specs.values())


class TestErrors:
    def test_unmatched_target_lists_layers(self) -> None:
        text = "lora(targets='q_proj') matches no layer of Classifier that can be "
        text += "adapted (Dense, Linear, LinearGeneral). Layers that can be adapted: "
        with pytest.raises(ModelError, match=re.escape(text) + ".*attention.query"):
            lora(Classifier(nnx.Rngs(0)), targets="q_proj")

    def test_invalid_regex_raises(self) -> None:
        with pytest.raises(RuleError, match=re.escape("lora(targets=) got '('")):
            lora(Classifier, targets="(")

    @pytest.mark.parametrize("rank", [0, 2.0])
    def test_rank_below_one_raises(self, rank: Any) -> None:
        text = f"lora(rank={rank}): it must be an int of at least 1."
        with pytest.raises(ValueError, match=re.escape(text)):
            lora(Classifier, targets="", rank=rank)

    def test_adapting_twice_raises(self) -> None:
        model = lora(Classifier(nnx.Rngs(0)), targets="up")
        with pytest.raises(ModelError, match=r"`up` already has adapters\. Merge them"):
            lora(model, targets="up|down")

    def test_layer_with_batch_axis_raises(self) -> None:
        layer = nnx.LinearGeneral(4, 4, batch_axis={0: 2}, rngs=nnx.Rngs(0))
        with pytest.raises(ModelError, match="`` has a kernel for each entry"):
            lora(layer, targets="")

    def test_merging_without_adapters_raises(self) -> None:
        with pytest.raises(ModelError, match="Classifier has no adapters to merge"):
            merge_lora(Classifier(nnx.Rngs(0)))
