"""Several losses of one model, which take turns. Each has a separate optimizer.

A step belongs to one player. It computes the gradients of this player's loss for the
parameters that the player trains. All players share the arrays of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from flax import nnx

from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.errors import ParallelWarning, kind_of, warn_user
from nnx_parallel.sharding.names import dotted
from nnx_parallel.state import StatePlan, TrainState
from nnx_parallel.training.arguments import LossFn, check_update
from nnx_parallel.training.callback import Callback, EarlyStopping
from nnx_parallel.training.diagnostics import check_count
from nnx_parallel.training.recorder import OF_PLAYERS
from nnx_parallel.training.step import Batch, Metrics


@dataclass(frozen=True)
class _InPart:
    """Filter of the Variables in one attribute of the model."""

    name: str

    def __call__(self, path: Sequence[Any], value: Any) -> bool:
        # A layer deep inside another part may have the same name.
        return path[0] == self.name


@dataclass(frozen=True)
class Player:
    """A loss, its optimizer, and the parameters that the optimizer updates.

    Attributes:
        optimizer: An Optax transformation, or a function of the abstract model that
            returns one. It counts only the steps of this player, and so does a
            schedule.
        loss: The loss, like the loss of a `Trainer`. Its gradient passes through the
            entire model; parameters that ``wrt`` leaves out do not change.
        wrt: Filter of the Variables that this player trains; by default the parameters
            in the model's attribute that has the player's name. Two players may train
            the same parameter.
        steps: Number of consecutive steps in each turn.

    Raises:
        ValueError: If ``steps`` is not a positive integer.
    """

    optimizer: Any
    loss: LossFn
    wrt: Any = None
    steps: int = 1

    def __post_init__(self) -> None:
        check_count("Player.steps", self.steps, 1, " step in each turn")


class Players(Mapping[str, Player]):
    """Players that train one model in turns: a GAN, an actor and a critic.

    Pass `Players` to a `Trainer` instead of an optimizer and a loss. A turn is one or
    more steps of a player. The players take turns in the order in which they are given.
    The number of the step decides whose step it is, so a resumed run can continue
    within a turn. Each step takes the next batch. If all players should see the same
    batch, the data must yield it once for each of them.

    All players share one model; several networks are attributes of one module. They
    also share one step counter and one checkpoint, which has an optimizer state for
    each player. A moving average of parameters (``ema_decay``) is updated by the steps
    that train them. Batch statistics and random streams belong to the model, so every
    loss updates them.

    Under a `Pipeline`, each loss must call the model's `Stack`. If a player has the
    default ``wrt``, the Trainer warns of parameters that belong to no player.

    A step reports its ``loss`` and ``grad_norm``, and all metrics of its player by
    name: ``critic/loss``, ``critic/grad_norm``, ``critic/accuracy``. In the history
    they are NaN for the steps of other players; loggers show the newest values of all
    players. An evaluation computes the losses of all players, each by name.

    Args:
        players: The players by name.

    Raises:
        TypeError: If a value is not a `Player`.
        ValueError: If there is no player, or if a name contains "/".

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> import optax
        >>> from nnx_parallel import Player, Players, Trainer
        >>> class Pair(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.a = nnx.Param(jnp.ones(()))
        ...         self.b = nnx.Param(jnp.ones(()))
        >>> def product(model, batch):
        ...     return model.a[...] * model.b[...] * batch.mean()
        >>> players = Players(
        ...     a=Player(optax.sgd(0.25), product, steps=2),
        ...     b=Player(optax.sgd(0.5), lambda *args: -product(*args)),
        ... )
        >>> trainer = Trainer(Pair, players, loggers=())
        >>> history = trainer.fit([np.ones((8, 2), np.float32)] * 4, num_steps=4)
        >>> history["a/loss"].tolist(), history["b/loss"].tolist()
        ([1.0, 0.75, nan, 0.625], [nan, nan, -0.5, nan])
    """

    def __init__(self, **players: Player) -> None:
        if not players:
            raise ValueError("Players() has no player: Players(critic=Player(...)).")
        for name, player in players.items():
            if not isinstance(player, Player):
                raise TypeError(
                    f"{name} is {kind_of(player)}. It must be a Player: "
                    f"Players({name}=Player(optax.adam(1e-4), loss))."
                )
            if "/" in name:
                raise ValueError(
                    f"A player is named {name!r}. Metrics are named player/metric, so "
                    "a name cannot have '/'."
                )
        self._players = players

    def __getitem__(self, name: str) -> Player:
        return self._players[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._players)

    def __len__(self) -> int:
        return len(self._players)

    def __repr__(self) -> str:
        return f"Players({self.turns})"

    @property
    def turns(self) -> str:
        """The order of turns as text: ``critic x 5, generator x 1``."""
        return ", ".join(f"{name} x {steps}" for name, steps in self.steps.items())

    def turn(self, step: int) -> str:
        """Returns the name of the player that does the update after ``step`` updates.

        Example:
            >>> import optax
            >>> player = Player(optax.sgd(0.1), lambda model, batch: 0.0, steps=2)
            >>> players = Players(d=player, g=Player(player.optimizer, player.loss))
            >>> [players.turn(step) for step in range(4)]
            ['d', 'd', 'g', 'd']
        """
        return self._order[step % len(self._order)]

    def count(self, step: int) -> int:
        """Returns how many steps this player has done after step ``step + 1``.

        The player is ``turn(step)``, and the first step of the run counts as 1.

        Example:
            >>> import optax
            >>> player = Player(optax.sgd(0.1), lambda model, batch: 0.0, steps=2)
            >>> players = Players(d=player, g=Player(player.optimizer, player.loss))
            >>> [players.count(step) for step in range(6)]
            [1, 2, 1, 3, 4, 2]
        """
        name, (cycles, index) = self.turn(step), divmod(step, len(self._order))
        return cycles * self[name].steps + self._order[: index + 1].count(name)

    @cached_property
    def _order(self) -> list[str]:
        return [name for name, steps in self.steps.items() for _ in range(steps)]

    @property
    def steps(self) -> dict[str, int]:
        """The number of steps in each player's turn."""
        return {name: player.steps for name, player in self.items()}

    @property
    def optimizers(self) -> dict[str, Any]:
        """The optimizer of each player."""
        return {name: player.optimizer for name, player in self.items()}

    @property
    def filters(self) -> dict[str, Any]:
        """The filter of the Variables that each player trains."""
        return {
            name: nnx.All(nnx.Param, _InPart(name))
            if player.wrt is None
            else player.wrt
            for name, player in self.items()
        }

    @property
    def losses(self) -> dict[str, LossFn]:
        """The loss of each player."""
        return {name: player.loss for name, player in self.items()}


def by_player(
    optimizer: Any, loss: LossFn | None, wrt: Any
) -> tuple[Players | None, Any, list[LossFn | None], Any]:
    """Checks the optimizer, loss and filter of a Trainer, and takes players apart.

    Returns:
        The players or ``None``, the optimizer, the losses, and the filter. With
        players, optimizer and filter are dicts by player.

    Raises:
        TypeError: If an optimizer or a loss has the wrong type, or if players are given
            together with a loss or a filter.
    """
    if not isinstance(optimizer, Players):
        check_update(optimizer, loss)
        return None, optimizer, [loss], wrt
    given = "a loss" * (loss is not None) or "wrt=" * (wrt is not nnx.Param)
    if given:
        raise TypeError(
            f"Trainer got Players and {given}. Each Player has its optimizer, loss and "
            "wrt: Trainer(model, Players(critic=Player(optimizer, loss, wrt=...)))."
        )
    for name, player in optimizer.items():
        try:
            check_update(player.optimizer, player.loss)
        except TypeError as error:
            error.add_note(f"This is the player {name!r}.")
            raise
    losses: list[LossFn | None] = [*optimizer.losses.values()]
    return optimizer, optimizer.optimizers, losses, optimizer.filters


@dataclass(frozen=True)
class StepByTurns:
    """The compiled steps of all players, called like the step of one loss.

    A call, `lower` and `trace` take ``(state, batch, player)``. Without a player, the
    number of the step in the state decides whose step it is.

    Attributes:
        players: The players.
        step_of: Function that returns the compiled step of a player, by name.
    """

    players: Players
    step_of: Callable[[str], Any]

    def __call__(
        self, state: TrainState, batch: Batch, player: str | None = None
    ) -> tuple[TrainState, Metrics]:
        """Runs the step."""
        return self._step(state, player)(state, batch)

    def lower(
        self, state: TrainState, batch: Batch, player: str | None = None
    ) -> jax.stages.Lowered:
        """Lowers the step, as ``jax.jit`` does."""
        return self._step(state, player).lower(state, batch)

    def trace(
        self, state: TrainState, batch: Batch, player: str | None = None
    ) -> jax.stages.Traced:
        """Traces the step, as ``jax.jit`` does."""
        return self._step(state, player).trace(state, batch)

    def _step(self, state: TrainState, player: str | None) -> Any:
        names = [*self.players]
        if player is None:
            if isinstance(state.step, jax.ShapeDtypeStruct):
                raise ValueError(
                    "The state has only shapes, so the number of its step is unknown. "
                    f"Pass the name of a player, (state, batch, player): {names}."
                )
            # A donated state raises an error in the step of any player.
            step = 0 if state.step.is_deleted() else int(state.step)
            player = self.players.turn(step)
        if player not in self.players:
            raise ValueError(f"There is no player {player!r}, but {names}.")
        return self.step_of(player)


def check_ranking(
    players: Players | None, checkpoint: Any, callbacks: Sequence[Callback]
) -> None:
    """Raises a ``ValueError`` if a rule compares metrics of different players."""
    if len(players or ()) < 2:
        return
    ranked: dict[str, str | None] = {
        repr(x): x.metric for x in callbacks if isinstance(x, EarlyStopping)
    }
    if isinstance(checkpoint, Checkpoint):
        best = checkpoint.keep_best
        ranked[f"Checkpoint(keep_best={best!r})"] = best
    for rule, metric in ranked.items():
        if metric in OF_PLAYERS:
            named = " or ".join(repr(f"{name}/{metric}") for name in players or ())
            raise ValueError(
                f"{rule} would compare values of different players, because {metric!r} "
                f"belongs to the player of each step. Name the metric of one player: "
                f"{named}."
            )


def warn_of_unowned(players: Players | None, plan: StatePlan) -> None:
    """Warns of parameters that no player trains, unless each player has a ``wrt``."""
    if players is None or all(each.wrt is not None for each in players.values()):
        return
    paths = sorted(map(dotted, plan.param_placements.keys() - plan.trained_paths))
    if paths:
        shown = ", ".join(f"`{path}`" for path in paths[:10])
        more = f" and {len(paths) - 10} more" * (len(paths) > 10)
        warn_user(
            f"No player trains the parameters {shown}{more}, so they do not change. A "
            "player without wrt trains only the part of the model that has the "
            "player's name. Give a player a wrt that includes them: Player(..., "
            "wrt=nnx.Any(nnx.PathContains('trunk'), nnx.PathContains('head'))). If "
            "they should not change, give every player a wrt.",
            ParallelWarning,
        )
