"""Reads a compiled program's collectives: kind, bytes, and participating devices."""

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
"""The kind of an instruction that sends in an unknown way."""

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
        kind: One of `KINDS`. The start and the done of an asynchronous collective count
            as one collective.
        bytes_each: Bytes per device and execution of the larger side: the output of an
            all-gather, and the input of all other kinds. Several operands are summed.
            This is the size of the data, not the communication volume, which depends on
            the algorithm. For a ragged-all-to-all it is the smaller side: devices
            cannot send or receive more than this on average, and the larger side has
            room for more than the average.
        count: Number of executions in a run of the program, counting all trips of
            loops.
        dtypes: The element types of the data.
        group_size: Number of devices that take part together; for a collective-permute,
            the number that its pairs connect.
        groups: Positions of the devices of each group in the program's device order, or
            `None` for an unknown notation.
        source: The JAX operation that it came from, according to the compiler.
        asynchronous: True if start and end are separate instructions, so that other
            work can run in between.
        is_hidden: True if the program's schedule has a product (a matmul, a convolution
            or a kernel) in between, however short it is. `None` for a text that is not
            scheduled.
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
        """Bytes of all executions."""
        return self.bytes_each * self.count

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in all executions, with the best ring algorithm.

        In groups of ``n`` devices an all-reduce sends ``2 (n - 1) / n`` of its bytes, a
        collective-permute sends all of its bytes, and the other kinds send ``(n - 1) /
        n`` of their bytes.
        """
        if self.kind in ("collective-permute", UNREAD):
            return self.bytes
        share = (self.group_size - 1) / self.group_size
        return self.bytes * (2 * share if self.kind == "all-reduce" else share)


def read_collective(
    computation: Computation, instruction: Instruction, num_devices: int
) -> Collective | None:
    """Reads an instruction as a collective that is executed once.

    Returns `None` if it is not a collective, if each of its groups is one device, or if
    it only continues a collective that was started before. If the text has no groups,
    all `num_devices` devices are one group.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in KINDS:
        return None
    is_fused = _ASYNC_FUSION in instruction.attributes
    # The TPU compiler spreads a collective over several fusions and writes it in each
    # of them. In the first fusion an `AsyncCollectiveStart` reads it; the other fusions
    # continue it.
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
        # The first two operands are input and output. Offsets and sizes come after
        # them.
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
    """Returns the mesh axes along which the devices of each group differ.

    Args:
        groups: Positions of devices in the order of the mesh. ``None`` if they are
            unknown: then all axes are returned.
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
        # `[2,4]<=[4,2]T(1,0)` numbers the devices in shape (4, 2), transposes, and
        # reshapes to (2, 4).
        shape, dims, order = map(_ints, found.groups(""))
        ids = np.arange(math.prod(dims)).reshape(dims)
        groups = _rows(ids.transpose(order or range(len(dims))), shape[-1])
    else:
        found = _LISTED.search(attributes)
        listed = re.findall(r"\{([\d,]+)\}", found[1] if found else "")
        groups = tuple(map(_ints, listed))
    # A permutation lists pairs. Pairs that form a ring or a chain are one group.
    if instruction.opcode.startswith("collective-permute"):
        groups = _connected(groups)
        return max(map(len, groups), default=1), groups
    # An empty list means one group of all devices.
    groups = groups or (tuple(range(num_devices)),)
    return max(map(len, groups)), groups


def _mesh_groups(
    mesh: str, devices: str, names: str
) -> tuple[int, ReplicaGroups | None]:
    """Reads `mesh['x'=4,'y'=2] {'y'}`, groups of devices that differ only along y."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    axes = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", names)
    group_size = math.prod(int(size) if size else sizes[name] for name, _, size in axes)
    # `device_ids=([2,4]T(1,0))` numbers the devices in shape (2, 4), and transposes.
    order = _DEVICE_IDS.search(devices)
    # For a list of devices or a part of an axis, only the group's size is read.
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
    """Joins pairs that share a device, so that a ring is one group."""
    groups: list[set[int]] = []
    for pair in pairs:
        joined = set(pair).union(*(g for g in groups if g & set(pair)))
        groups = [group for group in groups if not group & joined] + [joined]
    return tuple(tuple(sorted(group)) for group in groups)


def _rows(ids: np.ndarray, size: int) -> ReplicaGroups:
    return tuple(map(tuple, ids.reshape(-1, size).tolist()))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(json.loads(f"[{text}]"))
