"""Names by path: another library's transformer is split like this library's."""

import os
import re
import subprocess
import sys
import warnings
from functools import partial
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
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
    audit,
)
from nnx_parallel.errors import ParallelWarning, SpecRankError
from nnx_parallel.layers import Stack, named
from nnx_parallel.sharding import TRANSFORMER_NAMES, PathNames, PathRules
from nnx_parallel.sharding.nnx_arrays import names_of, variables_of
from nnx_parallel.strategies import Claims
from tests.strangers.cases import CASES, stacked

LLAMA = CASES["llama"]  # made of stock modules without names
TOKENS = np.random.default_rng(0).integers(64, size=(8, 17), dtype=np.int32)
BATCH = {"tokens": TOKENS}


@jax.numpy_rank_promotion("allow")
def train(strategy: Strategy, **options: Any) -> tuple[np.ndarray, float, Trainer]:
    """Returns three losses, a step's FLOPs per device, and the Trainer."""
    sizes = [size or 1 for size in strategy.axis_sizes.values()]
    trainer = Trainer(
        partial(stacked, LLAMA),
        optax.sgd(0.5),
        LLAMA.loss,
        strategy=strategy,
        num_microbatches=2,
        devices=jax.devices()[: int(np.prod(sizes))],
        loggers=(),
        **options,
    )
    step: Any = trainer.train_step
    batch = trainer.shard_batch(BATCH)
    flops = audit(step.lower(trainer.state, batch).compile()).flops
    return trainer.fit([BATCH] * 3, num_steps=3)["loss"], flops, trainer


@pytest.fixture(scope="module")
def one_device() -> tuple[np.ndarray, float, Trainer]:
    return train(DataParallel(1))


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(TensorParallel(2), marks=pytest.mark.deep),
        Composite(TensorParallel(2), FSDP(2, min_size=0)),
        pytest.param(Composite(Pipeline(2), TensorParallel(2)), marks=pytest.mark.deep),
    ],
    ids=repr,
)
def test_unnamed_transformer_is_split_by_path_names(
    strategy: Strategy, one_device: tuple
) -> None:
    with warnings.catch_warnings():
        # There is no warning that the strategy has no effect.
        warnings.simplefilter("error")
        losses, flops, trainer = train(strategy, names=TRANSFORMER_NAMES)
    np.testing.assert_allclose(losses, one_device[0], rtol=1e-5)
    specs = {r.info.path: r.placement.used for r in trainer.describe().rows}
    pipe = "pipe" if "pipe" in trainer.mesh.shape else None
    assert specs["layers.0.layer.self_attn.q_proj.kernel"] == P(pipe, None, "tensor")
    assert specs["layers.0.layer.mlp.down_proj.kernel"] == P(pipe, "tensor")
    assert specs["embed_tokens.embedding"] == P("tensor")
    if pipe is None:  # a pipeline also computes masked slots
        assert flops == pytest.approx(one_device[1] / trainer.mesh.size, rel=0.05)


# Paths and shapes as in Tunix 0.1.7 (Llama 3, Qwen 2 and 3, Gemma), Bonsai (Qwen 3,
# Gemma 3, ViT, DINOv3, Whisper), Flax's example (Gemma), and the checkpoints of GPT-2
# and Llama.
PARAMETERS = {
    "embedder.input_embedding": ((64, 16), "vocab embed"),
    "embedder.embedding": ((64, 16), "vocab embed"),
    "embed_tokens.weight.embedding": ((64, 16), "vocab embed"),
    "transformer.wte.embedding": ((64, 16), "vocab embed"),
    "tok_embeddings.embedding": ((64, 16), "vocab embed"),
    "vision.embeddings.position_embedding.embedding": ((64, 16), ""),
    "layers.0.attn.q_proj.w": ((16, 4, 8), "embed heads head_dim"),
    "layers.0.attn.q_proj.kernel": ((16, 4, 8), "embed heads head_dim"),
    "layers.1.self_attn.q_proj.kernel": ((16, 32), "embed heads"),
    "layers.1.self_attn.q_proj.bias": ((32,), "heads"),
    "layers.0.attn.q_bias": ((32,), "heads"),
    "layers.0.attn.k_proj.w": ((16, 2, 8), "embed kv_heads head_dim"),
    "layers.1.self_attn.v_proj.kernel": ((16, 16), "embed kv_heads"),
    "layers.0.attn.v_bias": ((16,), "kv_heads"),
    "layers.0.attn.o_proj.w": ((4, 8, 16), "heads head_dim embed"),
    "layers.1.self_attn.o_proj.kernel": ((32, 16), "heads embed"),
    "layers.1.self_attn.out_proj.kernel": ((16, 16), "heads embed"),
    "layers.1.self_attn.out_proj.bias": ((16,), "embed"),
    "layers.0.attn.q_norm.w": ((8,), ""),
    "layers.0.attn._query_norm.scale": ((8,), ""),
    "layers.0.input_layernorm.w": ((16,), ""),
    "layers.0.mlp.gate_proj.kernel": ((16, 32), "embed mlp"),
    "layers.0.mlp.up_proj.kernel": ((16, 32), "embed mlp"),
    "layers.0.mlp.down_proj.kernel": ((32, 16), "mlp embed"),
    "layers.0.DenseReluDense.wi_0.kernel": ((16, 32), "embed mlp"),
    "layers.0.DenseReluDense.wo.kernel": ((32, 16), "mlp embed"),
    "layers.0.mlp.wo.kernel": ((32, 16), "mlp embed"),
    "layers.1.mlp.gate_proj": ((4, 16, 32), "expert embed mlp"),
    "layers.1.mlp.down_proj": ((4, 32, 16), "expert mlp embed"),
    "layers.1.mlp.router.kernel": ((16, 4), ""),
    "lm_head.w": ((16, 64), "embed vocab"),
    "lm_head.kernel": ((16, 64), "embed vocab"),
    "layers.2.attn.q_einsum.w": ((4, 16, 8), "heads embed head_dim"),
    "layers.2.attn.kv_einsum.kernel": ((2, 2, 16, 8), ". kv_heads embed head_dim"),
    "layers.2.attn.qkv_einsum.w": ((3, 4, 16, 8), ". heads embed head_dim"),
    "layers.2.attn.attn_vec_einsum.w": ((4, 8, 16), "heads head_dim embed"),
    "h.0.attn.c_attn.kernel": ((16, 48), "embed heads"),
    "h.0.attn.c_attn.bias": ((48,), "heads"),
    "h.0.attn.c_proj.kernel": ((16, 16), "heads embed"),
    "h.0.mlp.c_fc.kernel": ((16, 64), "embed mlp"),
    "h.0.mlp.c_fc.bias": ((64,), "mlp"),
    "h.0.mlp.c_proj.kernel": ((64, 16), "mlp embed"),
    "h.0.mlp.c_proj.bias": ((16,), "embed"),
    "encoder.0.attention.query.kernel": ((16, 4, 4), "embed heads head_dim"),
    "encoder.0.attention.query.bias": ((4, 4), "heads head_dim"),
    "encoder.0.attention.key.bias": ((4, 4), "kv_heads head_dim"),
    "encoder.0.attention.out.kernel": ((4, 4, 16), "heads head_dim embed"),
    "encoder.0.attention.out.bias": ((16,), "embed"),
    "encoder.0.linear1.kernel": ((16, 32), "embed mlp"),
    "encoder.0.linear1.bias": ((32,), "mlp"),
    "encoder.0.linear2.kernel": ((32, 16), "mlp embed"),
    "encoder.0.mlp.fc1.kernel": ((16, 32), "embed mlp"),
    "encoder.0.mlp.fc2.bias": ((16,), "embed"),
    "encoder.0.attn.qkv.kernel": ((16, 48), "embed heads"),
    "encoder.0.attn.proj.kernel": ((16, 16), "heads embed"),
    "patch_embed.proj.kernel": ((8, 8, 3, 16), ""),
    "classifier.kernel": ((16, 10), ""),
    "blocks.0.attention.wq.kernel": ((16, 16), "embed heads"),
    "blocks.0.attention.wo.kernel": ((16, 16), "heads embed"),
    "blocks.0.feed_forward.w1.kernel": ((16, 32), "embed mlp"),
    "blocks.0.feed_forward.w2.kernel": ((32, 16), "mlp embed"),
}


def tree(shapes: dict[str, tuple[int, ...]]) -> nnx.Module:
    """A model with parameters of these shapes, given by dotted path."""
    root = nnx.Dict()
    for path, shape in shapes.items():
        *parents, last = path.split(".")
        node: Any = root
        for part in parents:
            if part not in node:
                node[part] = nnx.Dict()
            node = node[part]
        node[last] = nnx.Param(jnp.zeros(shape))
    return root


def names_by_path(model: nnx.Module) -> dict[str, tuple]:
    return {".".join(map(str, p)): names_of(v) for p, v in variables_of(model)}


def test_transformer_names_cover_common_models() -> None:
    model = tree({path: shape for path, (shape, _) in PARAMETERS.items()})
    expected = {
        path: tuple(None if name == "." else name for name in names.split())
        for path, (_, names) in PARAMETERS.items()
    }
    assert names_by_path(TRANSFORMER_NAMES(model)) == expected


def test_path_names_replace_names_of_model() -> None:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        init = named(nnx.initializers.ones_init(), "fsdp", "tp")
        return Stack(
            lambda rngs: nnx.Linear(4, 8, kernel_init=init, rngs=rngs), 2, rngs=rngs
        )

    names = PathNames((r"kernel", ("embed", "mlp")), (r"bias", ("layers", "mlp")))
    model = build(nnx.Rngs(0))
    assert names(model) is model
    assert names_by_path(names(model)) == {
        "layer.kernel": ("layers", "embed", "mlp"),
        "layer.bias": ("layers", "mlp"),
    }


def test_first_pair_of_matching_rank_applies() -> None:
    names = PathNames(
        (r"w$", ("heads",)), (r"a", ("embed", "mlp")), (r"w$", ("mlp", None))
    )
    model = tree({"a.w": (4, 8), "b.w": (4, 8), "c.w": (4,)})
    assert names_by_path(names(model)) == {
        "a.w": ("embed", "mlp"),
        "b.w": ("mlp", None),
        "c.w": ("heads",),
    }


def test_names_of_another_rank_raise() -> None:
    model = tree({"up.kernel": (4, 8, 2)})
    text = (
        "`up.kernel` has shape (4, 8, 2), and none of [('embed', 'mlp')] has a name "
        "for each of its dims. "
    )
    pair = (r"up\.kernel", ("embed", "mlp"))
    with pytest.raises(
        SpecRankError, match=re.escape(f"{text}Add a pair with as many")
    ):
        PathNames(pair)(model)
    optional = PathNames(pair, optional=True)
    with pytest.warns(
        ParallelWarning, match=re.escape(f"{text}It keeps its present names")
    ):
        assert names_by_path(optional(model)) == {"up.kernel": ()}


def test_names_without_array_warn() -> None:
    model = tree({"up.kernel": (4, 8)})
    pairs = (r"up", ("embed", "mlp")), (r"down\.kernel", ("mlp", "embed"))
    message = (
        r"Names for paths ['down\\.kernel'] match no array, or earlier rules place"
    )
    with pytest.warns(ParallelWarning, match=re.escape(message)):
        PathNames(*pairs)(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PathNames(*pairs, optional=True)(model)
    with pytest.warns(ParallelWarning, match="match no array"):
        PathNames(pairs[1], optional=True)(model)


@pytest.mark.parametrize("names", ["embed", ("mlp", "mlp")])
def test_invalid_names_raise(names: Any) -> None:
    message = f"PathNames got {names!r} for 'up'. Give a tuple with one entry for"
    with pytest.raises(ValueError, match=re.escape(message)):
        PathNames((r"up", names))


def stock(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Dict(up_proj=nnx.Linear(64, 64, rngs=rngs))


def squares(model: Any, batch: jax.Array) -> jax.Array:
    return (model.up_proj(batch) ** 2).mean()


def trainer(strategy: Strategy, model: Any = stock, **options: Any) -> Trainer:
    return Trainer(
        model, optax.sgd(0.1), squares, strategy=strategy, loggers=(), **options
    )


def test_trainer_keeps_names_of_built_model() -> None:
    model = stock(nnx.Rngs(0))
    named_trainer = trainer(TensorParallel(), model, names=TRANSFORMER_NAMES)
    assert named_trainer.model.up_proj.kernel[...].sharding.spec == P(None, "tensor")  # pyright: ignore[reportAttributeAccessIssue]
    assert names_by_path(model) == {"up_proj.kernel": (), "up_proj.bias": ()}
    # A strategy's methods take a model that already has names.
    _, state = TensorParallel().split(TRANSFORMER_NAMES(model))
    assert state["up_proj"]["kernel"][...].sharding.spec == P(None, "tensor")


def test_rules_as_names_raise() -> None:
    message = "or a PathNames, such as TRANSFORMER_NAMES"
    with pytest.raises(TypeError, match=re.escape(message)):
        trainer(FSDP(), names=PathRules((r"up", P("fsdp"))))


# Strategies without effect


class Columns(Strategy):
    """A user's strategy for a logical axis that no model has."""

    def claims(self) -> Claims:
        return Claims(axis_sizes={"columns": None}, logical={"column": "columns"})


IDLE = {
    TensorParallel(8): (
        "TensorParallel(size=8) splits no parameter, because no dim has one of its "
        "names: 'heads', 'kv_heads', 'mlp', 'vocab'. The devices along tensor=8 repeat "
        "the same work, so each does 8 times its share."
    ),
    Composite(TensorParallel(4), FSDP()): (
        "TensorParallel(size=4) splits no parameter, because no dim has one of its "
        "names: 'heads', 'kv_heads', 'mlp', 'vocab'. The devices along tensor=4 repeat "
        "the same work, so each does 4 times its share."
    ),
    Columns(): (
        "Columns() splits no parameter, because no dim has one of its names: 'column'. "
        "The devices along columns=8 repeat the same work, so each does 8 times its "
        "share."
    ),
}
REMEDY = " Derive names, Trainer(..., names='auto', sample=batch); or name the dims by"


@pytest.mark.parametrize(("strategy", "finding"), IDLE.items(), ids=map(repr, IDLE))
def test_strategy_without_effect_warns(strategy: Strategy, finding: str) -> None:
    message = re.escape(finding + REMEDY)
    with pytest.warns(ParallelWarning, match=message):
        idle = trainer(strategy)
    with pytest.warns(ParallelWarning, match=message):
        strategy.init(stock, 0)
    with pytest.warns(ParallelWarning, match=message):
        strategy.split(stock(nnx.Rngs(0)))
    assert f"\nno effect: {finding}\n" in idle.describe().summary()


def test_mostly_unnamed_matrices_warn() -> None:
    def mostly(rngs: nnx.Rngs) -> nnx.Module:
        others = {f"mix{i}": nnx.Linear(64, 64, rngs=rngs) for i in range(3)}
        return nnx.Dict(up_proj=nnx.Linear(64, 64, rngs=rngs), **others)

    finding = (
        "TensorParallel(size=8) does not split 3 of 4 matrices (75% of all elements), "
        "such as `mix0.kernel`, `mix1.kernel`, `mix2.kernel`, because no dim has one "
        "of its names"
    )
    with pytest.warns(ParallelWarning, match=re.escape(finding)):
        whole = trainer(TensorParallel(8), mostly, names=TRANSFORMER_NAMES)
    assert f"\n{finding}" in whole.describe().summary()
    for spec in (P(None, "tensor"), P()):  # split, or replicated on purpose
        rules = PathRules((r"mix.*kernel", spec))
        strategy = TensorParallel(8, rules=(rules,))
        described = trainer(strategy, mostly, names=TRANSFORMER_NAMES).describe()
        assert "does not split" not in described.summary()


def test_tables_and_adapters_do_not_warn() -> None:
    def split(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Dict(
            up_proj=nnx.LoRALinear(8, 16, lora_rank=64, rngs=rngs),
            table=nnx.Embed(4096, 8, rngs=rngs),
            cache=nnx.Cache(jnp.zeros((8, 1024))),
        )

    described = trainer(TensorParallel(8), split, names=TRANSFORMER_NAMES).describe()
    assert "does not split" not in described.summary()


def test_fsdp_that_divides_no_dim_warns() -> None:
    def odd(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Dict(up_proj=nnx.Linear(33, 65, rngs=rngs))

    finding = (
        "FSDP() splits no parameter: each device holds the whole training state. The "
        "largest is `up_proj.kernel` (33, 65): fsdp=8 divides no free dim of [33, 65]."
    )
    with pytest.warns(ParallelWarning, match=re.escape(finding)):
        idle = trainer(FSDP(), odd)
    assert f"no effect: {finding}" in idle.describe().summary()


def test_single_device_warns() -> None:
    script = """
import warnings
import jax, optax
from flax import nnx
from nnx_parallel import FSDP, Composite, DataParallel, TensorParallel, Trainer
def trainer(**options):
    Trainer(lambda rngs: nnx.Linear(8, 8, rngs=rngs), optax.sgd(0.1), loss, **options)
def loss(model, batch):
    return model(batch).mean()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    for strategy in (None, DataParallel(), FSDP(1)):
        trainer(strategy=strategy)
    for strategy in (TensorParallel(2), Composite(TensorParallel(2), FSDP()), FSDP()):
        try:
            trainer(strategy=strategy)
        except Exception as found:
            print(f"{type(found).__name__}: {found}")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    simulated = (
        " To try it on one machine, call simulate_devices(2) before anything that "
        "touches a device."
    )
    assert done.stdout.splitlines() == [
        "MeshShapeError: Mesh tensor=2 covers 2 devices but 1 are available. Axis sizes"
        " must multiply to 1; leave one size out to infer it. Valid sizes of one axis: "
        f"[1].{simulated}",
        "MeshShapeError: Mesh fsdp=? * tensor=2 cannot cover 1 devices: the known sizes"
        " multiply to 2, which does not divide 1. Valid products of the known sizes: "
        f"[1].{simulated}",
        "ParallelWarning: FSDP() takes all devices, but JAX has found only one, of "
        "platform 'cpu': nothing is split. To try it on 8 simulated devices, call "
        "simulate_devices(8) before any code that uses a device. If one device is "
        "enough, set the sizes to 1.",
    ], done.stderr


def test_strategies_with_effect_do_not_warn() -> None:
    one = jax.devices()[:1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(DataParallel())
        trainer(FSDP())
        trainer(FSDP(min_size=10**6))  # the user's min_size keeps all arrays whole
        Trainer(  # too small for a warning
            lambda rngs: nnx.Linear(4, 1, rngs=rngs),
            optax.sgd(0.1),
            squares,
            strategy=FSDP(min_size=0),
            loggers=(),
        )
        trainer(TensorParallel(), devices=one)  # one device has no replicas
        trainer(TensorParallel(rules=(PathRules((r"kernel", P("tensor"))),)))
        trainer(Composite(TensorParallel(4), FSDP()), names=TRANSFORMER_NAMES)
