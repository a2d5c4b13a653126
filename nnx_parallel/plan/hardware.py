"""Describes devices by their data sheets, and topologies of absent devices.

The figures are published by the makers, without sparsity; `Hardware.source` is the page
to check them on. In November 2026 they were checked for v5e, v5p and v6e; for v7x only
the FLOP/s and the size of the memory were checked. The figures of GPUs agree with
quotations of their data sheets. If pages of one maker differ, the figure of the newest
page is used, as for the memory of v6e (1,600, 1,638 and 1,640 GB/s). The network of v4
is assumed to be v5p's. Each GPU is assumed to have one network adapter; two L40S share
one. Users describe other devices with a `Hardware`, like the entries of the table.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nnx_parallel.errors import PlanError, suggest
from nnx_parallel.mesh import StandIn

_GIB, _GB, _TERA = 2**30, 1e9, 1e12


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device: its speeds of computing and sending, and its memory.

    Attributes:
        name: The name in a `Topology`.
        platform: ``"tpu"``, ``"gpu"`` or ``"cpu"``.
        flops: FLOP/s of dense products, by the dtype of their operands; ``"float8"``
            stands for all kinds of 8-bit floating point. Makers of GPUs print twice
            these figures, "with sparsity", which products in training do not have.
        memory_bytes: Bytes of a device's memory.
        usable: Share of the memory that a program gets. JAX takes 75 % of a GPU's
            memory unless ``XLA_PYTHON_CLIENT_MEM_FRACTION`` sets another share.
        memory_bandwidth: Bytes/s between memory and chip.
        link_bandwidth: Bytes/s in one direction over all fast links of a device.
        num_links: Number of fast links; 1 if a switch gives every pair of devices the
            full bandwidth. A ring over one mesh axis may get only two of the links.
        network_bandwidth: Bytes/s of each device in one direction between machines or
            slices.
        machine_size: Number of devices that fast links join; ``None``: all devices of a
            slice.
        source: The page with the figures.
        compiler: Arguments of ``get_topology_desc``; their ``name`` is the compiler's
            name for the device. Empty if no compiler runs without the device.
        devices_per_chip: Number of JAX devices for each chip in the name of a slice.
            The other figures are for one device.
        accelerator: Name and units per chip of Google Cloud's accelerator types:
            ``("v5p", 2)``, because ``v5p-128`` has 64 chips with two TensorCores each.
        kinds: Prefixes of the ``device_kind`` of JAX devices of this hardware.
        array: Width of a systolic array; 0 if the device has no such array.
        clock: Cycles per second, as the compiler counts cycles; 0 if unknown.

    Example:
        >>> HARDWARE["v5p"].flops["bfloat16"] / 1e12
        459.0
    """

    name: str
    platform: str
    flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    source: str
    usable: float = 0.75
    num_links: int = 1
    machine_size: int | None = None
    compiler: Mapping[str, Any] = field(default_factory=dict)
    devices_per_chip: int = 1
    accelerator: tuple[str, int] | None = None
    kinds: tuple[str, ...] = ()
    array: int = 0
    clock: float = 0.0

    @property
    def usable_bytes(self) -> float:
        """Bytes of memory that a program gets."""
        return self.usable * self.memory_bytes

    def peak(self, dtype: str) -> float:
        """Returns FLOP/s of products of a dtype; the lowest for an unlisted dtype."""
        dtype = "float8" if dtype.startswith("float8") else dtype
        return self.flops.get(dtype, min(self.flops.values()))


def _tpu(
    name: str,
    kinds: tuple[str, ...],
    tflops: tuple[float, float, float],
    array: tuple[int, int],
    memory: tuple[float, float],
    links: tuple[float, int, float],
    source: str,
    *,
    accelerator: tuple[str, int],
    compiler: Mapping[str, Any] | None = None,
    devices: int = 1,
) -> Hardware:
    """Describes a TPU by the figures of its chip.

    Args:
        name: The name in a `Topology`.
        kinds: See `Hardware`.
        tflops: TFLOP/s in bfloat16, int8 and 8-bit floating point. If the maker gives
            no figure for 8-bit floating point, JAX multiplies it in bfloat16. The
            bfloat16 figure also counts for float32, which JAX multiplies in one
            bfloat16 pass.
        array: Width of a systolic array, and multiplications per cycle of all arrays.
            The clock is derived from these and the published FLOP/s.
        memory: Size in GiB, and bandwidth in GB/s.
        links: GB/s of all links in both directions together, the number of links, and
            GB/s of the network.
        source: The page with the figures.
        accelerator: See `Hardware`.
        compiler: See `Hardware`; by default only the name.
        devices: Number of JAX devices for each chip.
    """
    bfloat16, int8, float8 = (number * _TERA / devices for number in tflops)
    speeds = {"bfloat16": bfloat16, "float32": bfloat16, "int8": int8, "float8": float8}
    return Hardware(
        name=name,
        platform="tpu",
        flops=speeds,
        memory_bytes=memory[0] * _GIB / devices,
        memory_bandwidth=memory[1] * _GB / devices,
        link_bandwidth=links[0] / 2 * _GB / devices,
        num_links=links[1],
        network_bandwidth=links[2] * _GB / devices,
        usable=0.95,
        source=_CLOUD + source,
        compiler=compiler or {"name": name},
        devices_per_chip=devices,
        accelerator=accelerator,
        kinds=kinds,
        array=array[0],
        clock=tflops[0] * _TERA / (2 * array[1]),
    )


def _gpu(
    name: str,
    kind: str,
    tflops: tuple[float, float, float],
    memory: tuple[float, float],
    links: tuple[float, float],
    source: str,
    *,
    int8: float | None = None,
    machine: int = 8,
) -> Hardware:
    """Describes a GPU.

    Args:
        name: The name in a `Topology`.
        kind: See `Hardware.kinds`.
        tflops: TFLOP/s in bfloat16, in TF32 (JAX's default for float32), and in 8-bit
            floating point.
        memory: Size in GB, and bandwidth in GB/s.
        links: GB/s in both directions together, and GB/s of the network. The network is
            one adapter for each GPU, as in the maker's systems; data sheets of chips do
            not have this figure.
        source: The page with the figures.
        int8: TFLOP/s in int8; by default twice as many as in bfloat16.
        machine: Number of GPUs that fast links join: a machine, or a whole rack.
    """
    bfloat16, tf32, float8 = (number * _TERA for number in tflops)
    speeds = {"bfloat16": bfloat16, "float16": bfloat16, "float32": tf32}
    return Hardware(
        name=name,
        platform="gpu",
        flops=speeds | {"int8": (int8 or 2 * tflops[0]) * _TERA, "float8": float8},
        memory_bytes=memory[0] * _GB,
        memory_bandwidth=memory[1] * _GB,
        link_bandwidth=links[0] / 2 * _GB,
        network_bandwidth=links[1] * _GB,
        machine_size=machine,
        source=source,
        kinds=(kind,),
    )


_CLOUD = "https://docs.cloud.google.com/tpu/docs/"
# The bfloat16 figures there are with sparsity: twice the figures below.
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_AMD = "https://www.amd.com/en/products/accelerators/instinct/"

# fmt: off
HARDWARE: dict[str, Hardware] = {
    each.name: each
    for each in (
        # The two cores of a chip are one device, which is how v4 is used.
        _tpu("v4", ("TPU v4",), (275, 275, 275), (128, 8 * 128**2), (32, 1200),
             (600, 6, 6.25), "v4; links: Jouppi et al., TPU v4, 2023, table 4",
             compiler={"name": "v4", "chip_config_name": "megacore"},
             accelerator=("v4", 2)),
        _tpu("v5e", ("TPU v5 lite", "TPU v5e"), (197, 393, 197), (128, 4 * 128**2),
             (16, 819), (400, 4, 3.125), "v5e", accelerator=("v5litepod", 1)),
        _tpu("v5p", ("TPU v5", "TPU v5p"), (459, 918, 459), (128, 8 * 128**2),
             (95, 2765), (1200, 6, 6.25),
             "v5p; int8: Austin et al., How to Scale Your Model, 2025, chapter 2",
             accelerator=("v5p", 2)),
        _tpu("v6e", ("TPU v6 lite", "TPU v6e"), (918, 1836, 918), (256, 4 * 256**2),
             (32, 1638), (800, 4, 12.5), "v6e", accelerator=("v6e", 1)),
        _tpu("v7x", ("TPU7x", "TPU v7x"), (2307, 2307, 4614), (256, 8 * 256**2),
             (192, 7380), (1200, 6, 12.5), "tpu7x",
             compiler={"name": "tpu7x"}, devices=2, accelerator=("tpu7x", 2)),
        _gpu("a100", "NVIDIA A100", (312, 156, 312), (80, 2039), (600, 25),
             _NVIDIA + "a100 (SXM, 80 GB)"),
        _gpu("h100", "NVIDIA H100", (989.4, 494.7, 1978.9), (80, 3350), (900, 50),
             _NVIDIA + "h100 (SXM)"),
        _gpu("h200", "NVIDIA H200", (989.4, 494.7, 1978.9), (141, 4800), (900, 50),
             _NVIDIA + "h200 (SXM)"),
        _gpu("b200", "NVIDIA B200", (2250, 1125, 4500), (180, 8000), (1800, 50),
             _NVIDIA + "dgx-b200"),
        _gpu("b300", "NVIDIA B300", (2250, 1125, 4500), (270, 8000), (1800, 100),
             _NVIDIA + "dgx-b300", int8=150),
        _gpu("gb200", "NVIDIA GB200", (2500, 1250, 5000), (186, 8000), (1800, 50),
             _NVIDIA + "gb200-nvl72", machine=72),
        _gpu("gb300", "NVIDIA GB300", (2500, 1250, 5000), (279, 8000), (1800, 100),
             _NVIDIA + "gb300-nvl72", int8=165, machine=72),
        # A bridge joins two of these.
        _gpu("h100-nvl", "NVIDIA H100 NVL", (835.5, 417.7, 1670.5), (94, 3938),
             (600, 50), _NVIDIA + "h100 (NVL)", machine=2),
        # These GPUs have no NVLink. The links are PCIe's, and two GPUs share an
        # adapter.
        _gpu("l40s", "NVIDIA L40S", (362, 183, 733), (48, 864), (64, 25),
             _NVIDIA + "l40s"),
        _gpu("mi300x", "AMD Instinct MI300X", (1307.4, 653.7, 2614.9), (192, 5300),
             (896, 50), _AMD + "mi300.html"),
        # These figures are not from a data sheet. They are for trying strategies and
        # for compiling.
        Hardware(
            name="cpu",
            platform="cpu",
            flops={"float32": 5e10},
            memory_bytes=4 * _GIB,
            usable=1.0,
            memory_bandwidth=1e10,
            link_bandwidth=5e9,
            network_bandwidth=5e9,
            source="a nominal core of a machine that simulates devices",
            compiler={"name": "cpu"},
        ),
    )
}
# fmt: on
"""The devices that `plan` knows, by name."""


def hardware_of(device: Any) -> Hardware | None:
    """Returns the entry of `HARDWARE` for a JAX device, or ``None``."""
    kind = device.device_kind
    found = {k: each for each in HARDWARE.values() for k in each.kinds}
    known = [k for k in found if kind.startswith(k)]
    return found[max(known, key=len)] if known else None


def _without_accelerator(name: str, known: Mapping[str, Hardware]) -> str:
    """Translates an accelerator type of Google Cloud: ``v5p-128`` to ``v5p:4x4x4``.

    Other names are not changed.

    Raises:
        PlanError: If no slice has this many chips.
    """
    found = re.fullmatch(r"(\d+\*)?(\w+)-(\d+)", name)
    tpus = [
        each
        for each in known.values()
        if found and each.accelerator and found[2] in (each.name, each.accelerator[0])
    ]
    if not found or not tpus:
        return name
    hardware, number = tpus[0], int(found[3])
    units = hardware.accelerator[1] if hardware.accelerator else 1
    dims = hardware.num_links // 2
    # A side of a slice has 1, 2 or 4 chips, or a multiple of 4: larger slices consist
    # of cubes of 4 x 4 x 4 chips. Slices of v5e and v6e have at most 16 x 16 chips.
    sides = [1, 2, *range(4, 257, 4)] if dims == 3 else [1, 2, 4, 8, 16]
    shapes = [
        shape
        for shape in itertools.combinations_with_replacement(sides, dims)
        if math.prod(shape) * units == number
    ]
    if not shapes:
        raise PlanError(
            f"topology={name!r}: no slice of {hardware.name} has {number / units:g} "
            f"chips. The number after the dash counts "
            f"{'TensorCores, two per chip' if units == 2 else 'chips'}: for example, "
            f"'{found[2]}-{16 * units}' has 16 chips."
        )
    best = min(shapes, key=sum)
    # Google writes a plane of chips as 2x2x1.
    ones = best.count(1)
    ordered = (*best[ones:], *best[:ones])
    return f"{found[1] or ''}{hardware.name}:{'x'.join(map(str, ordered))}"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A number of devices of one kind, and the links that join them.

    Attributes:
        hardware: The device.
        num_devices: Number of devices, as JAX counts them.
        num_slices: Number of TPU slices, which the data-center network joins.
        shape: Number of chips of a slice along each dim of its torus; empty for GPUs.

    Example:
        >>> Topology.parse("v5p:4x4x4").num_devices
        64
        >>> Topology.parse("2*v5e:16x16").num_slices
        2
        >>> Topology.parse("v5p-128").name  # 128 TensorCores, as gcloud counts them
        'v5p:4x4x4'
        >>> Topology.parse("h100:16").machine_size
        8
    """

    hardware: Hardware
    num_devices: int
    num_slices: int = 1
    shape: tuple[int, ...] = ()

    @classmethod
    def parse(
        cls,
        name: str,
        known: Mapping[str, Hardware] = HARDWARE,
        *,
        machine_size: int | None = None,
        network_bandwidth: float | None = None,
    ) -> Topology:
        """Makes a topology from its name.

        Args:
            name: ``kind:AxBxC`` for a slice of TPU chips, ``N*kind:AxBxC`` for several
                slices, ``kind:N`` for GPUs or simulated CPU devices. The accelerator
                types of Google Cloud, such as ``v5p-128`` and ``v5litepod-256``, mean
                the most cubic slice of their size, as in Google Cloud.
            known: Hardware by kind.
            machine_size: `Hardware.machine_size`, if yours differs.
            network_bandwidth: `Hardware.network_bandwidth`, if yours differs.

        Raises:
            PlanError: If the name is unknown, if no slice has that many chips, or if
                the GPUs do not fill their machines.
        """
        name = _without_accelerator(str(name).lower(), known)
        found = re.fullmatch(r"(?:(\d+)\*)?([\w.-]+):(\d+(?:x\d+)*)", str(name).lower())
        if found is None:
            raise PlanError(
                f"topology={name!r} is unknown. Write a slice of TPUs as "
                "'v5p:4x4x4' or 'v5p-128', two of them as '2*v5p:4x4x4', GPUs as "
                "'h100:64', simulated devices as 'cpu:8'."
            )
        slices, kind, sizes = int(found[1] or 1), found[2], found[3]
        if kind not in known:
            raise PlanError(
                f"topology={name!r}: no hardware is called "
                f"{kind!r}.{suggest(kind, known)} Known: {', '.join(known)}. Describe "
                "other hardware by nnx_parallel.plan.hardware.Hardware(...) in "
                "Topology(hardware=...)."
            )
        changes = {
            "machine_size": machine_size,
            "network_bandwidth": network_bandwidth,
        }
        for key, value in changes.items():
            if value is not None and not value > 0:
                raise PlanError(f"{key}={value!r} must be larger than 0.")
        given = {key: value for key, value in changes.items() if value is not None}
        hardware = replace(known[kind], **given)
        shape = tuple(map(int, sizes.split("x")))
        count = slices * math.prod(shape) * hardware.devices_per_chip
        is_slice = hardware.platform == "tpu"
        if not count or (len(shape) > 1 or slices > 1) > is_slice:
            raise PlanError(
                f"topology={name!r}: give the number of {kind} devices, at least 1: "
                f"'{kind}:{max(count, 8)}'."
            )
        dims = hardware.num_links // 2  # dims of a torus have two links each
        if is_slice and dims and len(shape) > dims:
            raise PlanError(
                f"topology={name!r} has {len(shape)} dims. A slice of {kind} has at "
                f"most {dims}, such as '{kind}:{'x'.join(['4'] * dims)}'."
            )
        machine = hardware.machine_size or count
        if count > machine and count % machine:
            full = -(-count // machine) * machine
            size = max(n for n in range(1, machine) if count % n == 0)
            raise PlanError(
                f"topology={name!r} has {count} devices, and fast links join {machine} "
                f"devices of {kind}. Write '{kind}:{full}'; or give the size of your "
                f"machines, such as machine_size={size} (--machine-size {size})."
            )
        return cls(
            hardware=hardware,
            num_devices=count,
            num_slices=slices,
            shape=shape if is_slice else (),
        )

    @property
    def name(self) -> str:
        """The name that `parse` reads."""
        sizes = self.shape or (self.num_devices,)
        slices = f"{self.num_slices}*" * (self.num_slices > 1)
        return f"{slices}{self.hardware.name}:{'x'.join(map(str, sizes))}"

    @property
    def machine_size(self) -> int:
        """Number of devices that fast links join."""
        inside = self.num_devices // self.num_slices
        return min(inside, self.hardware.machine_size or inside)

    @property
    def devices(self) -> list[Any]:
        """Stand-ins for the devices, in order."""
        inside = self.num_devices // self.num_slices
        kind = self.hardware.name
        # The platform is a name that JAX does not know. For TPUs JAX would ask each
        # device for its place in a torus.
        return [
            StandIn(i, "described", kind, i // inside) for i in range(self.num_devices)
        ]

    @property
    def wraps(self) -> tuple[bool, bool, bool]:
        """For each dim of a slice's torus, True if a link joins its ends [1].

        If a slice consists of whole cubes of 4 x 4 x 4 chips, optical switches close
        its torus in all dims. v5e and v6e are wired in blocks of 16 x 16 chips, so a
        dim of 16 chips is closed.

        References:
            [1] Austin et al., "How to Scale Your Model", 2025, part 2,
            https://jax-ml.github.io/scaling-book/tpus
        """
        if len(self.shape) == 3:
            is_closed = all(side % 4 == 0 for side in self.shape)
            return is_closed, is_closed, is_closed
        x, y = (*self.shape, 1, 1)[:2]
        return x == 16, y == 16, False

    def described(self) -> Sequence[Any]:
        """Returns devices as the TPU compiler describes them; they may be absent.

        Programs can be compiled for these devices, but not run. This needs `libtpu`.
        The description includes the links that wrap around. By default JAX leaves these
        links out, and a gather over several dims of a torus then sends twice the bytes.

        Raises:
            PlanError: If the devices are not TPUs.

        Example:
            >>> Topology.parse("v5p:4x4x4").wraps
            (True, True, True)
            >>> Topology.parse("v5p:2x2x1").wraps
            (False, False, False)
        """
        if self.hardware.platform != "tpu":
            raise PlanError(
                f"topology={self.name!r} has no compiler that runs without devices. "
                "Describe TPUs, such as 'v5p:4x4x4'."
            )
        from jax.experimental import topologies

        options = dict(self.hardware.compiler)
        sizes = "x".join(map(str, self.shape))
        name = f"{options.pop('name')}:{sizes}"
        if self.num_slices > 1:
            options["num_slices"] = self.num_slices
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=name, wrap=self.wraps, **options
        )
        return described.devices

    def bandwidth(self, size: int, inner: int) -> tuple[float, float]:
        """Returns a device's lowest and highest bytes/s in a ring over a mesh axis.

        Args:
            size: Size of the axis, or product of the sizes of several axes of one
                collective.
            inner: Distance of two neighbours along the axis, in devices: the product of
                the sizes of the inner axes.
        """
        fast = self.hardware.link_bandwidth
        if size * inner <= self.machine_size:
            # A ring along one dim of a torus has the two links of that dim. A ring over
            # all dims together has all links.
            return fast * min(1.0, 2 / self.hardware.num_links), fast
        # A ring that leaves the machine uses the adapters of its devices in this
        # machine.
        adapters = max(1, self.machine_size // inner)
        slow = min(fast, self.hardware.network_bandwidth * adapters)
        return self.hardware.network_bandwidth, slow
