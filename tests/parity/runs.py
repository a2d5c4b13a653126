"""One run of the parity tests: from the first parameters to those after 20 steps."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from nnx_parallel import Strategy, Trainer, TrainState
from nnx_parallel.mesh import Device
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.sharding.nnx_arrays import flatten_pure
from nnx_parallel.visualize.describe import Description, describe_model
from tests.parity.models import CASES, DEEP_CASES, Arrays, Case
from tests.parity.strategies import ONE_DEVICE

NUM_STEPS = 20
NUM_BATCHES = 4


class Either(NamedTuple):
    """State of two optimizers, of which one is used."""

    use_second: jax.Array
    first: Any
    second: Any


def either(
    first: optax.GradientTransformation, second: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Combines two optimizers in one compiled step; a number in the state selects one.

    Both receive every gradient. So after the first step, the momentum of the second
    optimizer is the gradient of that step.
    """

    def init(params: Any) -> Either:
        return Either(jnp.int32(0), first.init(params), second.init(params))

    def update(
        updates: Any, state: optax.OptState, params: Any = None
    ) -> tuple[Any, Either]:
        assert isinstance(state, Either)
        left, first_state = first.update(updates, state.first, params)
        right, second_state = second.update(updates, state.second, params)
        chosen = jax.tree.map(
            lambda a, b: jnp.where(state.use_second, b, a), left, right
        )
        return chosen, Either(state.use_second, first_state, second_state)

    return optax.GradientTransformation(init, update)


OPTIMIZER = either(optax.adamw(3e-3), optax.sgd(0.05, momentum=0.9))


def recording(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """An optimizer whose state holds the gradients of its last step.

    Adam and clipping hide a constant factor in the gradients.
    """
    return optax.chain(optax.trace(decay=0.0), optimizer)


def first_gradients(trainer: Trainer, batch: Any) -> Arrays:
    """Gradients of a batch, by parameter, of a Trainer with a `recording` optimizer.

    The Trainer's compiled step computes them; the Trainer's state does not change.
    """
    batch = trainer.shard_batch(batch)
    recorded: Any = trainer.train_step(copy(trainer.state), batch)[0].opt_state
    return to_host(recorded[0].trace)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of 20 steps of AdamW, and of 20 steps of SGD from the same start.

    Attributes:
        initial: Parameters, other variables and key before the first step.
        gradients: Gradients of the first step, by parameter.
        losses: Losses of AdamW's steps.
        sgd_losses: Losses of SGD's steps.
        params: Parameters after SGD with momentum.
        variables: Other variables after SGD.
        start: The placed state before the first step.
        end: The placed state after SGD.
    """

    initial: Arrays
    gradients: Arrays
    losses: np.ndarray
    sgd_losses: np.ndarray
    params: Arrays
    variables: Arrays
    start: TrainState
    end: TrainState


def measure(
    case: Case, strategy: Strategy, devices: Sequence[Device], microbatches: int
) -> Run:
    """Trains twice from the same start, with one compiled step."""
    trainer = Trainer(
        case.build,
        OPTIMIZER,
        case.loss,
        strategy=strategy,
        num_microbatches=microbatches,
        wrt=case.wrt,
        devices=devices,
        loggers=(),
    )
    batches = [trainer.shard_batch(batch) for batch in case.batches(NUM_BATCHES)]
    start = trainer.state
    losses, _, _ = train(trainer, copy(start), batches)
    sgd_losses, gradients, end = train(trainer, choose_second(copy(start)), batches)
    return Run(
        initial=to_host(
            {
                "params": start.params,
                "variables": start.variables,
                "key": start.key,
            }
        ),
        gradients=gradients,
        losses=losses,
        sgd_losses=sgd_losses,
        params=to_host(end.params),
        variables=to_host(end.variables),
        start=start,
        end=end,
    )


def train(
    trainer: Trainer, state: TrainState, batches: Sequence[Any]
) -> tuple[np.ndarray, Arrays, TrainState]:
    """Returns 20 losses, the first step's gradients, and the state after the last."""
    losses, gradients = [], {}
    for index in range(NUM_STEPS):
        state, metrics = trainer.train_step(state, batches[index % NUM_BATCHES])
        losses.append(float(metrics["loss"]))
        if index == 0:
            assert isinstance(state.opt_state, Either)
            gradients = to_host(state.opt_state.second[0].trace)
    return np.asarray(losses), gradients, state


@cache
def reference(
    model: str, microbatches: int, *, optimized: bool, deep: bool = False
) -> Run:
    """The run of a model on one device; ``deep`` selects the table of deep models."""
    case = DEEP_CASES[model] if deep else CASES[model]
    with compiling(optimized=optimized):
        return measure(
            case, ONE_DEVICE.strategy(case), ONE_DEVICE.devices(), microbatches
        )


@contextlib.contextmanager
def compiling(*, optimized: bool) -> Iterator[None]:
    """Compiles with or without LLVM's optimizations.

    Earlier passes (the partitioner, fusion) always run, so the HLO programs are the
    same. Without the optimizations, programs compile in two thirds of the time.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not optimized)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def described(case: Case, strategy: Strategy, devices: Sequence[Device]) -> Description:
    """A strategy's description of where each array lives."""
    layout = strategy.layout(strategy.make_mesh(devices))
    model = abstract_model(case.build, nnx.Rngs(0))
    return describe_model(model, layout, OPTIMIZER, case.wrt)


def copy(state: TrainState) -> TrainState:
    """A copy of each array in the same place, which may be donated."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), state)


def choose_second(state: TrainState) -> TrainState:
    """The state, changed to use the second optimizer."""
    old = state.opt_state
    assert isinstance(old, Either)
    one = jax.device_put(jnp.int32(1), old.use_second.sharding)
    return dataclasses.replace(state, opt_state=old._replace(use_second=one))


def to_host(tree: Any) -> Arrays:
    """NumPy arrays by dotted path; random keys are replaced by their words."""
    return {path: as_numpy(x) for path, x in flatten_pure(tree).items()}


def as_numpy(x: jax.Array) -> np.ndarray:
    """A NumPy array; a random key is replaced by its words."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
