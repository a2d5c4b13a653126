"""Players, which are losses that take turns, compared with handwritten loops."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Callback,
    Checkpoint,
    Composite,
    DataParallel,
    EarlyStopping,
    Evaluation,
    Faults,
    Pipeline,
    Player,
    Players,
    Precision,
    SkipSteps,
    Strategy,
    TensorParallel,
    Trainer,
    audit,
)
from nnx_parallel.errors import (
    CheckpointMismatchError,
    DonatedArrayError,
    NonFiniteLossError,
    ParallelWarning,
    PipelineError,
)
from nnx_parallel.layers import Dense, Stack
from nnx_parallel.loggers import JSONLinesLogger
from nnx_parallel.sharding.checksum import data_of
from nnx_parallel.training import loop
from nnx_parallel.training.verification import replay
from tests.parity.runs import to_host

pytestmark = pytest.mark.long

SPLIT = FSDP(min_size=0)
STRATEGIES = [DataParallel(), SPLIT, Composite(TensorParallel(2), SPLIT)]
DATA = np.random.default_rng(0).normal(size=(12, 8, 4)).astype(np.float32)
NAMES = ("critic", "generator")


class GAN(nnx.Module):
    """A generator and a critic."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.generator = nnx.Linear(4, 4, rngs=rngs)
        self.critic = nnx.Linear(4, 8, rngs=rngs)


def critic_loss(model: Any, batch: Any) -> Any:
    fake, real = model.critic(model.generator(batch)), model.critic(batch[::-1])
    return (nnx.softplus(fake) + nnx.softplus(-real)).mean(), {"margin": real.mean()}


def generator_loss(model: Any, batch: Any) -> Any:
    return nnx.softplus(-model.critic(model.generator(batch))).mean()


class Normed(nnx.Module):
    """Arrays that change without gradients: u and sigma, statistics, streams."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.generator = nnx.Sequential(
            # A bias here would have no gradient, and Adam would amplify its rounding.
            Dense({"embed": 4}, {"mlp": 8}, rngs=rngs),
            nnx.BatchNorm(8, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
            Dense({"mlp": 8}, {"embed": 4}, use_bias=True, rngs=rngs),
        )
        layer = Dense({"embed": 4}, {"mlp": 8}, use_bias=True, rngs=rngs)
        self.critic = nnx.SpectralNorm(layer, n_steps=3, rngs=rngs)


def normed_critic(model: Any, batch: Any) -> jax.Array:
    fake = model.critic(model.generator(batch), update_stats=True)
    real = model.critic(batch[::-1], update_stats=True)
    return (nnx.softplus(fake) + nnx.softplus(-real)).mean()


def normed_generator(model: Any, batch: Any) -> jax.Array:
    fake = model.generator(batch)
    return nnx.softplus(-model.critic(fake, update_stats=False)).mean()


NORMED = {"critic": normed_critic, "generator": normed_generator}
LOSSES = {"critic": critic_loss, "generator": generator_loss}
TX = {
    # A schedule counts the steps of its player.
    "critic": optax.sgd(optax.linear_schedule(0.2, 0.02, 4), momentum=0.9),
    # A gradient of rounding noise must not become a step.
    "generator": optax.adam(0.01, eps=1e-3),
}


def players(steps: int = 2, losses: Any = LOSSES) -> Players:
    critic, generator = (Player(TX[name], losses[name]) for name in NAMES)
    return Players(critic=replace(critic, steps=steps), generator=generator)


def make_trainer(model: Any = GAN, optimizer: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"strategy": SPLIT, "loggers": ()} | options
    return Trainer(model, optimizer or players(), **settings)


class ByHand:
    """A plain Flax loop with an `nnx.Optimizer` for each loss."""

    def __init__(
        self,
        model: Any = GAN,
        losses: Any = LOSSES,
        tx: Any = TX,
        filters: Any = None,
    ) -> None:
        self.model, self.losses = model(nnx.Rngs(0)), losses
        self.wrt = filters or {
            name: nnx.All(nnx.Param, nnx.PathContains(name)) for name in losses
        }
        self.optimizers = {
            name: nnx.Optimizer(self.model, each, wrt=self.wrt[name])
            for name, each in tx.items()
        }

        @nnx.jit(static_argnums=0)
        def turn(name: str, model: Any, optimizer: Any, batch: Any) -> jax.Array:
            def loss(model: Any, batch: Any) -> jax.Array:
                found = losses[name](model, batch)
                return found[0] if isinstance(found, tuple) else found

            wanted = nnx.DiffState(0, self.wrt[name])
            value, grads = nnx.value_and_grad(loss, argnums=wanted)(model, batch)
            optimizer.update(model, grads)
            return value

        self._turn = turn

    def step(self, name: str, batch: Any) -> float:
        return float(self._turn(name, self.model, self.optimizers[name], batch))


def arrays(model: Any) -> dict[str, np.ndarray]:
    return to_host(nnx.to_pure_dict(nnx.state(model)))


def assert_close(found: Any, expected: Any) -> None:
    left, right = arrays(found), arrays(expected)
    assert left.keys() == right.keys()
    for path, value in right.items():
        np.testing.assert_allclose(
            left[path], value, rtol=1e-6, atol=1e-6, err_msg=path
        )


def bits(state: Any) -> list[bytes]:
    leaves = jax.tree.leaves(state)
    return [np.asarray(data_of(x)).tobytes() for x in leaves]


def steps_of(history: Any, name: str) -> list[int]:
    """The steps at which a metric was reported."""
    return history["step"][np.isfinite(history[name])].tolist()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_turns_match_loop_by_hand(strategy: Strategy) -> None:
    trainer = make_trainer(Normed, players(losses=NORMED), strategy=strategy)
    hand = ByHand(Normed, NORMED)
    history = trainer.fit(list(DATA[:7]), num_steps=7)
    order = ["critic", "critic", "generator"] * 3
    expected = [
        hand.step(name, batch) for name, batch in zip(order, DATA[:7], strict=False)
    ]
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-6)
    assert steps_of(history, "critic/loss") == [1, 2, 4, 5, 7]
    assert steps_of(history, "generator/loss") == [3, 6]
    assert_close(trainer.model, hand.model)
    assert trainer.step == 7


def test_losses_are_traced_once_for_each_player() -> None:
    traces = []

    def counted(name: str) -> Any:
        def loss(model: Any, batch: Any) -> Any:
            traces.append(name)
            return LOSSES[name](model, batch)

        return Player(TX[name], loss)

    trainer = make_trainer(optimizer=Players(**{name: counted(name) for name in NAMES}))
    trainer.fit(list(DATA), num_steps=8)
    # A step is traced once, and its loss once more to look for labels out of range.
    assert sorted(traces) == sorted([*NAMES] * 2)


class Shared(nnx.Module):
    """A trunk that two losses train, and a head for each loss."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.trunk = nnx.Linear(4, 8, rngs=rngs)
        self.actor = nnx.Linear(8, 2, rngs=rngs)
        self.value = nnx.Linear(8, 1, rngs=rngs)


def actor_loss(model: Any, batch: Any) -> jax.Array:
    hidden = nnx.tanh(model.trunk(batch))
    gain = jax.lax.stop_gradient(model.value(hidden))
    return -(nnx.log_softmax(model.actor(hidden)) * gain).mean()


def value_loss(model: Any, batch: Any) -> jax.Array:
    return ((model.value(nnx.tanh(model.trunk(batch))) - 1) ** 2).mean()


def test_players_may_train_the_same_parameters() -> None:
    losses = {"actor": actor_loss, "value": value_loss}
    tx = {"actor": optax.sgd(0.1, momentum=0.9), "value": optax.adam(0.01)}
    filters = {
        name: nnx.Any(nnx.PathContains("trunk"), nnx.PathContains(name)) for name in tx
    }
    each = {name: Player(tx[name], losses[name], wrt=filters[name]) for name in tx}
    trainer, hand = (
        make_trainer(Shared, Players(**each)),
        ByHand(Shared, losses, tx, filters),
    )
    found = trainer.fit(list(DATA[:5]), num_steps=5)["loss"]
    order = ["actor", "value"] * 3
    expected = [
        hand.step(name, batch) for name, batch in zip(order, DATA[:5], strict=False)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert_close(trainer.model, hand.model)


class Nested(nnx.Module):
    """An actor that contains a layer named like another player."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.actor = nnx.Dict(
            value=nnx.Linear(4, 4, rngs=rngs), head=nnx.Linear(4, 2, rngs=rngs)
        )
        self.value = nnx.Linear(4, 1, rngs=rngs)


def test_player_does_not_train_layer_of_same_name_in_another_part() -> None:
    def value_of(model: Any, batch: Any) -> jax.Array:
        return (model.value(model.actor["value"](batch)) ** 2).mean()

    def action_of(model: Any, batch: Any) -> jax.Array:
        return (model.actor["head"](model.actor["value"](batch)) ** 2).mean()

    actor, value = (Player(optax.sgd(0.1), loss) for loss in (action_of, value_of))
    trainer = make_trainer(Nested, Players(value=value, actor=actor))
    before = to_host(trainer.state.params)
    trainer.fit(list(DATA), num_steps=1)
    after = to_host(trainer.state.params)
    changed = {path for path, x in after.items() if not (x == before[path]).all()}
    assert {path.split(".")[0] for path in changed} == {"value"}
    trainer.fit(list(DATA), num_steps=2)
    changed = {
        p for p, x in to_host(trainer.state.params).items() if (x != after[p]).any()
    }
    assert changed == {p for p in after if p.startswith("actor")}


def test_parameters_of_no_player_are_reported() -> None:
    with pytest.warns(
        ParallelWarning,
        match=re.escape(
            "No player trains the parameters `trunk.bias`, `trunk.kernel`, so they do "
            "not change. A player without wrt trains only the part of the model"
        ),
    ) as caught:
        trainer = make_trainer(Shared, actor_critic())
    assert len(caught) == 1
    before = arrays(trainer.model)
    trainer.fit(list(DATA), num_steps=2)
    after = arrays(trainer.model)
    same = {path for path, x in after.items() if (x == before[path]).all()}
    assert same == {"trunk.bias", "trunk.kernel"}


def test_resumed_turn_repeats_uninterrupted_run(tmp_path: Path) -> None:
    parts = Normed, players(losses=NORMED)
    straight = make_trainer(*parts, ema_decay=0.9)
    expected = straight.fit(list(DATA), num_steps=8)["loss"]
    options: dict[str, Any] = {"ema_decay": 0.9, "checkpoint": str(tmp_path)}
    make_trainer(*parts, **options).fit(list(DATA), num_steps=4)
    resumed = make_trainer(*parts, **options)
    found = resumed.fit(list(DATA), num_steps=8)["loss"]
    assert found.tolist() == expected[4:].tolist()
    assert bits(resumed.state) == bits(straight.state)


def test_checkpoint_restores_on_another_mesh(tmp_path: Path) -> None:
    first = make_trainer(checkpoint=str(tmp_path))
    first.fit(list(DATA), num_steps=4)
    other = make_trainer(
        strategy=Composite(DataParallel(2), SPLIT),
        devices=jax.devices()[:4],
        checkpoint=str(tmp_path),
    )
    assert bits(other.state) == bits(first.state)
    found = other.fit(list(DATA), num_steps=8)["loss"]
    expected = make_trainer().fit(list(DATA), num_steps=8)["loss"][4:]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_other_players_cannot_resume(tmp_path: Path) -> None:
    make_trainer(checkpoint=str(tmp_path)).fit(list(DATA), num_steps=2)
    critic = nnx.PathContains("critic")
    fewer = Players(critic=Player(TX["critic"], critic_loss, wrt=critic))
    trainer = make_trainer(optimizer=fewer, checkpoint=str(tmp_path))
    with pytest.raises(
        CheckpointMismatchError,
        match=re.escape(
            "was saved with the players ['critic', 'generator'], and this Trainer has "
            "the players ['critic']. Build the same players, or take only the weights"
        ),
    ):
        trainer.fit(list(DATA), num_steps=4)
    trainer.restore(weights_only=True)
    single = Trainer(GAN, TX["critic"], critic_loss, loggers=(), checkpoint=tmp_path)
    with pytest.raises(CheckpointMismatchError, match="has one loss, without players"):
        single.fit(list(DATA), num_steps=4)


def test_changed_turns_are_reported(tmp_path: Path, capsys: Any) -> None:
    options: dict[str, Any] = {"checkpoint": str(tmp_path), "loggers": None}
    make_trainer(**options).fit(list(DATA), num_steps=2)
    assert "critic x 2, generator x 1" in capsys.readouterr().out
    history = make_trainer(optimizer=players(1), **options).fit(list(DATA), num_steps=4)
    assert steps_of(history, "critic/loss") == [3]
    assert "{'critic': 2, 'generator': 1} and are now" in capsys.readouterr().out


def test_evaluation_has_each_players_loss() -> None:
    trainer, batches = make_trainer(), list(DATA[:3])
    found = trainer.evaluate(batches)
    critic = trainer.evaluate(batches, loss=critic_loss)
    generator = trainer.evaluate(batches, loss=generator_loss)
    assert found == {
        "critic/loss": critic["loss"],
        "critic/margin": critic["margin"],
        "generator/loss": generator["loss"],
    }


class Seen(Callback):
    """Records the names of the metrics that hooks get, by step."""

    def __init__(self) -> None:
        self.steps: dict[int, list[str]] = {}
        self.evals: dict[int, list[str]] = {}

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.steps[step] = [name for name in metrics if name.endswith("loss")]

    def on_eval_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.evals[step] = [*metrics]


def test_fit_logs_and_stops_by_players_metrics(tmp_path: Path) -> None:
    seen, stopping = Seen(), EarlyStopping("generator/loss", min_delta=9.0, patience=2)
    trainer = make_trainer(
        optimizer=players(1),
        log_every=2,
        loggers=[JSONLinesLogger(tmp_path / "metrics.jsonl")],
        callbacks=[seen, stopping],
        evaluation=Evaluation(loss=generator_loss),
        checkpoint=Checkpoint(tmp_path / "run", keep_best="eval_loss"),
    )
    history = trainer.fit(list(DATA), 12, eval_data=list(DATA[:2]), eval_every=2)
    assert set(map(tuple, seen.steps.values())) == {
        ("critic/loss", "loss"),
        ("generator/loss", "loss"),
    }
    assert seen.evals[2] == ["loss"]
    assert stopping.best_step == 2
    assert history["step"][-1] == 6
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "generator/loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6]
    losses = history["critic/loss"]
    assert [row["critic/loss"] for row in rows] == losses[::2].tolist()
    assert "loss" not in rows[0]


def test_average_follows_the_steps_that_train_a_parameter() -> None:
    trainer = make_trainer(ema_decay=0.5)
    trainer.fit(list(DATA), num_steps=2)
    before = to_host(trainer.state.ema)
    trainer.fit(list(DATA), num_steps=3)
    params, after = to_host(trainer.state.params), to_host(trainer.state.ema)
    for path, x in after.items():
        is_new = path.startswith("generator")
        expected = (before[path] + params[path]) / 2 if is_new else before[path]
        np.testing.assert_allclose(x, expected, rtol=1e-6)


def test_best_metric_of_later_player_does_not_warn(tmp_path: Path) -> None:
    """Steps before the generator's first turn do not count as best."""
    best = Checkpoint(tmp_path, every=1, keep_best="generator/loss")
    trainer = make_trainer(checkpoint=best)
    losses = trainer.fit(list(DATA), num_steps=6)["generator/loss"]
    trainer.restore("best")
    # Steps 4 and 5 have the generator's loss of step 3, and of ties the latest is best.
    assert trainer.step == (5 if losses[2] < losses[5] else 6)


def test_best_metric_that_no_player_has_warns(tmp_path: Path) -> None:
    wrong = Checkpoint(tmp_path, keep_best="generator/los")
    with pytest.warns(ParallelWarning, match="keep_best='generator/los' is not among"):
        make_trainer(checkpoint=wrong).fit(list(DATA), num_steps=3)


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "learning_rate"])
def test_metric_of_changing_players_cannot_rank(metric: str, tmp_path: Path) -> None:
    message = (
        f"would compare values of different players, because '{metric}' belongs to "
        "the player of each step. Name the metric of one player: "
        f"'critic/{metric}' or 'generator/{metric}'."
    )
    stopping = EarlyStopping(metric)
    with pytest.raises(
        ValueError, match=re.escape(f"EarlyStopping('{metric}', patience=3) {message}")
    ):
        make_trainer(callbacks=[stopping])
    best = Checkpoint(tmp_path, keep_best=metric)
    with pytest.raises(
        ValueError, match=re.escape(f"Checkpoint(keep_best='{metric}') {message}")
    ):
        make_trainer(checkpoint=best)
    critic = Player(TX["critic"], critic_loss, wrt=nnx.PathContains("critic"))
    make_trainer(optimizer=Players(critic=critic), callbacks=[stopping])


def test_each_players_steps_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = []

    def recording(programs: Any, state: Any, batch: Any) -> Any:
        replayed.append((int(state.step) + 1, programs.plan.player))
        return replay(programs, state, batch)

    monkeypatch.setattr(loop, "replay", recording)
    trainer = make_trainer(optimizer=players(1), faults=Faults(verify_every=2))
    trainer.fit(list(DATA), num_steps=8)
    expected = [(3, "critic"), (4, "generator"), (7, "critic"), (8, "generator")]
    assert replayed == expected


@pytest.mark.parametrize("step", [0, 2])
def test_verify_and_replay_turns(step: int) -> None:
    faults = Faults(verify_every=1)
    trainer, plain = make_trainer(faults=faults), make_trainer()
    if step:
        replayed = trainer.fit(list(DATA), num_steps=step)["loss"]
        expected = plain.fit(list(DATA), num_steps=step)["loss"]
        np.testing.assert_allclose(replayed, expected, rtol=1e-6)
    before = bits(trainer.state)
    report = trainer.verify(DATA[step])
    assert report.step == step
    assert not report.differences
    names = {name for each in report.comparisons for name in each.errors}
    player = NAMES[step // 2]
    assert f"metric '{player}/grad_norm'" in names
    assert {n.split("`")[1].split(".")[0] for n in names if "gradient of" in n} == {
        player
    }
    assert bits(trainer.state) == before
    trainer.fit(list(DATA), num_steps=step + 2)


def test_custom_loop_chooses_players() -> None:
    trainer, hand = make_trainer(), ByHand()
    for player in ("generator", "critic", "critic", "generator"):
        batch = trainer.shard_batch(DATA[0])
        trainer.state, metrics = trainer.train_step(trainer.state, batch, player)
        np.testing.assert_allclose(
            metrics["loss"], hand.step(player, DATA[0]), rtol=1e-6
        )
    assert_close(trainer.model, hand.model)
    state, batch = trainer.state, trainer.shard_batch(DATA[0])
    trainer.state, metrics = trainer.train_step(state, batch)  # update 5 is a critic's
    assert "critic/loss" in metrics
    with pytest.raises(DonatedArrayError):
        trainer.train_step(state, batch)
    with pytest.raises(ValueError, match=r"no player 'x', but \['critic', 'gen"):
        trainer.train_step(trainer.state, batch, "x")


def test_step_of_each_player_is_lowered_and_traced() -> None:
    trainer = make_trainer()
    state, batch = trainer.state, trainer.shard_batch(DATA[0])
    step: Any = trainer.train_step
    reports = {name: audit(step.lower(state, batch, name).compile()) for name in NAMES}
    # Only the critic's step multiplies by the critic twice.
    assert reports["critic"].flops != reports["generator"].flops
    assert audit(step.lower(state, batch).compile()).flops == reports["critic"].flops
    for name in NAMES:
        _, metrics = step.trace(state, batch, name).out_info
        assert f"{name}/loss" in metrics
    shapes = jax.eval_shape(lambda: state)
    with pytest.raises(
        ValueError, match=r"only shapes.*\(state, batch, player\): \['critic', 'gen"
    ):
        step.lower(shapes, batch)
    with pytest.raises(ValueError, match=r"no player 'x', but \['critic', 'gen"):
        step.trace(state, batch, "x")
    trainer.fit(list(DATA), num_steps=3)  # the state was not donated


def actor_critic(wrt: Any = None) -> Players:
    return Players(
        actor=Player(optax.sgd(0.1), actor_loss, wrt=wrt),
        value=Player(TX["critic"], value_loss),
    )


@pytest.mark.parametrize(
    ("precision", "rtol"), [(Precision(), 1e-6), (Precision.mixed_float16(), 1e-3)]
)
def test_options_of_a_step_apply_to_players(precision: Any, rtol: float) -> None:
    """The limit in float16 is one rounding of a number (2**-10)."""
    trained = nnx.Any(nnx.PathContains("trunk"), nnx.PathContains("actor"))
    plain = make_trainer(Shared, actor_critic(trained), precision=precision)
    expected = plain.fit(list(DATA), num_steps=4)["loss"]
    trainer = make_trainer(
        Shared,
        actor_critic(trained),
        precision=precision,
        faults=Faults(on_non_finite="skip", check_replicas_every=2),
        num_microbatches=2,
        ema_decay=0.9,
        strategy=DataParallel(4),
        devices=jax.devices()[:4],
    )
    found = trainer.fit(list(DATA), num_steps=4)["loss"]
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * 0.1)
    assert "actor.kernel" in str(trainer.describe())
    outputs = trainer.predict([DATA[0]], lambda model, x: model.trunk(x))
    assert outputs.shape == (8, 8)


class Piped(nnx.Module):
    """A trunk that a pipeline splits, and a head for each loss."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.trunk = Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 4, rngs=rngs)
        self.actor = nnx.Linear(4, 2, rngs=rngs)
        self.value = nnx.Linear(4, 1, rngs=rngs)


def test_pipeline_needs_its_stack_in_each_loss() -> None:
    trunk = nnx.Any(nnx.PathContains("trunk"), nnx.PathContains("actor"))
    actor = Player(optax.sgd(0.1), actor_loss, wrt=trunk)
    found, expected = (
        make_trainer(
            Piped,
            Players(actor=actor, value=Player(TX["critic"], value_loss)),
            strategy=strategy,
            devices=jax.devices()[: 2 * n],
            num_microbatches=2,
        ).fit(list(DATA), num_steps=4)["loss"]
        for n, strategy in ((2, Composite(Pipeline(2), SPLIT)), (1, SPLIT))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)

    def head_only(model: Any, batch: Any) -> jax.Array:
        return (model.value(batch) ** 2).mean()

    both = Players(actor=actor, value=Player(TX["critic"], head_only))
    strategy = Composite(Pipeline(2), SPLIT)
    with pytest.raises(PipelineError, match="The loss calls no Stack") as caught:
        make_trainer(Piped, both, strategy=strategy).fit(list(DATA), num_steps=4)
    assert caught.value.__notes__[-1] == "This is the step of player 'value'."


def test_non_finite_loss_names_player() -> None:
    def broken(model: Any, batch: Any) -> jax.Array:
        return generator_loss(model, batch) * np.nan

    both = Players(
        critic=Player(TX["critic"], critic_loss),
        generator=Player(TX["generator"], broken),
    )
    with pytest.raises(NonFiniteLossError, match="Step 2 of generator: loss nan"):
        make_trainer(optimizer=both).fit(list(DATA), num_steps=4)


def test_skips_end_for_player_that_never_trains() -> None:
    """Good steps of the generator do not hide that all steps of the critic are bad."""

    def broken(model: Any, batch: Any) -> Any:
        return critic_loss(model, batch)[0] * np.nan, {"aux/loss": np.float32(1.0)}

    trainer = make_trainer(
        optimizer=players(1, {"critic": broken, "generator": generator_loss}),
        faults=Faults(on_non_finite=SkipSteps(limit=2)),
    )
    message = (
        "Step 5 of critic: loss nan, gradient norm nan. No earlier step of critic was "
        "finite. The last 3 steps of critic were bad, and SkipSteps(limit=2) skips no "
        "more steps."
    )
    with pytest.raises(NonFiniteLossError, match=re.escape(message)):
        trainer.fit(list(DATA), num_steps=12)


def test_wrong_players_raise() -> None:
    wrong: Any = critic_loss
    swapped: Any = TX["critic"]
    with pytest.raises(TypeError, match=re.escape("critic is a function")):
        Players(critic=wrong)
    with pytest.raises(ValueError, match=r"Players\(\) has no player"):
        Players()
    with pytest.raises(ValueError, match="named 'a/b'"):
        Players(**{"a/b": Player(TX["critic"], critic_loss)})
    with pytest.raises(ValueError, match=r"Player\.steps=0"):
        Player(TX["critic"], critic_loss, steps=0)
    with pytest.raises(TypeError, match="Trainer got Players and a loss"):
        Trainer(GAN, players(), critic_loss)
    with pytest.raises(TypeError, match="Trainer got Players and wrt="):
        make_trainer(wrt=nnx.LoRAParam)
    with pytest.raises(TypeError, match="loss is an Optax") as caught:
        make_trainer(optimizer=Players(critic=Player(wrong, swapped)))
    assert caught.value.__notes__ == ["This is the player 'critic'."]
    with pytest.raises(
        ValueError,
        match=re.escape("Player 'value': wrt=")
        + ".*selects no Variable.*in the parts \\['critic', 'generator'\\]",
    ):
        make_trainer(optimizer=Players(value=Player(TX["critic"], critic_loss)))


class Norms(nnx.Module):
    """Two parts with batch statistics; each loss runs only one of them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.actor, self.value = (nnx.BatchNorm(4, rngs=rngs) for _ in range(2))


def test_statistics_of_other_players_may_stay() -> None:
    def running(name: str, *, training: bool = True) -> Player:
        def loss(model: Any, batch: Any) -> jax.Array:
            part = getattr(model, name)
            return part(batch, use_running_average=not training).std()

        return Player(optax.sgd(0.1), loss)

    both = {name: running(name) for name in ("actor", "value")}
    make_trainer(Norms, Players(**both)).fit(list(DATA), num_steps=2)
    both["value"] = running("value", training=False)
    with pytest.warns(UserWarning, match=r"leaves 2 batch statistics.*`value\.mean`"):
        make_trainer(Norms, Players(**both)).fit(list(DATA), num_steps=2)
