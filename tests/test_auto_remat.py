"""`remat="auto"`: the policy that keeps the most values and fits into memory."""

from collections.abc import Callable, Mapping
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
from nnx_parallel.plan.remedies import rank_remats
from nnx_parallel.training import auto_remat
from nnx_parallel.training.auto_remat import Choice

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


def test_fit_keeps_what_fits(limit_memory: Callable, capsys: Any) -> None:
    ranked = rank_remats(make_trainer(), BATCH, "")
    expected = make_trainer(remat="none").fit([BATCH] * 3, num_steps=3)["loss"]
    losses, chosen = [], []
    between = (ranked[Save("hidden")] + ranked["full"]) / 2
    for size in (2 * ranked["none"], between, 1):
        limit_memory(size)
        trainer = make_trainer(loggers=None)
        losses.append(trainer.fit([BATCH] * 3, num_steps=3)["loss"])
        chosen.append(remat_of(trainer))
        assert f"{chosen[-1]!r}" in capsys.readouterr().out
    np.testing.assert_allclose(losses, [expected] * 3, rtol=1e-5)
    assert chosen[0] == "none"
    assert chosen[1] in (Save("hidden"), "full")  # formulas are estimates
    assert chosen[2] == "full"


def test_devices_without_known_memory_keep_everything(capsys: Any) -> None:
    trainer = make_trainer(loggers=None)
    trainer.fit([BATCH], num_steps=1)
    assert remat_of(trainer) == "none"
    assert "the memory of a cpu device is not known" in capsys.readouterr().out


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
    trainer.state, metrics = step(trainer.state, batch)
    # The choice is made once: the held step neither traces nor compiles again.
    monkeypatch.setattr(type(programs_of(trainer)), "start", None)
    for _ in range(2):
        trainer.state, metrics = step(trainer.state, batch)
    assert remat_of(trainer) == "full"
    assert trainer.train_step is not step
    assert float(metrics["loss"]) > 0


def test_each_player_has_its_policy(limit_memory: Callable) -> None:
    limit_memory(1)
    blocks = nnx.All(nnx.Param, nnx.PathContains("blocks"))
    players = {
        "one": Player(optax.sgd(0.1), loss, wrt=blocks),
        "two": Player(
            optax.sgd(0.1),
            loss,
            wrt=nnx.All(nnx.Param, nnx.Not(nnx.PathContains("blocks"))),
        ),
    }
    trainer = Trainer(
        Model,
        Players(**players),
        strategy=FSDP(8),
        remat="auto",
        loggers=(),
    )
    trainer.fit([BATCH] * 2, num_steps=2)
    turns = programs_of(trainer).turns.values()
    # Gradients of the head need no values of the blocks.
    assert [each.options.remat for each in turns] == ["full", "none"]


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
