"""The ragged exchange: rows are sent to their expert's device and return."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    ExpertParallel,
    TensorParallel,
)
from nnx_parallel.collectives.ring import ExpertAxis, TokenExchange
from nnx_parallel.layers import Experts, MoE
from nnx_parallel.layers.experts.dispatch import SLACK
from nnx_parallel.layers.experts.ragged import NUM_CHUNKS, RowExchange
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding.constrain import using
from tests.parity.checks import assert_gradients_close, assert_same_numbers
from tests.parity.models import Case, token_batch
from tests.parity.runs import measure, to_host
from tests.tpus import numbers_from

pytestmark = pytest.mark.long

MIXTURE = Experts(num_experts=8, top_k=3, mlp_dim=16, scores="sigmoid", bias_rate=0.1)


def emulated(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """Emulates `jax.lax.ragged_all_to_all`, which CPUs lack, with full-size buffers.

    Each device sends a buffer with room for all rows to every other device. Offsets and
    sizes have the meaning that JAX documents: the sender gives the offset of its rows
    in the receiver's output.
    """
    rows = jnp.arange(operand.shape[0])

    def padded(start: jax.Array, size: jax.Array) -> jax.Array:
        picked = jnp.take(operand, start + rows, axis=0, mode="clip")
        return jnp.where((rows < size)[:, None], picked, 0)

    # (devices, rows, width): for each device, the rows for it, from index 0 on.
    sent = jax.vmap(padded)(input_offsets, send_sizes)
    exchange = partial(
        jax.lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, tiled=True
    )
    came, places, sizes = map(exchange, (sent, output_offsets, send_sizes))
    # The receive sizes must be equal to the senders' send sizes.
    sizes = jnp.where(sizes == recv_sizes, sizes, -1)
    for part, place, size in zip(came, places, sizes, strict=True):
        own = jnp.arange(len(output)) - place
        is_here = (own >= 0) & (own < size)
        shifted = jnp.take(part, own, axis=0, mode="clip")
        output = jnp.where(is_here[:, None], shifted, output)
    return output


def loss(
    graphdef: nnx.GraphDef, segments: Any, rest: Any, params: Any, x: jax.Array
) -> jax.Array:
    moe = nnx.merge(graphdef, params, rest, copy=True)
    y, _ = moe(x, segments=segments)
    return jnp.mean((y - 1) ** 2)


@pytest.mark.parametrize("skew", [0.0, 1.0, 100.0])
@pytest.mark.parametrize(
    "name", ["ep2", "ep8", "ep4_tp2", "ep2_dp2", "capacity", "padding"]
)
def test_ragged_exchange_matches_one_device(name, skew, monkeypatch):
    """Compares the loss and every gradient to 1e-5; the collective is emulated."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    strategies = {
        "ep8": ExpertParallel(8, "ragged"),
        "ep4_tp2": Composite(ExpertParallel(4, "ragged"), TensorParallel(2)),
        "ep2_dp2": Composite(ExpertParallel(2, "ragged"), DataParallel(2)),
    }
    strategy = strategies.get(name, ExpertParallel(2, "ragged"))
    factor = 1.0 if name in ("capacity", "padding") else None
    segments = jnp.array([[1, 1, 1, 0], [1, 2, 2, 2], [0, 0, 0, 0], [1, 1, 2, 0]] * 2)
    segments = segments if name == "padding" else None
    mixture = replace(MIXTURE, capacity_factor=factor)
    moe: Any = MoE(16, mixture, rngs=nnx.Rngs(0))
    moe.bias[...] = skew * jnp.arange(8.0)
    x = jax.random.normal(jax.random.key(1), (8, 4, 16))
    graphdef, params, rest = nnx.split(moe, nnx.Param, ...)
    sizes = [n or 1 for n in strategy.axis_sizes.values()]
    layout = strategy.layout(strategy.make_mesh(jax.devices()[: np.prod(sizes)]))

    # Biases are an argument, so that all skews share one program.
    def run(rest: Any, params: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(partial(loss, graphdef, segments), (1, 2))(
            rest, params, x
        )

    def split(rest: Any, params: Any, x: jax.Array) -> Any:
        with using(layout):
            return run(rest, params, x)

    expected = jax.jit(run)(rest, params, x)
    found = jax.jit(split)(rest, params, x)
    assert "ppermute" not in (text := str(jax.make_jaxpr(split)(rest, params, x)))
    assert "all_to_all" in text
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        of_ours, of_theirs = (
            to_host({"x": t} if isinstance(t, jax.Array) else nnx.to_pure_dict(t))
            for t in (ours, theirs)
        )
        assert_gradients_close(of_ours, of_theirs)


@pytest.mark.parametrize("room", [48, 5])
def test_every_row_arrives_once(room: int):
    """Each device has random numbers of rows for each expert, including none and all.

    Each receiver gets its rows in rounds of ``room``.
    """
    rng = np.random.default_rng(0)
    devices, experts, top = 4, 2, 12

    def plan_of(counts: Any, index: jax.Array, first: jax.Array) -> RowExchange:
        return RowExchange.plan(counts, index, experts, first, room)

    plan_all = jax.jit(jax.vmap(plan_of, (None, 0, None)))
    for _ in range(20):
        counts = np.zeros((devices, devices * experts), int)
        for row in counts:
            chosen = rng.choice(8, size=top, p=rng.dirichlet(np.full(8, 0.2)))
            row += np.bincount(chosen, minlength=8)
        arrived = [[[] for _ in range(devices)] for _ in range(devices)]
        for first in range(0, devices * top, room):
            of_all = jax.device_get(plan_all(counts, np.arange(devices), first))
            plans: list[RowExchange] = [
                jax.tree.map(lambda x, i=i: x[i], of_all) for i in range(devices)
            ]
            for to, plan in enumerate(plans):
                own = counts[:, to * experts : (to + 1) * experts]
                every = np.concatenate([np.repeat(np.arange(experts), c) for c in own])
                expected = every[first : first + room].tolist()
                received = plan.expert.tolist()
                assert received[: len(expected)] == expected
                assert set(received[len(expected) :]) <= {experts}
                assert plan.there.received.sum() == len(expected)
                place = 0
                for sender, other in enumerate(plans):
                    start, size = (int(x[to]) for x in other.there[:2])
                    if size:
                        assert other.there.places[to] == place
                    place += size
                    arrived[sender][to] += range(start, start + size)
                    # Each side knows the other side's transfers in both directions.
                    assert plan.there.received[sender] == size
                    assert plan.back.sizes[sender] == size == other.back.received[to]
                    assert plan.back.places[sender] == start
                    assert plan.back.starts[sender] == other.there.places[to]
        for sender, of_sender in enumerate(arrived):
            assert [n for rows in of_sender for n in rows] == list(range(top)), sender


@pytest.mark.slow
def test_scanned_stack_training_matches_one_device(monkeypatch):
    """Includes FSDP, remat, and a shared expert that runs beside the exchange."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    monkeypatch.setattr(ExpertAxis, "choose", lambda *_: ("ragged", "emulated"))
    config = GPTConfig.tiny_llama(
        vocab_size=64,
        seq_len=16,
        num_layers=2,
        embed_dim=32,
        mlp_dim=None,
        num_heads=2,
        num_kv_heads=2,
        remat="full",
        experts=replace(MIXTURE, shared_dim=16),
    )
    case = Case(
        build=lambda rngs: GPT(config, rngs=rngs),
        loss=next_token_loss,
        make_batch=token_batch,
    )
    strategy = Composite(ExpertParallel(4), FSDP(2, min_size=0))
    run = measure(case, strategy, jax.devices(), 1)
    expected = measure(case, DataParallel(1), jax.devices()[:1], 1)
    assert_same_numbers(run, expected)


def test_exchange_depends_on_platform_and_shape():
    strategy = ExpertParallel(8)
    mesh = strategy.make_mesh()
    axis = strategy.claims().experts
    assert axis is not None
    assert axis.choose(mesh, 2) == ("gather", "CPUs have no ragged all-to-all")
    assert ExpertAxis("expert", "ragged").choose(mesh, 2)[0] == "ragged"


def floats_in(jaxpr: Any, is_split: bool = False) -> Iterator[tuple[int, ...]]:
    """Shapes of the floating-point arrays inside of `shard_map` regions."""
    for eqn in jaxpr.eqns:
        inside = is_split or eqn.primitive.name == "shard_map"
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from floats_in(inner, inside)
        if is_split and eqn.primitive.name != "shard_map":
            found = [v.aval for v in eqn.outvars]
            yield from (a.shape for a in found if jnp.issubdtype(a.dtype, jnp.floating))


@pytest.mark.parametrize("exchange", ["gather", "ragged"])
def test_buffers_hold_device_share_and_slack(exchange: TokenExchange):
    """Checks forward and backward passes; all tokens might go to one device."""
    moe = MoE(32, replace(MIXTURE, mlp_dim=32), rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(moe, nnx.Param, ...)
    x = jnp.ones((8, 256, 32))
    strategy = ExpertParallel(8, exchange)
    layout = strategy.layout(strategy.make_mesh())

    def split(params: Any, x: jax.Array) -> Any:
        with using(layout):
            run = jax.value_and_grad(partial(loss, graphdef, None, rest), (0, 1))
            return run(params, x)

    jaxpr = jax.make_jaxpr(split)(params, x).jaxpr
    sizes = [math.prod(shape) for shape in floats_in(jaxpr)]
    room = int(256 * MIXTURE.top_k * 32 * (1 + SLACK))
    # "gather" gathers the tokens of all devices, but not their rows. "ragged" never has
    # all rows of one device, because it sends them in chunks.
    is_gather = exchange == "gather"
    room //= 1 if is_gather else NUM_CHUNKS
    assert max(sizes) == max(room, 8 * 256 * 32 if is_gather else 0)
    assert sizes.count(room) > 10


SCRIPT = """
import base64, re
from nnx_parallel.layers import Experts
experts = Experts(num_experts=8, top_k=2, mlp_dim=4096, shared_dim=2048)
config = GPTConfig.tiny_llama(
    num_layers=1, embed_dim=1024, num_heads=8, num_kv_heads=8, mlp_dim=None,
    vocab_size=256, seq_len=4096, experts=experts, remat="none")
strategy = Composite(ExpertParallel(4), DataParallel(4))
plan = plan_gpt(config, strategy, "v5p:2x2x4")
step = make_train_step(plan, next_token_loss, StepOptions())
compiled, text = compile_with_text(lower_gpt(step, plan, 32, 4096))
report = audit(text, mesh=plan.layout.mesh)
print(report.count("ragged-all-to-all"), report.bytes("ragged-all-to-all"))
exchanges = [c for c in report.collectives if c.kind == "ragged-all-to-all"]
print(sum(c.count for c in exchanges), sum(c.count * c.is_hidden for c in exchanges))
print(len(re.findall(r"\\[[0-9,]*(?:1024,4096|4096,1024)\\]\\S* all-gather", text)))
print(report.grouped_products, int(report.grouped_flops))
print(int(report.flops - report.grouped_flops))
kernels = [line for line in text.splitlines() if "ragged_dot_tiling" in line]
tiles = {int(re.search(r'ragged_dot_tiling="(\\d+)', line)[1]) for line in kernels}
bodies = [base64.b64decode(re.search(r'"body":"([^"]*)"', line)[1] + "==").decode()
          for line in kernels]
bounds = [re.search("iteration_bounds = array<i64: (.*?)>", b)[1] for b in bodies]
print(max(tiles), sum(str(-(2**63)) not in each for each in bounds))
rounds = audit(text, trips={"more_rounds": 1})
print(rounds.count("ragged-all-to-all"), rounds.grouped_products)
try:
    same = audit(compiled).collectives == report.collectives
except ProgramTextError as error:
    same = "after_optimizations.txt" in str(error)
print(int(same))
"""


@pytest.mark.deep
def test_tpu_program_exchanges_only_rows():
    """Rows are exchanged twice forward and twice backward; experts stay in place.

    Each exchange is split into chunks of tokens. Some chunks are sent during products.
    """
    numbers = iter(numbers_from(SCRIPT))
    tokens = 2 * 4096  # of one device
    rows = tokens * 2  # each token goes to 2 experts
    exchanges, sent = next(numbers), next(numbers)
    assert exchanges == 4 * NUM_CHUNKS
    assert sent == 4 * rows * 1024 * 2  # each row has 1024 numbers of bfloat16
    scheduled, hidden = next(numbers), next(numbers)
    assert scheduled == exchanges
    # In the forward pass, all exchanges are hidden except sending the first chunk and
    # returning the last one.
    assert hidden >= 2 * (NUM_CHUNKS - 1)
    assert next(numbers) == 0, "kernels were gathered"
    # The forward pass has three products, the backward pass six. jax 0.10's compiler
    # (libtpu 0.0.42) has no kernel for the gradients of kernels, which contract rows.
    # It multiplies the rows of all experts for each of the chip's 2 experts.
    products, grouped, others, tile, unbounded = (next(numbers) for _ in range(5))
    num_dense = 3 if jax.__version_info__ < (0, 12) else 0
    num_grouped = 9 - num_dense
    of_a_row = 2 * 1024 * 4096
    assert products == num_grouped * NUM_CHUNKS
    of_all_rows = of_a_row * rows * (1 + SLACK)
    assert grouped == num_grouped * of_all_rows
    # Attention without its kernel, the router, the head, and the shared expert.
    others_of_a_token = 1024 * (4 * 1024 + 8 + 256 + 3 * 2048)
    others -= int(num_dense * 2 * of_all_rows)
    assert others == 6 * tokens * others_of_a_token
    # A kernel loops over a number of tiles that it gets as an argument. In each chunk,
    # 2 experts have at most one more tile with rows than one expert would have.
    assert unbounded == 0
    run = num_grouped * of_a_row * (rows + NUM_CHUNKS * tile)
    assert others + run <= 1.02 * (others + num_grouped * of_a_row * rows)
    # A further overflow round sends and computes one chunk. The backward pass repeats
    # its forward pass, except for returning the first product's result.
    assert next(numbers) == exchanges + 5
    assert next(numbers) == products + 3 + num_grouped
    # jaxlib prints the program too. If jaxlib is too old for that, the error says so.
    assert next(numbers)
