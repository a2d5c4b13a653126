"""Counts the FLOPs that a model needs for a step, from the traced loss.

The loss is traced as one device would compute it, with plain operations. So the count
does not depend on the strategy, on remat, or on the kernels that the step runs.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.extend.core as jex
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh

from nnx_parallel.layers.experts.dispatch import LOOKUP
from nnx_parallel.layers.stack.scan import Remat, default_remat
from nnx_parallel.mesh import StandIn
from nnx_parallel.metrics import split_loss_output
from nnx_parallel.programs import TracedFunction, inline, is_call, needed, trace
from nnx_parallel.sharding.constrain import using
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import flatten, nest
from nnx_parallel.sharding.nnx_arrays import is_inexact, variables_of
from nnx_parallel.state import StatePlan, plan_state
from nnx_parallel.strategies.data_parallel import DataParallel
from nnx_parallel.training.arguments import LossFn
from nnx_parallel.training.step import Batch, call_loss


def one_device(platform: str = "described") -> Layout:
    """Returns the layout of data parallelism on one absent device."""
    device: Any = StandIn(0, platform, platform, 0)
    mesh = Mesh(np.array([device]), ("data",), axis_types=(AxisType.Auto,))
    return DataParallel(1).layout(mesh)


def on_one_device(plan: StatePlan, wrt: Any) -> StatePlan:
    """Returns a plan of the same model and dtypes on `one_device`.

    Its optimizer does nothing, because only the loss is traced.
    """
    return plan_state(
        plan.model.copy(),
        one_device(),
        optax.identity(),
        wrt=wrt,
        precision=plan.precision,
    )


def count_model_flops(plan: StatePlan, loss: LossFn, batch: Batch) -> float:
    """Counts the model's FLOPs for a batch: three times its forward pass.

    Recomputation does not count. The masked scores of attention count. Gradients that
    no trained parameter needs do not count, such as gradients of the kernels beside
    adapters. MFU is computed from this number [1].

    Args:
        plan: The arrays, on `one_device`.
        loss: The loss.
        batch: A global batch, or its shapes.

    Raises:
        Exception: Any error that the loss raises when it is traced.

    References:
        [1] Chowdhery et al., "PaLM", 2022, appendix B,
        https://arxiv.org/abs/2204.02311
    """
    return TracedLoss.of(plan, loss, batch).count_flops()


@dataclass(frozen=True, eq=False)
class TracedLoss:
    """A loss on one device, as a program of ``(params, variables, batch, key)``.

    The program returns the loss, and its `Mean`.
    """

    plan: StatePlan
    objective: Callable[..., Any]
    given: tuple  # the shapes of the arguments
    program: TracedFunction

    @classmethod
    def of(cls, plan: StatePlan, loss: LossFn, batch: Batch) -> Self:
        """Traces a loss. It takes the arguments of `count_model_flops`."""
        mean_of, given = mean_of_arrays(plan, loss, batch)

        def objective(*arrays: Any) -> tuple[Any, Any]:
            mean = mean_of(*arrays)
            return mean.value, mean

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the trace of the step shows them
            program = trace(objective, *given, inlined=is_call)
        return cls(plan, objective, given, program)

    def count_flops(self) -> float:
        """Counts the FLOPs of a step, as `count_model_flops` does."""
        outputs = jax.tree.leaves(self.program.outputs)
        forward = sum(map(_eqn_flops, needed(self.program.eqns, outputs)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            unneeded = _unneeded_flops(
                self.plan, self.objective, self.given, 3 * forward
            )
        return 3 * forward - unneeded


def _unneeded_flops(
    plan: StatePlan, objective: Callable[..., Any], given: tuple, most: float
) -> float:
    """Counts the FLOPs of gradients that only frozen parameters need.

    ``most`` has the FLOPs of a step if no parameter is frozen.
    """
    params, variables, *rest = given
    trained, others = flatten(params), flatten(variables)
    paths = {path for path, _ in variables_of(plan.model.copy(), nnx.Param)}
    known = {p: x for p, x in others.items() if p in paths}
    frozen = {p: x for p, x in known.items() if is_inexact(x)}
    if not known:
        return 0.0

    def flops(chosen: dict) -> float:
        fixed = {p: x for p, x in (trained | others).items() if p not in chosen}

        def mean(chosen_arrays: list, fixed_arrays: list, *rest: Any) -> Any:
            pairs = zip((*chosen, *fixed), (*chosen_arrays, *fixed_arrays), strict=True)
            arrays = dict(pairs)
            split = ({p: arrays[p] for p in group} for group in (trained, others))
            return objective(*map(nest, split), *rest)[0]

        arrays = ([*each.values()] for each in (chosen, fixed))
        gradient = jax.make_jaxpr(jax.grad(mean))(*arrays, *rest)
        return count_jaxpr_flops(gradient.jaxpr)

    # JAX cannot differentiate with respect to the codes of a quantised kernel, so its
    # gradient is counted as unneeded, together with the gradient of the model's input.
    has_codes = len(frozen) < len(known)
    return (most if has_codes else flops(trained | frozen)) - flops(trained)


def mean_of_arrays(
    plan: StatePlan, loss: LossFn, batch: Batch, remat: Remat = "none"
) -> tuple[Callable[..., Any], tuple]:
    """Returns the loss's `Mean` as a function of arrays, and its arguments' shapes."""
    state = plan.abstract

    def mean_of(params: dict, variables: dict, batch: Batch, key: Any) -> Any:
        with using(plan.layout), default_remat(remat):
            model = plan.merge(params, variables, training=True)
            mean, _ = split_loss_output(
                call_loss(plan.precision, loss, model, batch, key)
            )
            return mean

    def unplaced(x: Any) -> jax.ShapeDtypeStruct:
        # JAX would refuse shardings on a mesh other than the mesh of the trace.
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    arrays = state.params, state.variables, batch, state.key
    return mean_of, jax.tree.map(unplaced, arrays)


def count_jaxpr_flops(jaxpr: Any) -> float:
    """Counts FLOPs of products and convolutions of a jaxpr, in all trips of loops.

    A conditional counts as its most expensive branch, and a loop of unknown length as
    one iteration. Equations that no output needs do not count, and neither do lookups
    that are written as products.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((4, 8))
        >>> count_jaxpr_flops(jax.make_jaxpr(lambda x: x @ x.T)(x).jaxpr)
        256.0
    """
    # Calls are inlined, because the recomputation in a gradient has outputs that
    # nothing reads.
    body = inline(jaxpr)
    return sum(map(_eqn_flops, needed(body.eqns, body.outvars)))


def _count_all(jaxpr: Any) -> float:
    """Counts the FLOPs of all equations of a kernel.

    A kernel writes to references, and has no outputs that need an equation.
    """
    return sum(_eqn_flops(eqn, _count_all) for eqn in jaxpr.eqns)


def _eqn_flops(
    eqn: jex.JaxprEqn, count: Callable[[Any], float] = count_jaxpr_flops
) -> float:
    name, params = eqn.primitive.name, eqn.params
    if LOOKUP in str(eqn.source_info.name_stack):
        return 0.0
    if rule := _PRODUCTS.get(name):
        return rule(eqn)
    inner = list(jex.jaxprs_in_params(params))
    if not inner:
        return 0.0
    if name == "pallas_call":
        return _kernel_flops(eqn, inner)
    counts = [count(body) for body in inner]
    if name == "cond":
        return max(counts)
    return params.get("length", 1) * sum(counts)


def _kernel_flops(eqn: jex.JaxprEqn, inner: list[Any]) -> float:
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops)
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    steps = math.prod(n for n in grid if isinstance(n, int))
    return steps * sum(map(_count_all, inner))


def _dot(eqn: jex.JaxprEqn) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, _, out = _avals(eqn)
    return 2.0 * out.size * math.prod(left.shape[dim] for dim in contracted)


def _convolution(eqn: jex.JaxprEqn) -> float:
    _, kernel, out = _avals(eqn)
    features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    # The holes of a dilated input need no products.
    holes = math.prod(eqn.params["lhs_dilation"])
    return 2.0 * out.size * kernel.size / features / holes


def _ragged_dot(eqn: jex.JaxprEqn) -> float:
    # Each row is multiplied by one expert's kernel, so dims of experts count as one.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    left, right, _ = _avals(eqn)
    shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = [size for dim, size in enumerate(right.shape) if dim not in shared]
    return 2.0 * left.size * math.prod(free)


def _avals(eqn: jex.JaxprEqn) -> tuple[Any, Any, Any]:
    """Returns the shapes of both operands and of the result."""
    return eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval


_PRODUCTS = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged_dot,
}
