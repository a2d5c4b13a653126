"""Remat by name and by JAX's policies: the same gradients, fewer values kept."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    OneFOneB,
    Pipeline,
    Strategy,
    TensorParallel,
)
from nnx_parallel.cli.plan import parse_fix
from nnx_parallel.errors import PipelineError, StackError
from nnx_parallel.layers import (
    Experts,
    Remat,
    Save,
    Stack,
    apply_remat,
    attention,
    check_remat,
    default_remat,
)
from nnx_parallel.layers.attention.kernels import AttentionCall, splash_attention
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan.candidates import Candidate
from nnx_parallel.programs import trace, walk
from nnx_parallel.training.model_flops import count_jaxpr_flops
from tests.parity.checks import assert_gradients_close
from tests.pipelines import make_trainer, on_one_device, one_step

CONFIG = GPTConfig.tiny_llama(num_layers=2, seq_len=16, embed_dim=32, window=4)
NAMES = ("query", "key", "value", "attention", "attention_out", "mlp_up", "mlp_gate")
STRATEGIES: dict[str, Strategy] = {
    "fsdp": FSDP(4, min_size=0),
    "prefetch": FSDP(4, min_size=0, prefetch="first"),
    "sequence": Composite(TensorParallel(2, sequence=True), FSDP(2, min_size=0)),
    "overlap": Composite(
        TensorParallel(2, sequence=True, overlap="ring"), FSDP(2, min_size=0)
    ),
    "context": Composite(ContextParallel(2), FSDP(2, min_size=0)),
    "pipeline": Composite(Pipeline(2, OneFOneB()), FSDP(2, min_size=0)),
}


def build(rngs: nnx.Rngs) -> GPT:
    return GPT(CONFIG, rngs=rngs)


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (16, 17), np.int32)


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "remat",
    [
        Save(*NAMES),
        pytest.param(jax.checkpoint_policies.dots_saveable, marks=pytest.mark.deep),
    ],
    ids=["Save", "dots_saveable"],
)
def test_gradients_match_one_device(strategy: str, remat: Remat) -> None:
    (expected, *_), *_ = on_one_device(build, next_token_loss, tokens, 1, 4, nnx.Param)
    trainer = make_trainer(build, next_token_loss, STRATEGIES[strategy], remat=remat)
    found, *_ = one_step(trainer, tokens())
    assert_gradients_close(found, expected)


@pytest.mark.parametrize("window", [None, 4])
def test_kept_attention_is_not_recomputed(window: int | None) -> None:
    """Attention with a window runs in blocks, without one in plain operations."""
    x, kernel = jnp.ones((1, 16, 2, 8)), jnp.ones((8, 8))

    def block(kernel: jax.Array) -> jax.Array:
        query, key, value = (x @ (kernel * i) for i in range(1, 4))
        return (attention(query, key, value, causal=True, window=window) ** 2).sum()

    def flops(remat: Remat) -> float:
        return count_jaxpr_flops(
            jax.make_jaxpr(jax.value_and_grad(apply_remat(block, remat)))(kernel).jaxpr
        )

    forward = count_jaxpr_flops(jax.make_jaxpr(block)(kernel).jaxpr)
    projections = 3 * 2 * 16 * 2 * 8 * 8
    assert flops("full") == flops("none") + forward
    everything = flops(Save("query", "key", "value", "attention"))
    # The gradient of plain attention needs the scores, which are computed again.
    again = 0 if window else (forward - projections) / 2
    assert everything == flops("none") + again
    assert flops(Save("attention")) == flops("none") + projections + again


def test_kernel_for_tpus_names_its_output() -> None:
    x = jnp.ones((1, 128, 2, 128))

    def gradient(x: jax.Array) -> Any:
        call = AttentionCall(query=x, key=x, value=x, causal=True)
        return jax.vjp(lambda x: splash_attention(call, interpret=True), x)[0]

    names = (eqn.params.get("name") for eqn, _ in walk(trace(gradient, x)))
    assert "attention" in {*names}


def test_policy_of_jax_keeps_no_gathered_parameters() -> None:
    """If a policy keeps everything, a step needs as much memory as with ``none``."""
    config = GPTConfig.tiny(num_layers=8, seq_len=8, embed_dim=64)

    def temporaries(remat: Remat) -> int:
        trainer = make_trainer(
            lambda rngs: GPT(config, rngs=rngs),
            next_token_loss,
            FSDP(8, min_size=0),
            num_microbatches=1,
            remat=remat,
        )
        batch = trainer.shard_batch(np.zeros((8, 9), np.int32))
        step: Any = trainer.train_step
        compiled = step.lower(trainer.state, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    found = temporaries(jax.checkpoint_policies.everything_saveable)
    assert found == pytest.approx(temporaries("none"), rel=0.01)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(checkpoint_name(self.linear(x), "product"))


def test_names_of_user_are_kept() -> None:
    x = jnp.ones((2, 4))

    def flops(remat: Remat) -> float:
        stack = Stack(Block, 3, rngs=nnx.Rngs(0), remat=remat)
        graph, state = nnx.split(stack)
        loss = jax.value_and_grad(lambda state: nnx.merge(graph, state)(x).sum())
        return count_jaxpr_flops(jax.make_jaxpr(loss)(state).jaxpr)

    assert flops(Save("product")) == flops("none") < flops("full")


def test_unknown_name_raises() -> None:
    stack = Stack(Block, 3, rngs=nnx.Rngs(0), remat=Save("prodct"))
    message = (
        "remat=Save('prodct'): no value of a block has the name 'prodct'. Did you mean "
        "'product'? Names of the blocks: ['product']."
    )
    with pytest.raises(StackError, match=re.escape(message)), default_remat("none"):
        stack(jnp.ones((2, 4)))


def test_stacks_of_a_model_may_have_different_names() -> None:
    """The experts have ``mlp_up``, and the other stack has ``product``."""
    remat = Save("product", "mlp_up")
    mixture = GPTConfig.tiny(
        num_layers=2,
        experts=Experts(num_experts=4, top_k=2, mlp_dim=32),
        activation="swiglu",
    )
    model = GPT(mixture, rngs=nnx.Rngs(0))
    with default_remat(remat):
        model(jnp.zeros((1, 4), jnp.int32))
        Stack(Block, 3, rngs=nnx.Rngs(0))(jnp.ones((2, 4)))


@pytest.mark.parametrize(
    ("remat", "moved"),
    [
        (Save("product"), 1),
        (jax.checkpoint_policies.everything_saveable, 1),
        (
            jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=["product"],
                offload_src="device",
                offload_dst="pinned_host",
            ),
            2,
        ),
    ],
    ids=["Save", "everything", "offloads"],
)
def test_inputs_of_blocks_are_on_host_under_every_policy(
    remat: Remat, moved: int
) -> None:
    graph, state = nnx.split(Stack(Block, 3, rngs=nnx.Rngs(0)))

    def loss(state: Any, x: jax.Array) -> jax.Array:
        with default_remat(remat, "block_inputs"):
            return nnx.merge(graph, state)(x).sum()

    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(state, jnp.ones((2, 4))))
    # Each value is moved to the host once, and back once.
    assert text.count("device_put[") == 2 * moved


def test_pipeline_refuses_policies_that_move_values_to_the_host() -> None:
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    )
    trainer = make_trainer(build, next_token_loss, STRATEGIES["pipeline"], remat=policy)
    with pytest.raises(PipelineError, match="A pipeline keeps the values"):
        trainer.fit([tokens()], 1)


@pytest.mark.parametrize(
    "value",
    [
        jax.checkpoint,
        nnx.remat,
        Save,
        jax.checkpoint_policies.save_only_these_names,
        jax.checkpoint_policies.offload_dot_with_no_batch_dims,
    ],
)
def test_functions_that_are_not_policies_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="Call a function that makes a policy"):
        check_remat(value)


def test_policies_of_jax_are_taken_and_written_by_name() -> None:
    policies = jax.checkpoint_policies
    made = policies.save_only_these_names("product")
    for policy in (policies.dots_saveable, policies.nothing_saveable, made):
        check_remat(policy)
    known, other = (
        Candidate(strategy=FSDP(8), remat=x).code
        for x in (policies.dots_saveable, made)
    )
    assert known.endswith("remat=jax.checkpoint_policies.dots_saveable")
    assert other.endswith("remat=policy")
    assert parse_fix(["remat=Save('a', b)"]) == {"remat": Save("a", "b")}


@pytest.mark.parametrize("names", [(), ("",), (["a", "b"],)])
def test_save_needs_names(names: tuple[Any, ...]) -> None:
    make: Any = partial(Save, *names)
    with pytest.raises(ValueError, match="Save needs one or more strings"):
        make()
