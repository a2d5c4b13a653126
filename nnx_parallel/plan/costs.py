"""Counts the costs of one row of a batch in the traced loss, for any strategy.

The loss is traced for a prime number of rows that divides no other size, so the size of
a value shows whether it depends on rows. Nothing is compiled or computed.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
from flax import nnx

from nnx_parallel.errors import StackError
from nnx_parallel.layers.experts.moe import MoE
from nnx_parallel.layers.loss import LOGITS, default_chunk_size
from nnx_parallel.layers.stack.scan import BLOCK_INPUT, OVERLAPPED, Remat, Save
from nnx_parallel.layers.stack.stack import Stack
from nnx_parallel.plan.parts import Parts
from nnx_parallel.precision import array_bytes
from nnx_parallel.programs import carried_by_scan, variables_in, walk
from nnx_parallel.training.model_flops import (
    count_jaxpr_flops,
    count_model_flops,
    mean_of_arrays,
    one_device,
)

_ROWS = 7919  # a prime that is unlikely to be the size of a layer
# `Save` cannot keep values with these names.
_PRIVATE = {BLOCK_INPUT, OVERLAPPED, LOGITS}


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A value that the forward pass keeps for the backward pass.

    Attributes:
        num_bytes: Bytes for one row of the batch, summed over all layers.
        dims: Shape for one row, without the dim of the layers.
        is_stacked: True if each layer of a stack keeps such a value.
        chunk_size: For logits: tokens of a chunk on a device; ``None`` is the default.
    """

    num_bytes: float
    dims: tuple[int, ...]
    is_stacked: bool = False
    chunk_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class RowCosts:
    """The costs of a row under one remat policy.

    Attributes:
        flops: FLOPs of products and convolutions, forward and backward, including
            recomputation and the masked scores of attention.
        residuals: The values that the forward pass keeps.
        positions: Number of positions in a row: the tokens of a sequence.
        width: Number of elements of the residual stream at one position.
        names: The names of values, for `Save`.
        scores: The largest array of attention scores, if there is one. Attention in
            plain operations keeps this array. The gradient of attention needs further
            arrays of the same size.
        logits: The logits of `linear_cross_entropy`, if the loss calls it.
    """

    flops: float
    residuals: tuple[Residual, ...]
    positions: int
    width: int
    names: tuple[str, ...] = ()
    scores: Residual | None = None
    logits: Residual | None = None

    @property
    def num_bytes(self) -> float:
        """Bytes of the values that the forward pass keeps."""
        return sum(each.num_bytes for each in self.residuals)


def trace_costs(parts: Parts, remat: Remat, platform: str) -> RowCosts:
    """Counts the costs of a row of the batch.

    Args:
        parts: The model, its loss and a batch.
        remat: The Trainer's remat policy.
        platform: Platform of the devices. Its kernels decide which values are kept.

    Raises:
        Exception: Any error that the loss raises when it is traced.
    """
    # A call of cuDNN cannot be traced where cuDNN is missing. Instead plain operations
    # are traced: they keep about as many bytes.
    traced = "described" if platform == "gpu" else platform
    parts = parts.with_rows(_ROWS)
    plan = parts.on(one_device(traced))
    mean_of, given = mean_of_arrays(plan, parts.loss, parts.batch, remat)

    def objective(*arrays: Any) -> Any:
        return mean_of(*arrays).value

    def forward(params: dict, *rest: Any) -> Any:
        return jax.vjp(lambda p: objective(p, *rest), params)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trace of the step shows them again
        kept = jax.make_jaxpr(forward)(*given).jaxpr
        grads = jax.make_jaxpr(jax.grad(objective))(*given).jaxpr
    residuals = tuple(_residuals(kept))
    # The residual stream has the shape that a stack's layers pass on. Without a stack
    # it is assumed to have the most common shape of residuals.
    positions, width = _hidden(kept, parts) or _positions(residuals)
    named = (eqn for eqn, _ in walk(grads) if eqn.primitive.name == "name")
    return RowCosts(
        flops=count_jaxpr_flops(grads) / _ROWS,
        residuals=residuals,
        positions=positions,
        width=width,
        names=tuple(sorted({eqn.params["name"] for eqn in named} - _PRIVATE)),
        scores=_scores(grads, positions),
        logits=_logits(grads, positions, width),
    )


def save_costs(
    parts: Parts, platform: str, full: RowCosts | None = None
) -> dict[Save, RowCosts]:
    """Counts the costs of policies that keep more and more named values of a block.

    The values are tried in the order of the FLOPs that each saves by itself per kept
    byte. Each policy keeps the values of the policy before it, and one more. A value
    that then saves no further FLOPs is left out.

    Args:
        parts: The model, its loss and a batch.
        platform: Platform of the devices, as in `trace_costs`.
        full: Costs under the policy ``"full"``, if they are known already.
    """
    full = full or trace_costs(parts, "full", platform)
    found = []
    for name in full.names:
        try:
            one = trace_costs(parts, Save(name), platform)
        except StackError:
            continue  # a value outside of the blocks
        saved, size = full.flops - one.flops, one.num_bytes - full.num_bytes
        if saved > 0 and size > 0:
            found.append((saved / size, -size, name, one))
    policies: dict[Save, RowCosts] = {}
    names, least = list[str](), full.flops
    for _, _, name, one in sorted(found, key=lambda each: each[:3], reverse=True):
        save = Save(*names, name)
        costs = trace_costs(parts, save, platform) if names else one
        # Two names may stand for one product, before and after another operation.
        if costs.flops < least:
            policies[save], least = costs, costs.flops
            names.append(name)
    return policies


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that all candidates of a Trainer and a batch share; they are traced once.

    Attributes:
        parts: The model, its loss and the batch.
        traced: Costs of a row by remat policy, for the policies that were asked for.
        platform: The platform of the devices.
        model_flops: The model's FLOPs for a row (`count_model_flops`).
        model: The abstract model.
    """

    parts: Parts
    traced: Mapping[Remat, RowCosts]
    platform: str
    model_flops: float
    model: nnx.Module

    @functools.cached_property
    def saves(self) -> Mapping[Save, RowCosts]:
        """Costs of a row under the policies of `save_costs`."""
        named = self.parts.named_on(one_device())
        return save_costs(named, self.platform, self.traced.get("full"))

    def row(self, remat: Remat) -> RowCosts:
        """Returns the costs of a row under a policy."""
        if remat in self.traced or not isinstance(remat, Save):
            return self.traced[remat]
        return self.saves[remat]

    @functools.cached_property
    def mixtures(self) -> list[tuple[int, int]]:
        """For each mixture of experts: experts per token, and number of layers."""
        modules = [*nnx.iter_modules(self.model)]
        stacks = {p: m.num_layers for p, m in modules if isinstance(m, Stack)}
        found = []
        for path, module in modules:
            if isinstance(module, MoE):
                layers = [n for p, n in stacks.items() if path[: len(p)] == p]
                found.append((module.experts.top_k, math.prod(layers)))
        return found

    @classmethod
    def of(cls, parts: Parts, remats: Iterable[Remat], platform: str) -> Facts:
        """Traces the loss under some remat policies."""
        # "none" is traced too, because it shows the bytes that one layer needs while it
        # is recomputed.
        wanted: list[Remat] = [*dict.fromkeys((*remats, "none"))]
        named = parts.named_on(one_device())
        some = named.with_rows(_ROWS)
        plan = some.on(one_device())
        return cls(
            parts=parts,
            traced={remat: trace_costs(named, remat, platform) for remat in wanted},
            platform=platform,
            model_flops=count_model_flops(plan, some.loss, some.batch) / _ROWS,
            model=named.rebuilt(),
        )


def _residuals(kept: jex.Jaxpr) -> Iterable[Residual]:
    """Yields those outputs of a traced VJP that depend on rows."""
    inputs = {*kept.invars, *kept.constvars}
    for var in dict.fromkeys(variables_in(kept.outvars)):
        aval: Any = var.aval
        # A value without rows is a parameter in the dtype of the computation.
        if var in inputs or aval.size == 0 or aval.size % _ROWS:
            continue
        where = [i for i, n in enumerate(aval.shape) if n % _ROWS == 0]
        yield Residual(
            num_bytes=array_bytes(aval.shape, aval.dtype) / _ROWS,
            dims=tuple(aval.shape[where[0] + 1 :] if where else aval.shape),
            is_stacked=bool(where) and where[0] > 0,
        )


def _scores(grads: jex.Jaxpr, positions: int) -> Residual | None:
    """Returns the largest value with a number for each head and pair of positions."""
    found: set[tuple[int, ...]] = set()
    for eqn, _ in walk(grads):
        for var in eqn.outvars:
            shape = getattr(var.aval, "shape", ())
            at = next((i for i, n in enumerate(shape) if n and n % _ROWS == 0), None)
            if at is None:
                continue
            # Rows may be joined with heads. A stack's layers compute one after the
            # other, so a dim of layers does not count.
            heads = [shape[at] // _ROWS] if shape[at] > _ROWS else []
            dims = (*heads, *shape[at + 1 :])
            if is_of_pairs(dims, positions):
                found.add(dims)
    if not found:
        return None
    dims = max(found, key=math.prod)
    return Residual(num_bytes=4.0 * math.prod(dims), dims=dims)


def is_of_pairs(dims: Sequence[int], positions: int) -> bool:
    """Returns True if the dims of a row end with a dim of heads and two of positions.

    Without a dim of heads, a hidden state as wide as the sequence would look the same.
    """
    return len(dims) > 2 and positions > 1 and (*dims[-2:],) == (positions,) * 2


def _logits(grads: jex.Jaxpr, positions: int, embed: int) -> Residual | None:
    """Returns the logits of a loss in chunks."""
    for eqn, _ in walk(grads):
        if eqn.primitive.name == "name" and eqn.params["name"] == LOGITS:
            aval: Any = eqn.outvars[0].aval
            classes, width = aval.shape[-1], aval.dtype.itemsize
            chunk, tokens = aval.size // classes, _ROWS * positions
            # The scan divides the tokens evenly over its chunks.
            default = default_chunk_size(embed, classes, 1)
            even = -(-tokens // -(-tokens // default))
            return Residual(
                num_bytes=float(positions * classes * width),
                dims=(positions, classes),
                chunk_size=None if chunk == even else chunk,
            )
    return None


def _hidden(kept: jex.Jaxpr, parts: Parts) -> tuple[int, int] | None:
    """Returns the number of positions and the width of the rows that a scan carries.

    The scan is the first one over the layers of a `Stack`.
    """
    modules = (module for _, module in nnx.iter_modules(parts.rebuilt()))
    lengths = {m.num_layers for m in modules if isinstance(m, Stack)}
    for eqn, _ in walk(kept):
        if eqn.primitive.name != "scan" or eqn.params["length"] not in lengths:
            continue
        first, end = carried_by_scan(eqn)
        avals: list[Any] = [v.aval for v in eqn.outvars[: end - first]]
        carried = [aval.shape for aval in avals]
        rows = [shape[1:] for shape in carried if shape and shape[0] == _ROWS]
        if dims := max(filter(None, rows), key=math.prod, default=None):
            return math.prod(dims[:-1]), dims[-1]
    return None


def _positions(residuals: tuple[Residual, ...]) -> tuple[int, int]:
    """Returns the number of positions and the width of a row.

    Both come from the most common shape of residuals.
    """
    shapes: dict[tuple[int, int], int] = {}
    for each in residuals:
        # A value with a last dim of size one is a statistic, such as a norm's mean.
        if len(each.dims) >= 2 and each.dims[-1] > 1:
            shape = math.prod(each.dims[:-1]), each.dims[-1]
            shapes[shape] = shapes.get(shape, 0) + 1
    if not shapes:
        return 1, max((r.dims[-1] for r in residuals if r.dims), default=1)
    return max(shapes, key=lambda shape: shapes[shape])
