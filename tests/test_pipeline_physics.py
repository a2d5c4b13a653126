"""A compiled pipeline computes nothing twice, spreads all work, and keeps little.

Read from the compiled step: FLOPs, conditionals, scratch memory, number of
instructions.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from benchmarks.peers import make_gpipe_step
from models import GPT, GPTConfig, next_token_loss
from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    GPipe,
    Interleaved,
    OneFOneB,
    Pipeline,
    Report,
    Schedule,
    Strategy,
    TensorParallel,
    ZeroBubble,
    audit,
)
from nnx_parallel.audit.hlo import parse
from nnx_parallel.pipeline.lifetimes import find_lifetimes
from nnx_parallel.state import init_state
from nnx_parallel.step import StepOptions, make_train_step
from tests.origins import origins
from tests.steps import QUICKLY, lower_step, plan_step

ROWS = 8  # of a microbatch
CONFIG = GPTConfig.tiny(
    num_layers=4, seq_len=16, embed_dim=32, vocab_size=64, tied=False, remat="full"
)
MAKERS = {
    "ours": lambda plan, num_microbatches: make_train_step(
        plan, next_token_loss, StepOptions(num_microbatches=num_microbatches)
    ),
    "gpipe by autodiff": lambda plan, num_microbatches: make_gpipe_step(
        plan, next_token_loss, num_microbatches
    ),
}


def build(config: GPTConfig) -> Callable[[nnx.Rngs], GPT]:
    return lambda rngs: GPT(config, rngs=rngs)


@cache
def compiled(
    config: GPTConfig, strategy: Strategy, num_microbatches: int, maker: str = "ours"
) -> jax.stages.Compiled:
    """A training step of AdamW, with as many rows in a microbatch whatever their number."""
    plan = plan_step(build(config), strategy)
    step = MAKERS[maker](plan, num_microbatches)
    lowered = lower_step(step, plan, ROWS * num_microbatches, config.seq_len)
    return lowered.compile(QUICKLY)


def branch_flops(report: Report) -> dict[str, float]:
    """FLOPs per device of each kind of slot and part around the stack, once."""
    return {each.scope: max(each.branch_flops) for each in report.conditionals}


def temporaries(*args, **kwargs) -> int:
    memory = compiled(*args, **kwargs).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


class TestZeroBubble:
    """The backward pass in two slots."""

    @pytest.mark.parametrize("stash", ["policy", "inputs"])
    @pytest.mark.parametrize(
        "config",
        [
            replace(CONFIG, remat="none"),
            CONFIG,
            GPTConfig.tiny_llama(num_layers=4, seq_len=16, embed_dim=32, remat="full"),
        ],
        ids=["gpt", "gpt-remat", "llama-remat"],
    )
    def test_no_product_is_computed_in_both(self, config, stash):
        joint = branch_flops(audit(compiled(config, Pipeline(4, stash=stash), 2)))
        strategy = Pipeline(4, ZeroBubble(), stash=stash)
        split = branch_flops(audit(compiled(config, strategy, 2)))
        both = split["backward_input"] + split["backward_weight"]
        assert both <= 1.02 * joint["backward"]
        assert split["forward"] == joint["forward"]
        # The weight slots are worth waiting for: half of all products, if nothing is
        # computed again.
        assert split["backward_weight"] >= 0.3 * both

    @pytest.mark.parametrize("num_stages", [2, 4, 8])
    def test_at_most_one_less_than_the_stages_wait(self, num_stages):
        table = ZeroBubble().table(num_stages, num_microbatches=32)
        made, used = table.backward_input.active, table.backward_weight.active
        waiting = np.cumsum(made.astype(int) - used, axis=0)
        assert waiting.max() == num_stages - 1
        assert find_lifetimes(table.ticks).pending.peak == num_stages


def shares(schedule: Schedule, num_stages: int, num_microbatches: int) -> dict:
    """Of all ticks, those in which a device has the slot itself, by kind."""
    table = schedule.table(num_stages, num_microbatches)
    whole = num_microbatches / table.num_ticks
    slots = ("forward", "backward_input", "backward_weight")
    found = dict.fromkeys(("before", "after", "before_backward"), whole)
    found |= {kind: float(getattr(table, kind).active[:, 0].mean()) for kind in slots}
    if not table.is_split:
        found["backward"] = found.pop("backward_input")
        del found["backward_weight"]
    return found


MESHES = {
    "pipe": Pipeline(4),
    "pipe_inputs": Pipeline(4, stash="inputs"),
    "pipe_zero_bubble": Pipeline(4, ZeroBubble()),
    "pipe_tensor_fsdp": Composite(Pipeline(2), TensorParallel(2), FSDP(2, min_size=0)),
}


class TestSpread:
    """Every device does its share of the layers and of what comes after them."""

    # The head has a third of the parameters that take part in products.
    CONFIG = replace(CONFIG, vocab_size=768)
    MICROBATCHES = 4

    @pytest.mark.parametrize("strategy", MESHES.values(), ids=MESHES.keys())
    def test_no_device_computes_what_others_do(self, strategy):
        config, count = self.CONFIG, self.MICROBATCHES
        head = config.vocab_size * config.embed_dim
        assert head == pytest.approx(config.num_product_params / 3)
        step = compiled(config, strategy, count)
        pipeline = strategy.pipeline
        assert pipeline is not None
        num_stages = strategy.axis_sizes["pipe"]
        taken = shares(pipeline.schedule, num_stages, count)
        flops = audit(step, taken=taken).flops
        whole = audit(compiled(config, DataParallel(1), count)).flops
        num_devices = parse(step.as_text() or "").num_devices
        again = self.rerun(config) if pipeline.stash == "inputs" else 0
        print(flops * num_devices / (whole + again))
        assert flops * num_devices <= 1.1 * (whole + again)

    def rerun(self, config: GPTConfig) -> float:
        """FLOPs of a second forward pass through the layers, without the head."""
        tokens = ROWS * self.MICROBATCHES * config.seq_len
        head = 6 * config.vocab_size * config.embed_dim
        return (config.flops_per_token(config.seq_len) - head) / 3 * tokens


SCHEDULES = {
    "gpipe": (GPipe(), {"backward"}),
    "1f1b": (OneFOneB(), {"backward"}),
    "interleaved": (Interleaved(2), {"backward"}),
    "zero_bubble": (ZeroBubble(), {"backward_input", "backward_weight"}),
}


class TestBranches:
    """All devices take the same branch: a collective in it meets all its peers."""

    @pytest.mark.parametrize(
        ("schedule", "backward"), SCHEDULES.values(), ids=SCHEDULES.keys()
    )
    def test_every_predicate_comes_from_the_table(self, schedule, backward):
        mesh = Composite(Pipeline(2, schedule), TensorParallel(2), FSDP(2, min_size=0))
        module = parse(compiled(CONFIG, mesh, 4).as_text() or "")
        found = predicates(module)
        # One for each kind of slot and each part around the stack.
        edges = {"before", "after", "before_backward"}
        assert sorted(found) == sorted({"forward"} | backward | edges)
        for scope, opcodes in found.items():
            print(scope, sorted(opcodes))
            assert "constant" in opcodes
            assert not opcodes & DIFFER, f"{scope}: {opcodes & DIFFER}"

    def test_a_predicate_that_differs_by_device_is_found(self):
        mesh = jax.make_mesh((8,), ("pipe",))

        def body(x: jax.Array) -> jax.Array:
            is_first = jax.lax.axis_index("pipe") == 0
            return jax.lax.cond(is_first, jax.numpy.sin, jax.numpy.cos, x)

        function = jax.shard_map(
            body, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe")
        )
        text = jax.jit(function).lower(jax.numpy.ones((8, 4))).compile().as_text()
        (opcodes,) = predicates(parse(text or "")).values()
        assert opcodes & DIFFER


# What gives devices different values, or values that come from the data.
DIFFER = {"partition-id", "replica-id", "parameter", "collective-permute", "all-to-all"}


def predicates(module) -> dict[str, set[str]]:
    """Opcodes of all that the predicate of each conditional comes from, by scope."""
    found = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "conditional":
                scope = instruction.source.rpartition("/")[0].rpartition("/")[2]
                assert scope not in found
                predicate = instruction.operands[0]
                found[scope] = origins(module, computation.name, predicate)
    return found


class TestMemory:
    """Scratch memory of a step, per device."""

    CONFIG = replace(CONFIG, num_layers=8, seq_len=64)
    STRATEGY = Pipeline(4, stash="inputs")

    def test_a_quarter_of_gpipe_by_autodiff(self):
        ours = temporaries(self.CONFIG, self.STRATEGY, 32)
        peer = temporaries(self.CONFIG, self.STRATEGY, 32, "gpipe by autodiff")
        print(ours, peer, ours / peer)
        assert ours <= peer / 4

    def test_the_peer_computes_the_same(self):
        plan = plan_step(build(self.CONFIG), self.STRATEGY)
        state = init_state(plan, build(self.CONFIG), nnx.Rngs(0), 0)
        rows = np.random.default_rng(0).integers(0, 64, (32 * ROWS, 65), np.int32)
        tokens = jax.device_put(
            rows, plan.layout.sharding(plan.layout.batch_spec(len(rows)))
        )
        found = []
        for maker in MAKERS:
            start = jax.device_put(jax.tree.map(np.asarray, state), plan.shardings)
            step = compiled(self.CONFIG, self.STRATEGY, 32, maker)
            found.append(step(start, {"tokens": tokens})[1])
        for name in ("loss", "grad_norm"):
            assert found[0][name] == pytest.approx(found[1][name], rel=1e-6)

    def test_it_does_not_grow_with_the_number_of_microbatches(self):
        """The whole batch is tokens, and each microbatch's loss and its weight."""
        few, some, many = (
            temporaries(self.CONFIG, self.STRATEGY, count) for count in (16, 32, 64)
        )
        tokens = ROWS * (self.CONFIG.seq_len + 1) * 4
        print(few, some, many, tokens)
        assert many - some <= 2 * 32 * tokens
        assert some - few <= 2 * 16 * tokens

    def test_it_grows_with_the_stages(self):
        """1F1B keeps 2 S - 1 inputs of a stage, each of a microbatch."""
        config = replace(self.CONFIG, seq_len=256)
        few, many = (
            temporaries(config, Pipeline(size, stash="inputs"), 32) for size in (2, 8)
        )
        print(few, many)


class TestCompileTime:
    """The size of a program, by its instructions: it is what compile time follows."""

    CONFIG = replace(CONFIG, num_layers=8)

    @pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubble()], ids=repr)
    def test_it_does_not_grow_with_microbatches(self, schedule):
        few, many = (self.size(Pipeline(4, schedule), count) for count in (8, 64))
        print(few, many)
        assert many == pytest.approx(few, rel=0.02)

    @pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubble()], ids=repr)
    def test_it_hardly_grows_with_stages(self, schedule):
        few, many = (self.size(Pipeline(size, schedule), 8) for size in (2, 8))
        print(few, many)
        assert many == pytest.approx(few, rel=0.1)

    def size(self, strategy: Strategy, num_microbatches: int) -> int:
        report = audit(compiled(self.CONFIG, strategy, num_microbatches))
        return sum(report.opcodes.values())
