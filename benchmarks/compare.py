"""One training step in five variants: ours, by hand twice, `nnx.jit`, and scalax.

All train the same GPT with the same batch, optimizer and initial parameters, under FSDP
over 8 devices. The table has times, bytes per device, collectives, and the lines that a
user writes: the lines of the function that makes the step, without blank lines,
comments and docstrings.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from benchmarks import peers
from benchmarks.overhead import CONFIG, TX, make_batch
from benchmarks.peers import (
    State,
    Step,
    copied,
    copy_state,
    make_gpt_step,
    make_nnx_jit_step,
)
from benchmarks.timing import Ratio, Runner, Table, interleave
from nnx_parallel import FSDP, Trainer, audit
from nnx_parallel.audit.collectives import KINDS
from nnx_parallel.models import GPT, next_token_loss

CODE: dict[str, tuple[Callable, ...]] = {}
"""The functions that a user of each variant writes, besides the model and its loss."""


def measure(rounds: int = 100) -> Table:
    """Returns times as ratios to the step by hand, and counts that need no clock."""
    table = Table(f"One step, several ways: a GPT of {CONFIG.num_params:,} parameters")
    trainer = ours()
    batch, model = make_batch(trainer, CONFIG), trainer.model
    assert isinstance(model, GPT)
    start = copy_state(trainer.state)
    steps: dict[str, tuple[Any, Any]] = {
        "ours": (trainer.train_step, trainer.state),
        "by hand": (make_gpt_step(model, TX, start), start),
        "by hand again": (make_gpt_step(model, TX, start), copied(start)),
        "nnx.jit": make_nnx_jit_step(model, TX),
        "scalax": scalax(model, copied(start)),
    }
    for name, (step, state) in steps.items():
        if name != "by hand again":
            _count(table, name, step, state, batch)
    runs = {name: Runner(*pair, batch) for name, pair in steps.items()}
    seconds = interleave(runs, rounds)
    for name, values in seconds.items():
        table.add(f"{name}: ms", 1e3 * float(np.median(values)))
        if name != "by hand":
            table.add(f"{name} / by hand", Ratio.of(values, seconds["by hand"]))
    return table


def ours() -> Trainer:
    """This library."""
    return Trainer(
        lambda rngs: GPT(CONFIG, rngs=rngs),
        TX,
        next_token_loss,
        strategy=FSDP(),
        loggers=(),
    )


def scalax(model: GPT, state: State) -> tuple[Step, State]:
    """scalax: `sjit` with its FSDP rule for the state, the batch by rows."""
    from scalax.sharding import FSDPShardingRule, MeshShardingHelper  # pyright: ignore[reportMissingImports]

    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    helper = MeshShardingHelper([-1], ["fsdp"])
    rule = FSDPShardingRule(min_fsdp_size=1024)

    @partial(
        helper.sjit,
        in_shardings=(rule, P("fsdp")),
        out_shardings=(rule, P()),
        donate_argnums=0,
    )
    def step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        def loss(params: Any) -> jax.Array:
            model = nnx.merge(graphdef, params, rest, copy=True)
            return next_token_loss(model, batch).value

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": value}

    state = {name: state[name] for name in ("params", "opt_state")}
    shardings = helper.match_sharding_rule(rule, state)
    return step, jax.device_put(jax.device_get(state), shardings)


CODE.update(
    {
        "ours": (ours,),
        "nnx.jit": (peers.nnx_jit,),
        "scalax": (scalax,),
        "by hand": (
            peers.make_gpt_step,
            peers.make_step,
            peers.gathered,
            peers._gather_forward,  # pyright: ignore[reportPrivateUsage]
            peers._gather_backward,  # pyright: ignore[reportPrivateUsage]
        ),
    }
)


def _count(table: Table, name: str, step: Any, state: Any, batch: Any) -> None:
    held = nnx.state(state) if name == "nnx.jit" else state
    if name == "ours":
        held = (state.params, state.opt_state)
    elif name == "by hand":
        held = (state["params"], state["opt_state"])
    arrays = [x for x in jax.tree.leaves(held) if isinstance(x, jax.Array)]
    held_bytes = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    table.add(f"{name}: bytes of state per device", held_bytes)
    report = audit(step.lower(state, batch).compile())
    sent = {kind: report.count(kind) for kind in KINDS if report.count(kind)}
    table.add(f"{name}: collectives", sent)
    table.add(f"{name}: bytes in collectives", report.bytes())
    table.add(f"{name}: temporary bytes", report.temporary_bytes)
    table.add(f"{name}: lines of user code", sum(map(count_lines, CODE[name])))


def count_lines(function: Callable) -> int:
    """Lines of a function's source that hold code, written in one style."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return len(ast.unparse(tree).splitlines())
