"""Collectives in a compiled program: kind, bytes, and the devices that take part."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nnx_parallel.audit.hlo import Computation, Instruction

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

UNREAD = "unread"
"""The kind of an instruction that sends in a way that is not understood."""

ReplicaGroups = tuple[tuple[int, ...], ...]

# XLA writes the groups of a collective in three notations.
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}")
_DEVICE_IDS = re.compile(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)")
_LISTED = re.compile(r"(?:replica_groups|target_pairs)=(\{(?:\{[\d,]*\},?\s?)*\})")
_ASYNC_FUSION = '"async_collective_fusion_config"'


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: One of `KINDS`. An asynchronous start and its done are one collective.
        bytes_each: Bytes per device and execution of the larger side: the output of an
            all-gather, the input of all others; several operands are summed. The size
            of the data, not the communication volume, which depends on the algorithm.
            For a ragged-all-to-all the smaller side: the mean of the bytes that devices
            send and receive can be no more, and the larger side has room for more than
            the mean.
        count: Executions per run of the program, loops multiplied out.
        dtypes: The element types that move.
        group_size: Devices that take part together; of a collective-permute, those
            that its pairs connect.
        groups: Their positions in the program's device order, or `None` for a notation
            that is not understood.
        source: The JAX operation that it came from, as the compiler recorded it.
        asynchronous: True if it is started and awaited apart, so that other work can
            run in between.
        is_hidden: True if a product (a matmul, a convolution or a kernel) runs in
            between, as the program is scheduled; not whether it lasts as long. `None`
            for a text that is not scheduled.
        axes: The axes of the mesh along which the devices of a group differ; `None`
            if the mesh or the groups are not known.
    """

    kind: str
    bytes_each: int
    count: int
    dtypes: tuple[str, ...]
    group_size: int
    groups: ReplicaGroups | None
    source: str
    asynchronous: bool
    is_hidden: bool | None = None
    axes: tuple[str, ...] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all its executions."""
        return self.bytes_each * self.count

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in all executions, by the ring that sends least.

        An all-reduce sends ``2 (n - 1) / n`` of its bytes, a collective-permute all,
        and of the others ``(n - 1) / n``, in groups of ``n`` devices.
        """
        if self.kind in ("collective-permute", UNREAD):
            return self.bytes
        share = (self.group_size - 1) / self.group_size
        return self.bytes * (2 * share if self.kind == "all-reduce" else share)


def read_collective(
    computation: Computation, instruction: Instruction, num_devices: int
) -> Collective | None:
    """The collective that an instruction is, executed once.

    `None` if it is not a collective, if each of its groups is one device, or if it only
    continues one that was started before. Where no group is written, `num_devices` form
    one.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in KINDS:
        return None
    is_fused = _ASYNC_FUSION in instruction.attributes
    # The TPU compiler spreads a collective over several fusions and writes it in each;
    # in the first an `AsyncCollectiveStart` reads it, the others continue it.
    if is_fused and not any(
        user.attribute("custom_call_target") == "AsyncCollectiveStart"
        for user in computation.users[instruction.name]
    ):
        return None
    group_size, groups = _read_groups(instruction, num_devices)
    if group_size == 1:  # sends nothing
        return None
    sent = computation.operand_shapes(instruction)
    if opcode.startswith("ragged"):
        # Input and output; then come the offsets and the sizes.
        sent = (min(sent[:2], key=lambda shape: shape.num_bytes),)
    num_bytes = sum(shape.num_bytes for shape in sent)
    root = computation.instructions[computation.root]
    # The TPU compiler's reduce-scatter is an all-reduce fused with a slice.
    is_sliced = root.opcode == "dynamic-slice" and root.operands[0] == instruction.name
    is_scattered = instruction.opcode == "all-reduce" and is_sliced
    return Collective(
        kind="reduce-scatter" if is_scattered else opcode,
        bytes_each=num_bytes * (group_size if opcode == "all-gather" else 1),
        count=1,
        dtypes=tuple(dict.fromkeys(shape.dtype for shape in sent)),
        group_size=group_size,
        groups=groups,
        source=instruction.source,
        asynchronous=is_fused or opcode != instruction.opcode,
    )


def axes_of_groups(
    groups: Sequence[Sequence[int]] | None, sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """The mesh axes along which the devices of each group differ.

    Args:
        groups: Positions of devices in the order of the mesh; ``None``: not known,
            taken for all axes.
        sizes: Sizes of the mesh's axes, outermost first.

    Example:
        >>> axes_of_groups([(0, 1), (2, 3)], {"fsdp": 2, "tensor": 2})
        ('tensor',)
        >>> axes_of_groups([(0, 2), (1, 3)], {"fsdp": 2, "tensor": 2})
        ('fsdp',)
    """
    names = tuple(sizes)
    if not groups:
        return names
    found: set[str] = set()
    for group in groups:
        # (devices of the group, axes)
        at = np.stack(np.unravel_index(list(group), tuple(sizes.values())), axis=-1)
        found |= {names[i] for i in np.flatnonzero((at != at[:1]).any(axis=0))}
    return tuple(name for name in names if name in found)


def _read_groups(
    instruction: Instruction, num_devices: int
) -> tuple[int, ReplicaGroups | None]:
    attributes = instruction.attributes
    if found := _MESH.search(attributes):
        return _mesh_groups(*found.groups())
    if found := _IOTA.search(attributes):
        # `[2,4]<=[4,2]T(1,0)`: count in shape (4, 2), transpose, reshape to (2, 4).
        shape, dims, order = map(_ints, found.groups(""))
        ids = np.arange(math.prod(dims)).reshape(dims)
        groups = _rows(ids.transpose(order or range(len(dims))), shape[-1])
    else:
        found = _LISTED.search(attributes)
        listed = re.findall(r"\{([\d,]+)\}", found[1] if found else "")
        groups = tuple(map(_ints, listed))
    # A permutation lists pairs: those that form a ring or a chain are one group.
    if instruction.opcode.startswith("collective-permute"):
        groups = _connected(groups)
        return max(map(len, groups), default=1), groups
    # An empty list means one group of all devices.
    groups = groups or (tuple(range(num_devices)),)
    return max(map(len, groups)), groups


def _mesh_groups(
    mesh: str, devices: str, names: str
) -> tuple[int, ReplicaGroups | None]:
    """`mesh['x'=4,'y'=2] {'y'}`: devices that differ only in their index along y."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    axes = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", names)
    group_size = math.prod(int(size) if size else sizes[name] for name, _, size in axes)
    # `device_ids=([2,4]T(1,0))`: counted in shape (2, 4), transposed.
    order = _DEVICE_IDS.search(devices)
    # A list of devices, or a part of an axis, gives only the size.
    if (devices.strip(", ") and not order) or any(size for _, _, size in axes):
        return group_size, None
    inner = [list(sizes).index(name) for name, _, _ in axes]
    outer = [dim for dim in range(len(sizes)) if dim not in inner]
    ids = np.arange(math.prod(sizes.values()))
    if order:
        dims, transposed = map(_ints, order.groups(""))
        ids = ids.reshape(dims).transpose(transposed or range(len(dims)))
    ids = ids.reshape(*sizes.values())
    # (*outer, *inner) -> (groups, devices of a group)
    return group_size, _rows(ids.transpose(outer + inner), group_size)


def _connected(pairs: ReplicaGroups) -> ReplicaGroups:
    """Joins pairs that share a device: a ring is one group."""
    groups: list[set[int]] = []
    for pair in pairs:
        joined = set(pair).union(*(g for g in groups if g & set(pair)))
        groups = [group for group in groups if not group & joined] + [joined]
    return tuple(tuple(sorted(group)) for group in groups)


def _rows(ids: np.ndarray, size: int) -> ReplicaGroups:
    return tuple(map(tuple, ids.reshape(-1, size).tolist()))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(json.loads(f"[{text}]"))
