"""FSDP gathers parameters at use, and activations stay sharded by rows.

Sharding the parameters is not enough. The partitioner may propagate their sharding to
the activations, which are then communicated instead of the weights. There are two
models: a GPT whose embedding is sharded by columns, where this happens, and a
transformer of stock layers without names or constraints. Each runs under `FSDP`; with
activations constrained by hand after every operation of the residual stream; and with
only the parameters sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.peers import copied, copy_state, make_step
from benchmarks.stock import Place, StockTransformer, anywhere, stock_loss
from benchmarks.timing import Ratio, Runner, Table, interleave
from nnx_parallel import FSDP, Trainer, audit
from nnx_parallel.audit.collectives import KINDS
from nnx_parallel.layers import linear_cross_entropy
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.models.gpt import Block
from nnx_parallel.sharding import PathRules

ROWS, SEQ, WIDTH, LAYERS, VOCAB = 32, 128, 128, 4, 256
TX = optax.adamw(1e-3)
CONFIG = GPTConfig.tiny(
    embed_dim=WIDTH, seq_len=SEQ, num_layers=LAYERS, vocab_size=VOCAB
)


def measure(rounds: int = 20) -> Table:
    """Ratios of step times, and the collectives of each step."""
    table = Table(
        f"FSDP(8) over others: {ROWS * SEQ} tokens, width {WIDTH}, {LAYERS} layers"
    )
    for case in CASES:
        _measure(table, case, rounds)
    return table


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its loss, and the same loss with constrained activations."""

    name: str
    build: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable[[Any, Any], Any]
    loss_placed: Callable[[Any, Any, Place], jax.Array]
    strategy: FSDP


def gpt_loss(model: GPT, batch: Mapping[str, jax.Array], place: Place) -> jax.Array:
    """`next_token_loss`, the residual stream written out and constrained by hand."""
    tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    assert model.positions is not None
    positions = jnp.arange(tokens.shape[1])[None]
    x = place(place(model.embed(tokens)) + model.positions(positions))
    block_def, blocks = nnx.split(model.blocks.layer)

    def run_block(x: jax.Array, arrays: Any) -> tuple[jax.Array, None]:
        block = nnx.merge(block_def, arrays)
        assert isinstance(block, Block)
        assert block.attention_norm is not None
        assert block.mlp_norm is not None
        attended, _ = block.attention(place(block.attention_norm(x)), 0, None)
        x = place(x + place(attended))
        mlp: Any = block.mlp
        return place(x + place(mlp(place(block.mlp_norm(x))))), None

    x, _ = jax.lax.scan(run_block, x, nnx.to_pure_dict(blocks))
    kernel, vocab_dim = model.head_kernel
    hidden = place(model.norm(x))
    return linear_cross_entropy(hidden, kernel, labels, vocab_dim=vocab_dim).value


CASES = (
    Case(
        name="GPT, embedding by columns",
        build=lambda rngs: GPT(CONFIG, rngs=rngs),
        loss=next_token_loss,
        loss_placed=gpt_loss,
        strategy=FSDP(rules=(PathRules((r"embedding", P(None, "fsdp"))),)),
    ),
    Case(
        name="stock transformer",
        build=lambda rngs: StockTransformer(VOCAB, WIDTH, LAYERS, 4, rngs=rngs),
        loss=stock_loss,
        loss_placed=stock_loss,
        strategy=FSDP(),
    ),
)


def _measure(table: Table, case: Case, rounds: int) -> None:
    trainer = Trainer(case.build, TX, case.loss, strategy=case.strategy, loggers=())
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, SEQ + 1), dtype=np.int32)
    batch = trainer.shard_batch({"tokens": tokens})
    rows = NamedSharding(trainer.mesh, P("fsdp"))
    steps = {
        "FSDP": (trainer.train_step, trainer.state),
        "placed by hand": _peer(
            case, trainer, lambda x: jax.lax.with_sharding_constraint(x, rows)
        ),
        "shardings alone": _peer(case, trainer, anywhere),
    }
    for name, (step, state) in steps.items():
        report = audit(step.lower(state, batch).compile())
        sent = {kind: report.count(kind) for kind in KINDS if report.count(kind)}
        table.add(f"{case.name}: collectives, {name}", sent)
    runs = {name: Runner(step, state, batch) for name, (step, state) in steps.items()}
    alone = runs.pop("shardings alone")
    seconds = interleave(runs, rounds, warm_up=2)
    by_hand = seconds["placed by hand"]
    table.add(f"{case.name}: placed by hand, ms", 1e3 * float(np.median(by_hand)))
    over_hand = Ratio.of(seconds["FSDP"], by_hand)
    table.add(f"{case.name}: FSDP / placed by hand", over_hand)
    both = {"placed by hand": runs["placed by hand"], "shardings alone": alone}
    seconds = interleave(both, max(6, rounds // 4), warm_up=1)
    bad = Ratio.of(seconds["shardings alone"], seconds["placed by hand"])
    table.add(f"{case.name}: shardings alone / placed by hand", bad)


def _peer(case: Case, trainer: Trainer, place: Place) -> tuple[Any, Any]:
    """A step without gathering, from the same state with the same shardings."""
    graphdef, _ = nnx.split(trainer.model)
    variables = copied(trainer.state.variables)

    def loss(params: Any, batch: Any) -> jax.Array:
        model = nnx.merge(graphdef, params, variables, copy=True)
        return case.loss_placed(model, batch, place)

    state = copy_state(trainer.state)
    return make_step(loss, TX, jax.tree.map(lambda x: x.sharding, state)), state
