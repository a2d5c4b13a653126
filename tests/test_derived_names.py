"""Names that are derived from the loss are the names that an expert would give."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
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
    ExpertParallel,
    Strategy,
    TensorParallel,
    Trainer,
    audit,
)
from nnx_parallel.audit import Report
from nnx_parallel.errors import ParallelWarning
from nnx_parallel.plan import plan
from nnx_parallel.plan.parts import Parts
from nnx_parallel.precision import Precision
from nnx_parallel.sharding import PathNames, PathRules
from nnx_parallel.training import naming
from tests.parity.checks import assert_all_below
from tests.parity.runs import to_host
from tests.strangers import language, unnamed
from tests.strangers.cases import make_batches
from tests.strangers.unnamed import UNNAMED

pytestmark = pytest.mark.long

BATCHES = make_batches()
BOTH = Composite(TensorParallel(2), FSDP(min_size=0))
SPLIT = {"heads", "kv_heads", "mlp", "vocab", "expert"}


@pytest.fixture(autouse=True)
def _as_others_run_them() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


def make_trainer(case: Any, strategy: Strategy, names: Any = "auto") -> Trainer:
    sample: Any = {"sample": BATCHES[0]} if names == "auto" else {}
    sizes = [size or 4 for size in strategy.axis_sizes.values()]
    return Trainer(
        case.build,
        optax.sgd(0.1, momentum=0.9),
        case.loss,
        strategy=strategy,
        devices=jax.devices()[: int(np.prod(sizes))],
        names=names,
        loggers=(),
        **sample,
    )


def by_hand(pairs: unnamed.Pairs) -> PathNames:
    split = [(regex, text.split()) for regex, text in pairs]
    return PathNames(
        *((r, tuple(None if n == "-" else n for n in names)) for r, names in split)
    )


def names_of(trainer: Trainer) -> dict[str, tuple]:
    """The names that a strategy can split, by path."""
    rows = trainer.describe().rows
    found = {row.info.path: tuple(row.info.names or ()) for row in rows}
    kept = {p: tuple(n if n in SPLIT else None for n in x) for p, x in found.items()}
    return {path: names for path, names in kept.items() if any(names)}


@pytest.mark.parametrize("name", UNNAMED)
def test_derived_names_equal_names_by_hand(name: str) -> None:
    case = UNNAMED[name]
    derived = make_trainer(case, BOTH)  # a warning would be an error: none stays whole
    expected = make_trainer(case, BOTH, by_hand(case.pairs))
    assert names_of(derived) == names_of(expected)
    specs = [
        {row.info.path: row.placement.used for row in trainer.describe().rows}
        for trainer in (derived, expected)
    ]
    assert specs[0] == specs[1]


def audit_step(trainer: Trainer) -> Report:
    step: Any = trainer.train_step
    batch = trainer.shard_batch(BATCHES[0])
    return audit(step.lower(trainer.state, batch).compile())


def reasons(trainer: Trainer) -> dict[str, str]:
    return {row.info.path: row.placement.reason for row in trainer.describe().rows}


def test_description_gives_evidence() -> None:
    found = reasons(make_trainer(UNNAMED["gpt"], BOTH))
    out, prefix = "stages.0.mixer.dense.kernel", "stages.0.ff.layers."
    assert found[out] == (
        "name 'heads' -> tensor; fsdp: free dim 1; attention heads: reshape "
        f"(8, 12, 96) to (8, 12, 4, 24), contracted in `{out}`"
    )
    assert found[f"{prefix}2.kernel"] == (
        "name 'mlp' -> tensor; fsdp: free dim 1; hidden units: made by "
        f"`{prefix}0.kernel`, contracted in `{prefix}2.kernel`"
    )
    assert found["words.embedding"].endswith(
        "vocabulary: looked up in `words.embedding`, made by `words.embedding`"
    )


def build_thirds(rngs: nnx.Rngs) -> nnx.Module:
    return unnamed.Decoder(unnamed.Thirds, unnamed.sequential, rngs)


def test_kernel_that_needs_a_gather_is_not_split() -> None:
    case = replace(UNNAMED["gpt"], build=build_thirds)
    message = (
        "TensorParallel(size=2) does not split 4 of 8 matrices (33% of all FLOPs), "
        "such as `stages.0.mixer.query_key_value.kernel`"
    )
    with pytest.warns(ParallelWarning, match=re.escape(message)):
        trainer = make_trainer(case, BOTH)
    reason = reasons(trainer)["stages.0.mixer.query_key_value.kernel"]
    assert reason.endswith("not split: the program rearranges its entries (slice)")


def test_heads_that_do_not_divide_are_not_split() -> None:
    with pytest.warns(ParallelWarning, match="does not split 8 of 14 matrices"):
        trainer = make_trainer(UNNAMED["llama"], TensorParallel(4))
    reason = reasons(trainer)["layers.0.self_attn.q_proj.kernel"]
    assert reason == "not split: 4 devices do not divide its 2 entries"


def test_names_and_rules_of_the_user_come_first() -> None:
    names = PathNames((r"stages\.0.*0\.kernel", ("embed", None)))
    case = UNNAMED["gpt"]
    rules = PathRules((r"stages\.1.*0\.kernel", P()))
    with pytest.warns(ParallelWarning, match="`stages.0.ff.layers.0.kernel`, because"):
        trainer = make_trainer(
            replace(case, build=lambda rngs: names(case.build(rngs))),
            TensorParallel(2, rules=(rules,)),
        )
    specs = {row.info.path: row.placement.used for row in trainer.describe().rows}
    assert specs["stages.0.ff.layers.0.kernel"] == P()
    assert specs["stages.1.ff.layers.0.kernel"] == P()
    assert specs["stages.1.ff.layers.2.kernel"] == P("tensor")
    reason = reasons(trainer)["stages.1.ff.layers.0.kernel"]
    assert reason.startswith("path rule")
    assert "hidden units" not in reason


def test_derived_names_need_a_sample() -> None:
    given: Any = language.Llama, optax.sgd(0.1), language.next_token_loss
    with pytest.raises(ValueError, match=re.escape("pass sample=, a batch as fit")):
        Trainer(*given, names="auto")
    with pytest.raises(ValueError, match="sample= is only read with names='auto'"):
        Trainer(*given, sample=BATCHES[0])


TWO_SIZES = (TensorParallel(4), Composite(DataParallel(2), TensorParallel(2)))


@pytest.mark.parametrize("built_on", [DataParallel(1), TensorParallel(4)])
def test_plan_derives_names_for_each_layout(built_on: Strategy) -> None:
    case = UNNAMED["llama"]  # 2 heads of keys: 4 devices do not divide them
    parts = Parts.of(make_trainer(case, built_on), BATCHES[0])
    for strategy in TWO_SIZES:
        expected = make_trainer(case, strategy)
        placed = parts.on(expected.layout)
        assert placed.placements == vars(expected)["_run"].plan.placements


def test_plan_with_derived_names_does_not_depend_on_own_strategy() -> None:
    found = []
    for strategy in (DataParallel(1), TensorParallel(4)):
        trainer = make_trainer(UNNAMED["llama"], strategy)
        given = {"topology": "cpu:4", "batch": BATCHES[0], "compile": 0}
        both = plan(trainer, candidates=TWO_SIZES, **given).entries
        assert [entry.refused for entry in both] == ["", ""]
        listed = plan(trainer, **given).entries
        costs = {e.candidate: e.costs for e in (*both, *listed)}
        assert any("TensorParallel(size=2" in repr(each) for each in costs)
        found.append(costs)
    assert found[0] == found[1]


class Looped(nnx.Module):
    """Two products in a loop, whose carry has the dtype of the kernels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 32, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(32, 8, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return self.down(nnx.relu(self.up(x))), None

        return jax.lax.scan(body, x, None, length=2)[0]


def make_looped(loss: Any, **options: Any) -> Trainer:
    return Trainer(
        Looped,
        optax.sgd(0.1),
        loss,
        strategy=TensorParallel(2),
        devices=jax.devices()[:2],
        names="auto",
        sample={"x": np.ones((4, 8), np.float32)},
        loggers=(),
        **options,
    )


def squares(model: Any, batch: dict) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.PathContains("up")])
@pytest.mark.parametrize("field", ["params", "compute"])
def test_derived_names_use_dtypes_of_step(field: str, wrt: Any) -> None:
    dtypes: dict[str, Any] = {field: "bfloat16", "inputs": "bfloat16"}
    precision = Precision(**dtypes)
    trainer = make_looped(squares, precision=precision, wrt=wrt)
    found = names_of(trainer)
    assert found == {"up.kernel": (None, "mlp"), "down.kernel": ("mlp", None)}
    assert found == names_of(make_looped(squares))
    history = trainer.fit([{"x": np.ones((4, 8), np.float32)}], num_steps=1)
    assert np.isfinite(history["loss"]).all()


def test_derived_names_use_rows_of_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def loss(model: Any, batch: dict) -> jax.Array:
        seen.append(batch["x"].shape)
        return squares(model, batch)

    monkeypatch.setattr(naming, "data_share", lambda layout: (1, 3))
    trainer = make_looped(loss)
    assert seen == [(12, 8)]
    # The batch of a plan is already the global batch.
    batch = {"x": np.ones((24, 8), np.float32)}
    Parts.of(trainer, batch).named_on(trainer.layout)
    assert seen == [(12, 8), (24, 8)]


class VmappedExperts(nnx.Module):
    """Experts that `nnx.vmap` makes and calls; softmax weighs all of them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> unnamed.Gated:
            return unnamed.Gated(rngs)

        self.words = nnx.Embed(64, unnamed.WIDTH, rngs=rngs)
        self.router = unnamed.linear(unnamed.WIDTH, 4, rngs)
        self.experts = make(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.words(tokens)
        call = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))
        shares = nnx.softmax(self.router(x))
        x = x + jnp.einsum("ebtd,bte->btd", call(self.experts, x), shares)
        return self.words.attend(x)


EXPERTS = {
    "stacked": (UNNAMED["mixtral"].build, r"\.w[123]$"),
    "vmapped": (VmappedExperts, r"experts.*kernel$"),
}


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("are_derived", [True, False])
def test_experts_of_others_are_split(kind: str, are_derived: bool) -> None:
    build, regex = EXPERTS[kind]
    case = replace(UNNAMED["mixtral"], build=build)
    names = "auto" if are_derived else PathNames((regex, ("expert", "embed", "mlp")))
    strategy = Composite(ExpertParallel(4), FSDP(2))
    trainer = make_trainer(case, strategy, names)
    rows = [r for r in trainer.describe().rows if re.search(regex, r.info.path)]
    assert {row.placement.used for row in rows} == {P("expert")}
    if are_derived:  # the numbers do not depend on who gave the names
        losses = trainer.fit(BATCHES, num_steps=3)["loss"]
        single = make_trainer(case, DataParallel(1), None)
        expected = single.fit(BATCHES, num_steps=3)["loss"]
        np.testing.assert_allclose(losses, expected, rtol=2e-6)


@pytest.mark.deep
@pytest.mark.parametrize("name", UNNAMED)
def test_collectives_equal_names_by_hand(name: str) -> None:
    case = UNNAMED[name]
    found = audit_step(make_trainer(case, BOTH))
    expected = audit_step(make_trainer(case, BOTH, by_hand(case.pairs)))

    def collectives(report: Report) -> Counter:
        counts = Counter[tuple]()
        for each in report.collectives:
            counts[each.kind, each.axes, each.bytes_each] += each.count
        return counts

    assert collectives(found) == collectives(expected)
    assert found.bytes() == expected.bytes()
    assert found.flops == expected.flops


@pytest.mark.deep
@pytest.mark.parametrize("name", UNNAMED)
def test_step_has_only_the_sums_of_megatron(name: str) -> None:
    report = audit_step(make_trainer(UNNAMED[name], TensorParallel(2)))
    assert {(each.kind, each.axes) for each in report.collectives} == {
        ("all-reduce", ("tensor",))
    }


@cache
def one_device(name: str) -> tuple[np.ndarray, dict]:
    return train(name, DataParallel(1), None)


def train(name: str, strategy: Strategy, names: Any) -> tuple[np.ndarray, dict]:
    """Losses of three steps of SGD with momentum, and the parameters after them."""
    trainer = make_trainer(UNNAMED[name], strategy, names)
    losses = trainer.fit(BATCHES, num_steps=len(BATCHES))["loss"]
    return losses, to_host(trainer.state.params)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "gpt" else pytest.mark.deep)
        for name in UNNAMED
    ],
)
def test_derived_names_train_as_one_device(name: str) -> None:
    losses, params = train(name, BOTH, "auto")
    expected, expected_params = one_device(name)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    errors = {
        path: np.abs(params[path] - leaf).max() / max(np.abs(leaf).max(), 0.1)
        for path, leaf in expected_params.items()
    }
    assert_all_below(errors, 2e-6)
