"""Runs of these models in plain NNX, under strategies, and restored elsewhere."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.checkpoint.contents import to_groups
from tests.parity.models import Arrays
from tests.parity.runs import to_host
from tests.strangers.cases import make_batches
from tests.strangers.public.case import Public

TX = optax.sgd(0.02, momentum=0.9)
STRATEGIES: dict[str, tuple[Strategy, int]] = {  # each with its number of devices
    "data parallel": (DataParallel(), 4),
    "FSDP": (FSDP(min_size=0), 4),
    "tensor x FSDP": (Composite(TensorParallel(2), FSDP(min_size=0)), 4),
}
ELSEWHERE: tuple[Strategy, int] = FSDP(min_size=0), 2


@dataclass(frozen=True)
class Run:
    """The results of a run.

    Attributes:
        losses: The loss of each step.
        arrays: All Variables of the model at the end, by path.
    """

    losses: list[float]
    arrays: Arrays


def plain(case: Any, tx: Any = TX) -> Run:
    """Trains with `nnx.jit` and `nnx.Optimizer` on one device."""
    model: Any = case.build(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=case.wrt)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        def scalar(model: Any) -> jax.Array:
            out = case.loss(model, batch)
            return out[0] if isinstance(out, tuple) else out

        diff = nnx.DiffState(0, case.wrt)
        loss, grads = nnx.value_and_grad(scalar, argnums=diff)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, batch)) for batch in make_batches()]
    return Run(losses, variables(model))


def variables(model: nnx.Module) -> Arrays:
    return to_host(nnx.to_pure_dict(nnx.state(model)))


def make_trainer(case: Public, strategy: Strategy, count: int, where: Any) -> Trainer:
    is_split = "tensor" in strategy.axis_sizes
    names: Any = {"names": "auto", "sample": make_batches()[0]} if is_split else {}
    return Trainer(
        case.build(rngs=nnx.Rngs(0)) if case.is_built else case.build,
        TX,
        case.loss,
        strategy=Composite(strategy, rules=case.rules),
        wrt=case.wrt,
        devices=jax.devices()[:count],
        checkpoint=where,
        loggers=(),
        **names,
    )


def trained(case: Public, name: str, where: Any = None) -> tuple[Run, Arrays]:
    """Trains under a strategy and saves the end; also returns the state's arrays."""
    trainer, batches = make_trainer(case, *STRATEGIES[name], where), make_batches()
    losses = trainer.fit(batches, len(batches))["loss"]
    return Run([*losses], variables(trainer.model)), state_of(trainer)


def restored(case: Public, where: Any) -> Arrays:
    """Returns all arrays of a saved run's state, restored on another mesh."""
    return state_of(make_trainer(case, *ELSEWHERE, where))


def state_of(trainer: Trainer) -> Arrays:
    return to_host(to_groups(trainer.state))


def same_bits(found: Arrays, expected: Arrays) -> bool:
    return found.keys() == expected.keys() and all(
        found[path].tobytes() == x.tobytes() for path, x in expected.items()
    )


def loss_difference(found: Run, expected: Run) -> float:
    """The largest difference between the steps' losses, relative to the loss."""
    pairs = zip(found.losses, expected.losses, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def array_differences(found: Run, expected: Run) -> dict[str, float]:
    """The largest difference in each array, relative to its largest entry or 0.1.

    Raises:
        AssertionError: If the runs do not have the same arrays.
    """
    assert found.arrays.keys() == expected.arrays.keys()
    return {
        path: float(
            np.abs(found.arrays[path].astype(np.float64) - x).max()
            / max(np.abs(x).max(), 0.1)
        )
        for path, x in expected.arrays.items()
    }
