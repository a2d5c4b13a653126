"""`remat="auto"`: the policy that keeps the most values and fits into memory."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel import FSDP, Player, Players, Trainer, plan
from nnx_parallel.layers import Save, Stack
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan.costs import Facts, trace_costs
from nnx_parallel.plan.parts import Parts
from nnx_parallel.plan.remedies import rank_remats
from nnx_parallel.training import auto_remat
from nnx_parallel.training.auto_remat import Choice, step_bytes
from tests.test_messages import Memory

pytestmark = pytest.mark.long

BATCH = {"x": np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)}
RANKED: dict[Any, float] = {"none": 100.0, "dots": 60.0, Save("a"): 30.0, "full": 20.0}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.middle = nnx.Linear(32, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = checkpoint_name(self.up(x), "hidden")
        hidden = self.middle(jnp.sin(hidden))
        for _ in range(4):  # values that only "none" keeps
            hidden = jnp.sin(hidden)
        return x + self.down(hidden)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = Stack(Block, 8, rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.blocks(x))


def loss(model: Model, batch: dict) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


def make_trainer(**options: Any) -> Trainer:
    given = {"loggers": (), "remat": "auto", **options}
    return Trainer(Model, optax.sgd(0.1), loss, strategy=FSDP(8), **given)


def programs_of(trainer: Trainer) -> Any:
    return vars(trainer)["_programs"]


def remat_of(trainer: Trainer) -> Any:
    return programs_of(trainer).options.remat


def needed(remat: Any, batch: Any = BATCH) -> int:
    """Returns the bytes that the compiled step needs under a policy."""
    trainer = make_trainer(remat=remat)
    step: Any = trainer.train_step
    lowered = step.lower(trainer.state, trainer.shard_batch(batch))
    found = step_bytes(lowered.compile())
    assert found is not None
    return found


@pytest.fixture
def limit_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the memory that devices report; devices of CPUs report none."""

    def limit(size: float) -> None:
        monkeypatch.setattr(auto_remat, "memory_limit", lambda device: size)

    return limit


def search(limit: float, needs: Mapping[Any, float | None]) -> tuple[Any, list[Any]]:
    choice, tried = Choice(ranked=RANKED, limit=limit), []
    while (remat := choice.next()) is not None:
        assert remat not in tried
        tried.append(remat)
        choice.note(remat, needs[remat])
    return choice.best, tried


@pytest.mark.parametrize(
    ("limit", "error", "best", "num_tried"),
    [
        (120, 1.0, "none", 1),
        (70, 1.0, "dots", 1),
        (35, 1.0, Save("a"), 1),
        (20, 1.0, "full", 1),
        (70, 1.5, Save("a"), 2),  # formulas that are too low
        (70, 0.6, "none", 2),  # and too high
        (25, 2.0, None, 1),
    ],
)
def test_search_compiles_few_steps(
    limit: float, error: float, best: Any, num_tried: int
) -> None:
    needs = {remat: size * error for remat, size in RANKED.items()}
    found, tried = search(limit, needs)
    assert (found, len(tried)) == (best, num_tried)


def test_search_goes_on_if_compiler_refuses_without_number() -> None:
    needs = {"none": None, "dots": None, Save("a"): 80.0, "full": 20.0}
    assert search(110, needs) == (Save("a"), ["none", "dots", Save("a")])


def test_ranked_policies_need_less_and_less_memory() -> None:
    ranked = rank_remats(make_trainer(), BATCH, "")
    first, *named, last = ranked
    assert (first, last) == ("none", "full")
    assert {*named} == {"dots", Save("hidden")}
    assert [*ranked.values()] == sorted(ranked.values(), reverse=True)


class Doubled(nnx.Module):
    """A block with two names for one product, and one that `Save` cannot keep."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = checkpoint_name(self.up(x), "a")
        hidden = checkpoint_name(jnp.roll(hidden, 1, -1) * 2, "b")
        for _ in range(3):
            hidden = jnp.sin(hidden)
        logits = checkpoint_name(self.down(hidden), "logits")
        return x + jnp.sin(logits)


class DoubledModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = Stack(Doubled, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks(x)


def test_costs_of_saved_values_are_traced_costs() -> None:
    trainer = Trainer(
        DoubledModel,
        optax.sgd(0.1),
        loss,
        strategy=FSDP(8),
        remat="auto",
        loggers=(),
    )
    parts = Parts.of(trainer, BATCH)
    facts = Facts.of(parts, ("none", "dots", "full"), "cpu")
    assert facts.row("full").names == ("a", "b", "logits")
    assert facts.row("full").logits is None
    found = facts.saves
    # A product that one of two names keeps is not kept again.
    last = [*found][-1]
    assert len(last.names) == len(found)
    assert not {"a", "b"} <= {*last.names}
    for save, costs in found.items():
        assert costs == trace_costs(parts, save, "cpu")
        assert costs.flops >= facts.row("none").flops
    assert next(iter(rank_remats(trainer, BATCH, ""))) == "none"


def test_fit_keeps_what_fits(limit_memory: Callable, capsys: Any) -> None:
    ranked = rank_remats(make_trainer(), BATCH, "")
    expected = make_trainer(remat="none").fit([BATCH] * 3, num_steps=3)["loss"]
    losses, chosen = [], []
    # Of all policies that fit into this memory, Save keeps the most.
    saved, dots = needed(Save("hidden")), needed("dots")
    assert needed("full") < saved < dots
    between = (saved + dots) / 2 / 0.97  # a part of the memory stays free
    for size in (2 * ranked["none"], between, 1):
        limit_memory(size)
        trainer = make_trainer(loggers=None)
        losses.append(trainer.fit([BATCH] * 3, num_steps=3)["loss"])
        chosen.append(remat_of(trainer))
        assert f"{chosen[-1]!r}" in capsys.readouterr().out
    np.testing.assert_allclose(losses, [expected] * 3, rtol=1e-5)
    assert chosen == ["none", Save("hidden"), "full"]


def test_devices_without_known_memory_keep_everything(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_remat, "_rankers", [])  # nothing is ranked
    trainer = make_trainer(loggers=None)
    trainer.fit([BATCH], num_steps=1)
    assert remat_of(trainer) == "none"
    assert "the memory of a cpu device is not known" in capsys.readouterr().out


def loss_of_rows(model: Model, batch: dict) -> jax.Array:
    return (model(batch["x"].reshape(4, 64, 16)) ** 2).mean()


def test_loss_that_needs_its_rows_is_not_ranked(
    limit_memory: Callable, capsys: Any
) -> None:
    given = {"strategy": FSDP(8), "loggers": None, "remat": "auto"}
    sizes = [needed_by_rows(remat) for remat in ("none", "dots", "full")]
    assert sizes == sorted(sizes, reverse=True)
    for limit, expected in ((1e12, "none"), (1.01 * sizes[1] / 0.97, "dots")):
        limit_memory(limit)
        trainer = Trainer(Model, optax.sgd(0.1), loss_of_rows, **given)
        trainer.fit([BATCH], num_steps=1)
        assert remat_of(trainer) == expected
        text = capsys.readouterr().out
        assert f"remat='auto' chose {expected!r}" in text
        assert "Formulas could not rank the policies" in text


def needed_by_rows(remat: Any) -> int:
    trainer = Trainer(
        Model,
        optax.sgd(0.1),
        loss_of_rows,
        strategy=FSDP(8),
        loggers=(),
        remat=remat,
    )
    step: Any = trainer.train_step
    lowered = step.lower(trainer.state, trainer.shard_batch(BATCH))
    return step_bytes(lowered.compile()) or 0


LARGER = {"x": np.concatenate([BATCH["x"]] * 16)}


def test_larger_batch_gets_another_policy(limit_memory: Callable) -> None:
    saved, dots = needed(Save("hidden"), LARGER), needed("dots", LARGER)
    assert needed("none") < saved < dots
    limit_memory((saved + dots) / 2 / 0.97)
    trainer = make_trainer()
    trainer.fit([BATCH], num_steps=1)
    assert remat_of(trainer) == "none"
    trainer.fit([LARGER] * 2, num_steps=2)
    assert remat_of(trainer) == Save("hidden")
    chosen = programs_of(trainer)._chosen.values()
    assert [each.programs.options.remat for each in chosen] == ["none", Save("hidden")]
    trainer.verify(BATCH)
    assert remat_of(trainer) == "none"


def test_unknown_memory_of_a_step_ends_the_search(
    limit_memory: Callable, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    limit_memory(1e12)
    monkeypatch.setattr(auto_remat, "step_bytes", lambda compiled, in_use: None)
    trainer = make_trainer(loggers=None)
    trainer.fit([BATCH], num_steps=1)
    assert remat_of(trainer) == "none"
    assert "the memory of a compiled step is not known" in capsys.readouterr().out


def test_step_without_memory_analysis_has_no_bytes() -> None:
    compiled: Any = SimpleNamespace(memory_analysis=lambda: None)
    assert step_bytes(compiled) is None


def test_other_arrays_on_the_device_count(
    limit_memory: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 2 * needed("none")
    limit_memory(limit)
    trainer = make_trainer()
    trainer.fit([BATCH], num_steps=1)
    assert remat_of(trainer) == "none"
    monkeypatch.setattr(auto_remat, "memory_in_use", lambda device: 0.9 * limit)
    trainer = make_trainer()
    trainer.fit([BATCH], num_steps=1)
    assert remat_of(trainer) != "none"


@pytest.mark.parametrize(
    ("text", "need"),
    [
        ("RESOURCE_EXHAUSTED: Used 3.0G of 2.0G hbm.", 3 * 2**30),
        ("(3.0G) exceeds available HBM (2.0G)", 3 * 2**30 + 7),
        ("RESOURCE_EXHAUSTED: too much", None),
    ],
)
def test_refusal_has_the_needed_bytes(text: str, need: float | None) -> None:
    assert auto_remat.refused_bytes(text, 7) == need


def test_arguments_of_a_step_are_counted() -> None:
    trainer = make_trainer(remat="none")
    state, batch = trainer.state, trainer.shard_batch(BATCH)
    step: Any = trainer.train_step
    memory = step.lower(state, batch).compile().memory_analysis()
    found = auto_remat.argument_bytes((state, batch))
    # The key is not an argument of this step, because nothing is random.
    assert found == pytest.approx(memory.argument_size_in_bytes, abs=64)


def test_model_without_stack_is_told_of_auto() -> None:
    trainer = Trainer(
        lambda rngs: nnx.Linear(16, 1, rngs=rngs),
        optax.sgd(0.1),
        loss,
        remat="auto",
        loggers=(),
    )
    with pytest.warns(UserWarning, match="remat='auto' acts on the blocks"):
        trainer.fit([BATCH], num_steps=1)
    assert remat_of(trainer) == "none"


def test_refused_step_is_replaced(
    limit_memory: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(1e12)
    trainer, tried = make_trainer(), []
    start = type(programs_of(trainer)).start

    def refuses_two(self: Any, *args: Any) -> Any:
        if (remat := self.options.remat) != "auto":
            tried.append(remat)
            if len(tried) < 3:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too much")
        return start(self, *args)

    monkeypatch.setattr(type(programs_of(trainer)), "start", refuses_two)
    trainer.fit([BATCH], num_steps=1)
    assert tried[0] == "none"
    assert len({*map(repr, tried)}) == len(tried)
    # The policies that were tried after the two refused ones fit.
    kept = [x for x in rank_remats(trainer, BATCH, "") if x in tried[2:]]
    assert remat_of(trainer) == kept[0]


def test_custom_loop_and_verify_choose_too(
    limit_memory: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(1)
    trainer = make_trainer()
    trainer.verify(BATCH)
    assert remat_of(trainer) == "full"
    trainer = make_trainer()
    step, batch = trainer.train_step, trainer.shard_batch(BATCH)
    with pytest.warns(UserWarning, match="remat='auto': no policy fits"):
        trainer.state, metrics = step(trainer.state, batch)
    # The choice is made once: the held step neither traces nor compiles again.
    monkeypatch.setattr(type(programs_of(trainer)), "start", None)
    for _ in range(2):
        trainer.state, metrics = step(trainer.state, batch)
    assert remat_of(trainer) == "full"
    assert trainer.train_step is step
    assert float(metrics["loss"]) > 0


@pytest.mark.parametrize(
    ("limit", "text", "policies"),
    [
        (1, "remat='auto': no policy fits. With {!r}", ["full", "none"]),
        (1e12, "remat='auto' chose {!r}: the step needs", ["none", "none"]),
    ],
)
def test_each_player_has_its_policy(
    limit_memory: Callable, limit: float, text: str, policies: list[str]
) -> None:
    limit_memory(limit)
    blocks, memory = nnx.All(nnx.Param, nnx.PathContains("blocks")), Memory()
    others = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("blocks")))
    players = {
        "one": Player(optax.sgd(0.1), loss, wrt=blocks),
        "two": Player(optax.sgd(0.1), loss, wrt=others),
    }
    trainer = Trainer(
        Model,
        Players(**players),
        strategy=FSDP(8),
        remat="auto",
        loggers=[memory],
    )
    trainer.fit([BATCH] * 2, num_steps=2)
    turns = programs_of(trainer).turns.values()
    # Gradients of the head need no values of the blocks.
    assert [each.options.remat for each in turns] == policies
    notes = [note for note in memory.messages if note.startswith("remat='auto'")]
    for note, remat in zip(notes, policies, strict=True):
        assert note.startswith(text.format(remat))


def test_plan_tries_all_levels_for_given_strategies() -> None:
    given = {"topology": "cpu:8", "batch": BATCH, "compile": 0}
    found = plan(make_trainer(), candidates=[FSDP(8)], **given)
    remats = [entry.candidate.remat for entry in found.entries]
    assert {*remats} == {"none", "dots", "full"}


def test_plan_tries_named_values_between_full_and_dots() -> None:
    config = GPTConfig.preset("llama3.2-1b")
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), next_token_loss
    )
    batch = {"tokens": jax.ShapeDtypeStruct((64, 8193), "int32")}
    found = plan(
        trainer,
        topology="h100:8",
        batch=batch,
        compile=0,
        fix={"fsdp": 8, "microbatches": 1, "precision": "mixed_bfloat16"},
    )
    assert found.best is not None
    assert isinstance(found.best.candidate.remat, Save)
    assert "Save('attention'" in found.best.candidate.code
