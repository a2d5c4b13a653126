"""What a device sends in a step: from where arrays are stored and where they are used.

Bytes are those of the collective that sends the least, a ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from nnx_parallel.pipeline.run import PipelineSchedule
from nnx_parallel.plan.local import Local
from nnx_parallel.plan.roofline import Traffic
from nnx_parallel.sharding.names import as_tuple, in_order
from nnx_parallel.sharding.placement import axes_of


def traffic_of(local: Local) -> list[Traffic]:
    """What a device sends, by axes and reason."""
    sums: dict[tuple, float] = {}
    for part in (_of_state, _of_tensor, _of_sequence, _of_experts, _of_stages):
        for each in part(local):
            key = each.axes, each.hidden, each.source
            sums[key] = sums.get(key, 0) + each.sent_bytes
    return [
        Traffic(axes=axes, sent_bytes=sent, hidden=hidden, source=source)
        for (axes, hidden, source), sent in sums.items()
        if sent
    ]


def _sent(
    local: Local, axes: tuple[str, ...], total: float, source: str, *, exposed: bool
) -> Traffic:
    count = local.size(axes)
    # CPUs send between operations, and compute nothing meanwhile.
    exposed = exposed or local.is_cpu
    return Traffic(
        axes=in_order(axes, local.mesh),
        sent_bytes=total * (count - 1) / count,
        hidden=(0.0, 0.0 if exposed else 1.0),
        source=source,
    )


def _of_state(local: Local) -> Iterator[Traffic]:
    claims = local.layout.claims
    split = (*claims.batch, *local.layout.sequence_axes)
    gathers = 2 if any(place.is_gathered for _, _, place in local.params) else 1
    execution = claims.execution
    is_once = isinstance(execution, PipelineSchedule) and execution.gather == "step"
    # CPUs have no reduce-scatter: they sum up whole gradients, and drop the rest.
    sums = 2 if local.is_cpu else 1
    for _, x, stored_at in local.params:
        place, of_stage = stored_at, 1
        if place.moved:
            # Layers that stages share unevenly are sent to them once a step.
            for source, dtype in (("weights", local.dtype), ("gradients", x.dtype)):
                part = local.shard_bytes(x.shape, place.stored, dtype)
                yield _sent(local, place.moved, part, source, exposed=True)
            place, of_stage = place.in_stage(), local.stages
        stored, used = axes_of(place.stored), axes_of(place.used)
        size = local.shard_bytes(x.shape, place.used, local.dtype) / of_stage
        times = 1 if is_once else gathers * local.microbatches
        if axes := tuple(a for a in stored if a not in used):
            yield _sent(local, axes, times * size, "weights", exposed=False)
        gradient = tuple(a for a in axes_of(place.gradient) if a not in used)
        if gradient:
            total = sums * local.microbatches * size
            yield _sent(local, gradient, total, "gradients", exposed=False)
        rest = tuple(a for a in split if a not in (*used, *gradient))
        if local.size(rest) > 1:
            total = 2 * local.microbatches * size / local.size(gradient)
            yield _sent(local, rest, total, "gradients", exposed=False)
        updated = tuple(a for a in axes_of(place.optimizer) if a not in stored)
        if updated:
            total = local.shard_bytes(x.shape, place.stored, x.dtype) / of_stage
            yield _sent(local, updated, total, "updates", exposed=True)


def _passes(local: Local) -> int:
    """How often a layer's own transfers run: forward, backward, and again by remat."""
    return 2 if local.candidate.remat == "none" else 3


def _of_tensor(local: Local) -> Iterator[Traffic]:
    """Sums of products whose contracted dim is split: by rows, in Megatron's words.

    As many more in the backward pass, of products that are split by columns.
    """
    claims = local.layout.claims
    for _, x, place in local.params:
        first = 1 if place.is_stacked else 0
        spec: list[Any] = [*place.used, *(None,) * (x.ndim - len(place.used))]
        spec = spec[first:]
        if len(spec) < 2:
            continue
        others = (*claims.batch, "pipe")
        axes = tuple(a for a in as_tuple(spec[0]) if a not in others)
        if local.size(axes) < 2 or any(spec[1:]) or x.shape[-1] < 2:
            continue
        layers = x.shape[0] / local.stages if first else 1
        context = local.size(local.layout.sequence_axes)
        tokens = local.rows * local.per_row.positions / context
        size = tokens * x.shape[-1] * local.width
        total = 2 * _passes(local) * layers * local.microbatches * size
        is_halved = claims.halves and claims.execution is None
        exposed = claims.overlap is None and not is_halved
        yield _sent(local, axes, total, "activations", exposed=exposed)


def _of_sequence(local: Local) -> Iterator[Traffic]:
    """Keys and values around the ring, and backward their gradients too."""
    claims = local.layout.claims
    axis = claims.sequence.axis if claims.sequence else ""
    if (count := local.size((axis,))) < 2:
        return
    for info in local.facts.arrays:
        names = info.names or ()
        if "kv_heads" not in names:
            continue
        tensor = local.size(as_tuple(claims.logical.get("kv_heads")))
        at = names.index("kv_heads")
        if len(info.shape) - at < 2 or "embed" not in names:
            continue  # a bias
        layers = info.shape[0] / local.stages if "layers" in names[:1] else 1
        width = math.prod(info.shape[at : at + 2]) / tensor
        tokens = local.rows * local.per_row.positions / count
        # Their own dtype twice, and gradients in float32; `count - 1` hops.
        total = tokens * width * (2 * local.width + 4) * layers * local.microbatches
        yield _sent(local, (axis,), total * count, "keys", exposed=False)


def _of_experts(local: Local) -> Iterator[Traffic]:
    """Tokens to their experts and back, as the exchange of each mixture sends them."""
    axis = local.layout.claims.experts
    if axis is None or (count := local.size((axis.axis,))) < 2:
        return
    # Described devices do not say that they are CPUs, which have no ragged exchange.
    for top_k, layers in local.facts.mixtures:
        how = "gather" if local.is_cpu else axis.choose(local.mesh, top_k)[0]
        # Either a token goes to all devices, or each of its rows to one expert's.
        copies = count if how == "gather" else top_k
        # There and back, both ways; by remat there once more: outputs are not needed.
        times = (2 + _passes(local)) * max(1, layers / local.stages)
        total = copies * local.hidden_bytes * times * local.microbatches
        yield _sent(local, (axis.axis,), total, f"tokens ({how})", exposed=True)


def _of_stages(local: Local) -> Iterator[Traffic]:
    if local.simulation is None or local.stages < 2:
        return
    execution: Any = local.layout.claims.execution
    hops = 2 * execution.schedule.chunks * local.microbatches
    # A hop sends all of it to one neighbour, unlike a ring.
    total = hops * local.hidden_bytes * local.stages / (local.stages - 1)
    yield _sent(local, ("pipe",), total, "activations", exposed=False)
