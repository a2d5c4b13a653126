"""The calculator's data from the library: hardware, and its assumptions."""

from __future__ import annotations

import json

from nnx_parallel.plan import HARDWARE, Assumptions, Hardware


def data() -> dict[str, object]:
    """Machines of the form by name, and the shares that their parts attain."""
    assumed = Assumptions()
    known = [each for each in HARDWARE.values() if each.platform != "cpu"]
    return {
        "machines": {_name(each): _machine(each) for each in known},
        "products": [100 * share for share in assumed.products],
        "links": list(assumed.links),
    }


def script() -> str:
    """The same as JavaScript, for the page."""
    return f"<script>const CALCULATOR = {json.dumps(data())};</script>"


def _name(hardware: Hardware) -> str:
    memory = f"{hardware.memory_bytes / 1e9:.0f} GB"
    if hardware.machine_size:
        size = hardware.machine_size
        return f"{hardware.name.upper()} {memory}, {size} a machine"
    each = hardware.devices_per_chip
    chips = f", {each} devices a chip" if each > 1 else ""
    return f"TPU {hardware.name} {memory}, one slice{chips}"


def _machine(hardware: Hardware) -> dict[str, float]:
    """Figures of one device, in the units of the form."""
    peak = hardware.peak("bfloat16")
    found = {
        "local": hardware.machine_size or 0,  # 0: all of them
        "memory": hardware.memory_bytes / 1e9,
        "usable": 100 * hardware.usable,
        "tflops": peak / 1e12,
        "float32": 100 * hardware.peak("float32") / peak,
        "fast": hardware.link_bandwidth / 1e9,
        "links": hardware.num_links,
        "slow": hardware.network_bandwidth / 1e9,
    }
    return {name: float(f"{value:.6g}") for name, value in found.items()}
