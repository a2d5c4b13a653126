"""Costs of a step, and its time as a range: what it must take, and what may add."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nnx_parallel.plan.hardware import Topology

Range = tuple[float, float]

OWNERS = (
    "parameters",
    "gradients",
    "optimizer state",
    "other state",
    "batch",
    "kept activations",
    "gathered weights",
    "temporaries",
)
"""What a device's memory is for, in the order of the bars."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a device sends over one mesh axis, or over several at once, in a step.

    Attributes:
        axes: The axes, outermost first.
        sent_bytes: Bytes that a device sends, by the ring that sends the least.
        hidden: Least and most share of them during which products run.
        source: What is sent.
    """

    axes: tuple[str, ...]
    sent_bytes: float
    hidden: tuple[float, float]
    source: str


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a candidate on one device and step.

    Attributes:
        memory: Bytes by owner, as in `OWNERS`.
        flops: FLOPs that it computes, recomputation included.
        model_flops: Those without recomputation, from which MFU is counted.
        moved_bytes: Bytes between memory and chip, at least.
        traffic: What it sends.
        bubble: Share of the time in which a stage waits.
        is_compiled: True if a compiler has counted, and no formula.
        compile_seconds: Time of its compilation.
        host_bytes: Memory of the host that a device's part of the state takes.
    """

    memory: Mapping[str, float]
    flops: float
    model_flops: float
    moved_bytes: float
    traffic: tuple[Traffic, ...] = ()
    bubble: float = 0.0
    is_compiled: bool = False
    compile_seconds: float = 0.0
    host_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """All memory of a device."""
        return sum(self.memory.values())

    @property
    def sent_bytes(self) -> float:
        """All bytes that a device sends."""
        return sum(each.sent_bytes for each in self.traffic)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What data sheets do not say, each as the worse and the better value.

    Attributes:
        products: Share of the peak FLOP/s that products attain.
        memory: Share of the memory's bandwidth.
        links: Share of the bandwidth of links and network.
    """

    products: Range = (0.5, 0.85)
    memory: Range = (0.6, 0.95)
    links: Range = (0.6, 0.95)

    def lines(self) -> list[str]:
        """The assumptions in words."""
        shares = {
            "products attain": (self.products, "of the peak FLOP/s"),
            "memory": (self.memory, "of its bandwidth"),
            "links": (self.links, "of theirs, a ring over one axis using from two "
                      "links of a device to all"),
        }  # fmt: skip
        return [
            f"{name} {worse:.0%} to {better:.0%} {of}"
            for name, ((worse, better), of) in shares.items()
        ]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Least and most seconds of a step.

    Attributes:
        fast: Everything at its better value, and all that may be hidden is.
        slow: Everything at its worse value, one after the other.
        parts: The slow time by what takes it: ``products``, ``bubble``, ``memory``, and
            the mesh axes that are waited for.
    """

    fast: float
    slow: float
    parts: Mapping[str, float]

    @property
    def middle(self) -> float:
        """The geometric mean, by which candidates are ranked."""
        return math.sqrt(self.fast * self.slow)


def time_step(
    costs: Costs,
    topology: Topology,
    axis_sizes: Mapping[str, int],
    dtype: str,
    assumptions: Assumptions | None = None,
) -> StepTime:
    """The range of a step's time.

    The fast end is a roofline: products, memory and hidden transfers run at once, the
    slowest of them decides, and only what cannot be hidden comes on top. The slow end
    adds all of them up.

    Args:
        costs: What a device computes, moves and sends.
        topology: The devices.
        axis_sizes: Of the mesh, outermost first.
        dtype: Of the products.
        assumptions: What attains how much.
    """
    given = assumptions or Assumptions()
    peak, memory = topology.hardware.peak(dtype), topology.hardware.memory_bandwidth
    worse, better = (
        costs.flops / (share * peak) / (1 - costs.bubble) for share in given.products
    )
    slow_memory, fast_memory = (
        costs.moved_bytes / (share * memory) for share in given.memory
    )
    hidden, exposed = 0.0, 0.0
    waits: dict[str, float] = {}
    for each in costs.traffic:
        size, inner = _extent(each.axes, axis_sizes)
        least, most = topology.bandwidth(size, inner)
        quick = each.sent_bytes / (given.links[1] * most)
        long = each.sent_bytes / (given.links[0] * least)
        hidden += each.hidden[1] * quick
        exposed += (1 - each.hidden[1]) * quick
        name = "+".join(each.axes)
        waits[name] = waits.get(name, 0) + (1 - each.hidden[0]) * long
    parts = {
        "products": worse * (1 - costs.bubble),
        "bubble": worse * costs.bubble,
        "memory": slow_memory,
        **waits,
    }
    fast = max(better, fast_memory, hidden) + exposed
    return StepTime(fast=fast, slow=sum(parts.values()), parts=parts)


def _extent(axes: tuple[str, ...], axis_sizes: Mapping[str, int]) -> tuple[int, int]:
    """Devices along some axes, and devices between two neighbours along them."""
    names = list(axis_sizes)
    last = max((names.index(axis) for axis in axes if axis in axis_sizes), default=-1)
    inner = math.prod(axis_sizes[name] for name in names[last + 1 :])
    return math.prod(axis_sizes.get(axis, 1) for axis in axes), inner
