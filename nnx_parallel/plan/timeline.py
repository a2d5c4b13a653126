"""Computes a scheduled program's time, with one clock for the chip and one for links.

A TPU's program runs in the order in which it is printed. A product takes at best the
time of the systolic arrays at their peak, and at worst the cycles that the compiler
estimated for the tiles that it chose. Other operations take the compiler's estimate. A
collective takes the time of its bytes over the links that its group spans. An
asynchronous collective holds only the links, until the operation that awaits it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnx_parallel.audit.collectives import KINDS, Collective, axes_of_groups
from nnx_parallel.audit.hlo import Computation, Instruction, Known, Module, parse
from nnx_parallel.audit.transfers import count_flops, roles_of
from nnx_parallel.audit.walk import Cost, CostWalk, Loop, Walk
from nnx_parallel.errors import PlanError
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.plan.roofline import Range, Schedule

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**60  # the compiler writes a number above this for "not known"
_ENTERED = ("while", "conditional", "call")


Group = tuple[int, ...] | None
"""Positions of devices that send to each other; ``None`` if unknown."""


@dataclass
class Work:
    """The time of one run of a program, by kind of work.

    Attributes:
        seconds: Seconds of the whole run.
        product_seconds: Seconds of operations that contain a product.
        other_seconds: Seconds of other operations.
        kernel_seconds: Seconds of kernels, which the compiler does not estimate.
        link_seconds: Seconds of all transfers.
        waits: Seconds in which the chip only waits for transfers, by group.
    """

    seconds: float = 0.0
    product_seconds: float = 0.0
    other_seconds: float = 0.0
    kernel_seconds: float = 0.0
    link_seconds: float = 0.0
    waits: dict[Group, float] = field(default_factory=dict)

    def add(self, other: Work, times: int = 1) -> Work:
        """Adds work that runs after this work, once or several times."""
        for name, seconds in vars(other).items():
            if name != "waits":
                setattr(self, name, getattr(self, name) + times * seconds)
        for group, seconds in other.waits.items() if times else ():
            self.waits[group] = self.waits.get(group, 0.0) + times * seconds
        return self

    def wait(self, end: float, group: Group) -> None:
        """Adds the seconds until a transfer ends, at ``end``."""
        late = max(0.0, end - self.seconds)
        self.seconds += late
        self.waits[group] = self.waits.get(group, 0.0) + late


def run_schedule(
    module: Module,
    *,
    clock: float,
    transfer: Callable[[Collective], float],
    kernel_seconds: Callable[[Instruction, Computation], float],
    peak: float = 0.0,
) -> Work:
    """Runs a scheduled program on two clocks.

    Args:
        module: The program after code generation, with the compiler's estimates.
        clock: Cycles per second.
        transfer: Seconds of a collective.
        kernel_seconds: Seconds of a kernel.
        peak: FLOP/s of products. A product takes its time at this peak if that is less
            than the compiler's estimate; 0: always use the estimate.
    """
    walk = _TimeWalk(
        module,
        costs=CostWalk(module),
        clock=clock,
        transfer=transfer,
        kernel_seconds=kernel_seconds,
        peak=peak,
    )
    return walk.computation(module.entry, ())


@dataclass(frozen=True, kw_only=True)
class _TimeWalk(Walk[Work]):
    costs: CostWalk
    clock: float
    transfer: Callable[[Collective], float]
    kernel_seconds: Callable[[Instruction, Computation], float]
    peak: float

    def computation(self, name: str, arguments: Known) -> Work:
        """Returns the work of a computation, including the waits for its transfers."""
        computation = self.module.computations[name]
        values = self.module.evaluate(name, arguments)
        work, links_free = Work(), 0.0
        pending: dict[str, tuple[float, Group]] = {}  # ends of transfers
        # A SparseCore is started before it has its operands. Its transfer begins when
        # it gets them, and lasts the stored seconds.
        waiting: dict[str, tuple[float, Group]] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode in _ENTERED:
                work.add(self.enter(instruction, values))
                links_free = max(links_free, work.seconds)
                continue
            names = [o.partition("#")[0] for o in instruction.operands]
            if sent := next((waiting.pop(o) for o in names if o in waiting), None):
                links_free = max(links_free, work.seconds) + sent[0]
                pending[instruction.name] = links_free, sent[1]
                continue
            ends = [pending[o] for o in names if o in pending]
            roles = roles_of(self.module, instruction)
            if ends and (instruction.opcode.endswith("-done") or "Done" in roles):
                work.wait(*max(ends, key=lambda end: end[0]))
                continue
            cost = self.costs.instruction(computation, instruction, values) or Cost()
            spent = self._compute(computation, instruction, cost.flops, work)
            work.seconds += spent
            found = cost.collectives[0] if cost.collectives else None
            if ends and (found is None or found.asynchronous):
                # An operation that continues a transfer has a part of the collective
                # inside. An operation that only reads another output has no such part.
                if found is not None or self._sends(instruction):
                    pending[instruction.name] = max(ends, key=lambda end: end[0])
                continue
            if found is None:
                continue
            group = found.groups[0] if found.groups else None
            lasts = self.transfer(found)
            work.link_seconds += lasts
            is_async = instruction.opcode.endswith("-start") or "Start" in roles
            if is_async and not any(names):
                waiting[instruction.name] = lasts, group
                continue
            links_free = max(links_free, work.seconds - spent) + lasts
            if is_async:
                pending[instruction.name] = links_free, group
            else:
                # The collective's computation, such as sums, runs during its transfer.
                work.wait(links_free, group)
        return work

    def loop(self, instruction: Instruction, loop: Loop[Work]) -> Work:
        """Returns the work of all trips; conditions are assumed to take no time."""
        return Work().add(loop.body, loop.trips)

    def conditional(self, instruction: Instruction, branches: list[Work]) -> Work:
        """Returns the work of the branch that takes longest."""
        return max(branches, key=lambda work: work.seconds)

    def _compute(
        self,
        computation: Computation,
        instruction: Instruction,
        flops: float,
        work: Work,
    ) -> float:
        """Returns the seconds of an operation, and adds them to the work."""
        if "tpu_custom_call" in instruction.attributes:
            seconds = self.kernel_seconds(instruction, computation)
            work.kernel_seconds += seconds
            return seconds
        found = _CYCLES.search(instruction.attributes)
        cycles = int(found[1]) if found else 0
        if cycles > _NO_ESTIMATE:
            return 0.0
        seconds = cycles / self.clock
        if flops:
            if self.peak:
                seconds = min(seconds, flops / self.peak)
            work.product_seconds += seconds
        else:
            work.other_seconds += seconds
        return seconds

    def _sends(self, instruction: Instruction) -> bool:
        """Returns True if it has part of a collective, or only passes values on."""
        if instruction.opcode in ("get-tuple-element", "tuple", "bitcast"):
            return True
        called = self.module.computations.get(instruction.called or "")
        inside = called.instructions.values() if called else ()
        return instruction.opcode.endswith("-update") or any(
            each.opcode in KINDS for each in inside
        )


def read_schedule(
    text: str,
    topology: Topology,
    devices: Sequence[Any],
    axis_sizes: Mapping[str, int],
    dtype: str = "bfloat16",
) -> Schedule:
    """Reads the schedule of a program for a slice of TPUs.

    Args:
        text: The program after code generation, with the compiler's estimates.
        topology: The slice.
        devices: Devices that the topology describes, in the order of the mesh.
        axis_sizes: Sizes of the mesh axes, outermost first.
        dtype: Dtype of the products.

    Raises:
        PlanError: If the clock of the devices is unknown.
    """
    hardware = topology.hardware
    if not hardware.clock:
        raise PlanError(f"The clock of {hardware.name} is not known.")
    peak, module = hardware.peak(dtype), parse(text)

    def kernel(instruction: Instruction, computation: Computation) -> float:
        flops, dims = attention_flops(instruction, computation)
        return flops / (peak * share_of_array(dims, hardware.array))

    def run(peak: float) -> Work:
        return run_schedule(
            module,
            clock=hardware.clock,
            peak=peak,
            transfer=_transfer_seconds(topology, devices),
            kernel_seconds=kernel,
        )

    fast, slow = run(peak), run(0.0)
    waits: dict[str, Range] = {}
    for group in slow.waits:
        name = "+".join(axes_of_groups([group] if group else None, axis_sizes))
        before = waits.get(name, (0.0, 0.0))
        both = fast.waits[group], slow.waits[group]
        waits[name] = before[0] + both[0], before[1] + both[1]
    return Schedule(
        products=(fast.product_seconds, slow.product_seconds),
        others=slow.other_seconds,
        kernels=slow.kernel_seconds,
        waits=waits,
    )


def _transfer_seconds(
    topology: Topology, devices: Sequence[Any]
) -> Callable[[Collective], float]:
    """Returns a function for a collective's seconds over the links of a torus [1].

    A ring along a dim that wraps around uses both links of a device in this dim. If the
    dim does not wrap around, it is a line, and the devices at its ends have one link. A
    collective over several dims splits its bytes among rings along all these dims.
    Between slices a device sends its shard over the network.

    References:
        [1] Austin et al., "How to Scale Your Model", 2025, section 3,
        https://jax-ml.github.io/scaling-book/sharding/
    """
    hardware = topology.hardware
    link = hardware.link_bandwidth / hardware.num_links
    network = hardware.network_bandwidth
    known: dict[tuple[int, ...], tuple[int, int]] = {}

    def links_of(group: tuple[int, ...]) -> tuple[int, int]:
        """Returns the numbers of a device's links and of the group's slices."""
        if group not in known:
            places = [devices[i] for i in group]
            links = 0
            for dim, side in enumerate(topology.shape):
                count = len({place.coords[dim] for place in places})
                is_ring = topology.wraps[dim] and count == side
                links += (2 if is_ring else 1) if count > 1 else 0
            slices = {getattr(place, "slice_index", 0) for place in places}
            known[group] = max(1, links), len(slices)
        return known[group]

    def seconds(found: Collective) -> float:
        everyone = tuple(range(len(devices)))
        links, slices = links_of(found.groups[0] if found.groups else everyone)
        sent = found.sent_bytes
        between = sent / found.group_size * slices if slices > 1 else 0.0
        return sent / (links * link) + between / network

    return seconds


# For each score, the number of products with the width of a head. The keys are parts of
# the names of Splash's kernels.
_SCORES = {"dkv": 4, "dq": 3, "fwd": 2}
_BLOCK = re.compile(r'block_kv\\?": ?(\d+)')


def attention_flops(
    instruction: Instruction, computation: Computation
) -> tuple[float, tuple[int, ...]]:
    """Returns FLOPs of a kernel, and dims of its products that may not fill an array.

    In causal attention Splash computes whole blocks on the diagonal, and no block above
    it. For other kernels, the estimate of the kernel's author is used.
    """
    estimate = count_flops(computation, instruction)
    found = next((n for name, n in _SCORES.items() if name in instruction.name), 0)
    shapes = computation.operand_shapes(instruction)
    large = [s.dims for s in shapes if len(s.dims) >= 3 and s.dtype in ("bf16", "f32")]
    if not found or not large:
        return estimate, ()
    if found == 4 and "fused" in instruction.attributes[:4000]:
        found = 5  # the fused kernel also computes the gradient of the queries
    *batch, seq, width = large[0]  # the queries
    block = _BLOCK.search(instruction.attributes)
    half = 0.5 * (1 + (int(block[1]) if block else 512) / seq)
    return 2.0 * found * math.prod(batch) * seq**2 * width * half, (width,)


def share_of_array(sizes: tuple[int, ...], width: int) -> float:
    """Returns the share of a systolic array that a product with these dims fills [1].

    Dims that are shorter than the array, or not a multiple of its width, leave a part
    of it idle.

    Example:
        >>> share_of_array((128, 4096), 256)
        0.5

    References:
        [1] Austin et al., "How to Scale Your Model", 2025, section 2,
        https://jax-ml.github.io/scaling-book/tpus/
    """
    return math.prod(n / (math.ceil(n / width) * width) for n in sizes)
