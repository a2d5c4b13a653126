"""Costs of a step, and its time as a range from the best to the worst case."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nnx_parallel.plan.hardware import Topology

Range = tuple[float, float]

HOST: Range = (6e9, 25e9)
"""Bytes/s between device and host, one way: half of PCIe 3 to nearly all of PCIe 4."""

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
"""Owners of a device's memory, in the order of the parts of a bar."""

EXACT = ("parameters", "optimizer state", "other state", "batch")
"""Owners that formulas count exactly."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a device sends over one or several mesh axes in a step.

    Attributes:
        axes: The axes, outermost first.
        sent_bytes: Bytes that a device sends, with the ring algorithm that sends the
            least.
        hidden: Smallest and largest share of the bytes that is sent while products run.
        source: The kind of the data.
    """

    axes: tuple[str, ...]
    sent_bytes: float
    hidden: tuple[float, float]
    source: str


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Seconds of a scheduled program, with kernels and links at full speed.

    Attributes:
        products: Seconds of products: at the peak of the systolic arrays, and by the
            compiler's estimate.
        others: Seconds of other operations, by the compiler's estimate.
        kernels: Seconds of kernels at the peak of the systolic arrays; the compiler
            does not estimate them.
        waits: Seconds in which the chip only waits for transfers, by axes, for the two
            values of ``products``.
    """

    products: Range
    others: float
    kernels: float
    waits: Mapping[str, Range]

    def time(self, given: Assumptions, lanes: Iterable[Lane] = ()) -> StepTime:
        """Returns the range of a step's time, bubbles included.

        Args:
            given: The assumed shares of full speed.
            lanes: The load of each part of the device, computed without a schedule.
        """
        lanes = tuple(lanes)
        outside = {lane.name for lane in lanes if lane.leaves_machine}

        def waits(at: int, end: int) -> dict[str, float]:
            return {
                name: seconds[at] / given.of_transfers(name in outside)[end]
                for name, seconds in self.waits.items()
            }

        worse, better = given.products
        least = self.products[0] + self.others + self.kernels / better
        parts = {
            "products": self.products[1] + self.kernels / worse,
            "memory": self.others,
            **waits(1, 0),
        }
        best = {"products": least - self.others, "memory": self.others}
        best |= waits(0, 1)
        return StepTime(
            fast=sum(best.values()),
            slow=sum(parts.values()),
            parts=parts,
            lanes=tuple(
                lane.waited(parts.get(lane.name, 0.0), best.get(lane.name, 0.0))
                for lane in lanes
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a candidate, for one device and one step.

    Attributes:
        memory: Bytes by owner, as in `OWNERS`.
        flops: FLOPs, recomputation included.
        model_flops: FLOPs without recomputation, from which MFU is computed.
        moved_bytes: Lower bound of the bytes between memory and chip.
        traffic: The bytes that the device sends.
        bubble: Share of the time in which a stage waits.
        is_compiled: True if the figures come from a compiler.
        compile_seconds: Seconds of the compilation.
        schedule: The schedule of a TPU's compiler, or ``None``.
        host_bytes: Bytes of host memory for a device's part of the state.
    """

    memory: Mapping[str, float]
    flops: float
    model_flops: float
    moved_bytes: float
    traffic: tuple[Traffic, ...] = ()
    bubble: float = 0.0
    is_compiled: bool = False
    compile_seconds: float = 0.0
    schedule: Schedule | None = None
    host_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Bytes of a device's memory, for all owners."""
        return sum(self.memory.values())

    @property
    def exact_bytes(self) -> float:
        """Bytes of the step's arguments, which are counted and not estimated."""
        return sum(self.memory.get(name, 0.0) for name in EXACT)

    @property
    def sent_bytes(self) -> float:
        """All bytes that a device sends."""
        return sum(each.sent_bytes for each in self.traffic)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Shares of the data sheets' figures; each has a worse and a better value.

    By default they are assumed. `calibrate` measures them.

    Attributes:
        products: Share of the peak FLOP/s that products reach.
        memory: Share of the memory's bandwidth.
        links: Share of the bandwidth of the links in a machine or slice.
        network: Share of the bandwidth of transfers that leave a machine or slice.
        source: The origin of the shares, such as ``"assumed"``.
    """

    products: Range = (0.5, 0.85)
    memory: Range = (0.6, 0.95)
    links: Range = (0.6, 0.95)
    network: Range = (0.6, 0.95)
    source: str = "assumed"

    def of_transfers(self, leaves_machine: bool) -> Range:
        """Returns the share of the bandwidth that transfers attain."""
        return self.network if leaves_machine else self.links

    def lines(self) -> list[str]:
        """Describes the shares in words."""
        shares = {
            "products attain": (self.products, "of the peak FLOP/s"),
            "memory": (self.memory, "of its bandwidth"),
            "links": (self.links, "of their bandwidth, where a ring over one axis "
                      "uses from two links of a device to all"),
        }  # fmt: skip
        if self.network != self.links:
            shares["network"] = (self.network, "of its bandwidth")
        return [
            f"{self.source}: {name} {worse:.0%} to {better:.0%} {of}"
            for name, ((worse, better), of) in shares.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The load of one part of a device in a step, and its time.

    Attributes:
        name: ``products``, ``memory``, or the mesh axes of transfers.
        work: Number of FLOPs or bytes.
        speed: Lowest and highest FLOP/s or bytes/s by the data sheet, at full use.
        hidden: Seconds in which it runs during products, at worst and at best.
        exposed: Seconds that the step waits for it, at worst and at best. For
            ``products`` these are all seconds of the products and the bubble.
        leaves_machine: True for transfers that leave a machine or slice.
    """

    name: str
    work: float
    speed: Range
    hidden: Range
    exposed: Range
    leaves_machine: bool = False

    def waited(self, slow: float, fast: float) -> Lane:
        """Returns the lane with the seconds that a schedule waits for it."""
        hidden = [
            max(0.0, own + other - waits) * (self.name != "products")
            for own, other, waits in zip(
                self.hidden, self.exposed, (slow, fast), strict=True
            )
        ]
        return replace(self, hidden=(hidden[0], hidden[1]), exposed=(slow, fast))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The range of a step's seconds.

    Attributes:
        fast: Seconds at best: every assumption has its better value, and everything
            that may be hidden is hidden.
        slow: Seconds at worst: every assumption has its worse value, and parts run one
            after the other.
        parts: The slow time by part: ``products``, ``bubble``, ``memory``, and the mesh
            axes with transfers that the step waits for.
        lanes: The load and time of each part, for pictures: ``products``, ``memory``,
            and the mesh axes.
    """

    fast: float
    slow: float
    parts: Mapping[str, float]
    lanes: tuple[Lane, ...] = ()

    @property
    def middle(self) -> float:
        """The geometric mean of both ends, by which candidates are ranked."""
        return math.sqrt(self.fast * self.slow)


def time_step(
    costs: Costs,
    topology: Topology,
    axis_sizes: Mapping[str, int],
    dtype: str,
    assumptions: Assumptions | None = None,
) -> StepTime:
    """Computes the range of a step's time.

    The fast end is a roofline: products, memory and hidden transfers run at the same
    time, so the slowest of them decides. Only transfers that cannot be hidden are
    added. The slow end is the sum of all parts. For a scheduled program both ends
    follow the schedule.

    Args:
        costs: The work of a device.
        topology: The devices.
        axis_sizes: Sizes of the mesh axes, outermost first.
        dtype: Dtype of the products.
        assumptions: The assumed shares of full speed.
    """
    given = assumptions or Assumptions()
    peak, memory = topology.hardware.peak(dtype), topology.hardware.memory_bandwidth
    worse, better = (
        costs.flops / (share * peak) / (1 - costs.bubble) for share in given.products
    )
    slow_memory, fast_memory = (
        costs.moved_bytes / (share * memory) for share in given.memory
    )
    products = Lane(
        name="products",
        work=costs.flops,
        speed=(peak, peak),
        hidden=(0.0, 0.0),
        exposed=(worse, better),
    )
    memory_lane = Lane(
        name="memory",
        work=costs.moved_bytes,
        speed=(memory, memory),
        # At best memory traffic runs during products, at worst before or after them.
        hidden=(0.0, fast_memory),
        exposed=(slow_memory, 0.0),
    )
    sent = _sent(costs.traffic, topology, axis_sizes, given)
    parts = {
        "products": worse * (1 - costs.bubble),
        "bubble": worse * costs.bubble,
        "memory": slow_memory,
        **{lane.name: lane.exposed[0] for lane in sent},
    }
    if costs.schedule is not None:
        time = costs.schedule.time(given, (products, memory_lane, *sent))
        return _with_host(time, costs.host_bytes)
    hidden, exposed = (sum(x.hidden[1] for x in sent), sum(x.exposed[1] for x in sent))
    time = StepTime(
        fast=max(better, fast_memory, hidden) + exposed,
        slow=sum(parts.values()),
        parts=parts,
        lanes=(products, memory_lane, *sent),
    )
    return _with_host(time, costs.host_bytes)


def _with_host(time: StepTime, host_bytes: float) -> StepTime:
    """Adds the host's transfers, once in and once out, to the time."""
    if not host_bytes:
        return time
    # These transfers run only during the update, after the last product.
    slow, fast = (host_bytes / rate for rate in HOST)
    return replace(
        time,
        fast=time.fast + fast,
        slow=time.slow + 2 * slow,
        parts={**time.parts, "host": 2 * slow},
    )


def _sent(
    traffic: Iterable[Traffic],
    topology: Topology,
    axis_sizes: Mapping[str, int],
    given: Assumptions,
) -> list[Lane]:
    """Makes a lane for each axis, or group of axes, with traffic."""
    by_axes: dict[tuple[str, ...], list[Traffic]] = {}
    for each in traffic:
        by_axes.setdefault(each.axes, []).append(each)
    lanes = []
    for axes, sent in by_axes.items():
        size, inner = _extent(axes, axis_sizes)
        speed = topology.bandwidth(size, inner)
        leaves_machine = size * inner > topology.machine_size
        shares = given.of_transfers(leaves_machine)
        total = sum(each.sent_bytes for each in sent)
        hidden = [
            sum(each.sent_bytes * each.hidden[end] for each in sent) for end in (0, 1)
        ]
        rates = [share * most for share, most in zip(shares, speed, strict=True)]
        lanes.append(
            Lane(
                name="+".join(axes),
                work=total,
                speed=speed,
                hidden=(hidden[0] / rates[0], hidden[1] / rates[1]),
                exposed=(
                    (total - hidden[0]) / rates[0],
                    (total - hidden[1]) / rates[1],
                ),
                leaves_machine=leaves_machine,
            )
        )
    return lanes


def _extent(axes: tuple[str, ...], axis_sizes: Mapping[str, int]) -> tuple[int, int]:
    """Returns the number of devices along some axes, and the distance of neighbours."""
    names = list(axis_sizes)
    last = max((names.index(axis) for axis in axes if axis in axis_sizes), default=-1)
    inner = math.prod(axis_sizes[name] for name in names[last + 1 :])
    return math.prod(axis_sizes.get(axis, 1) for axis in axes), inner
