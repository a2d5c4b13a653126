"""A scheduled program's time depends on its operations, transfers and their order."""

import dataclasses

import pytest

from nnx_parallel.audit.hlo import parse
from nnx_parallel.errors import PlanError
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.plan.roofline import Assumptions
from nnx_parallel.plan.timeline import read_schedule, run_schedule

# One clock cycle takes a second, and each gather takes 10 seconds.
_HEAD = "HloModule step, is_scheduled=true, num_partitions=4\n\n"
_PRODUCT = """%product (a: bf16[8,8], b: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8] parameter(0)
  %b = bf16[8,8] parameter(1)
  ROOT %dot = bf16[8,8] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

"""
_CONFIG = 'backend_config={"window_config":{"estimated_cycles":"6"}}'


def program(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"{_HEAD}{_PRODUCT}ENTRY %main (x: bf16[2,8], y: bf16[8,8]) -> bf16[8,8] {{\n"
        f"  %x = bf16[2,8] parameter(0)\n  %y = bf16[8,8] parameter(1)\n{body}\n}}\n"
    )


GATHER = "all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}"
START = (
    "%start = (bf16[2,8], bf16[8,8]) all-gather-start(%x), "
    "replica_groups={{0,1,2,3}}, dimensions={0}"
)


def fusion(name: str, operand: str) -> str:
    return (
        f"{name} = bf16[8,8] fusion({operand}, %y), kind=kOutput, calls=%product, "
        f"{_CONFIG}"
    )


def time_of(text: str) -> tuple[float, float]:
    work = run_schedule(
        parse(text),
        clock=1.0,
        transfer=lambda found: 10.0,
        kernel_seconds=lambda instruction, computation: 0.0,
    )
    return work.seconds, sum(work.waits.values())


def test_synchronous_gather_is_exposed() -> None:
    text = program(f"%all = bf16[8,8] {GATHER}", fusion("ROOT %out", "%all"))
    assert time_of(text) == (16.0, 10.0)


def test_products_hide_concurrent_transfers() -> None:
    text = program(
        START,
        fusion("%first", "%y"),
        "%all = bf16[8,8] all-gather-done(%start)",
        fusion("ROOT %out", "%all"),
    )
    # 6 of the 10 seconds are hidden.
    assert time_of(text) == (16.0, 4.0)


@pytest.mark.parametrize(
    ("name", "key"), [("async", "calls"), ("call", "to_apply")], ids=str
)
def test_transfer_starts_with_its_operands(name: str, key: str) -> None:
    """SparseCores start a transfer first and get its operands later."""
    wrapped = (
        "%gathering (x: bf16[2,8]) -> bf16[8,8] {\n  %x = bf16[2,8] parameter(0)\n"
        f"  ROOT %all = bf16[8,8] {GATHER}\n}}\n\n"
    )
    text = program(
        f"%start = ((), bf16[8,8]) {name}-start(), {key}=%gathering",
        fusion("%first", "%y"),
        f"%sent = ((bf16[2,8]), bf16[8,8]) {name}-update(%start, %x)",
        fusion("%second", "%y"),
        f"%got = bf16[8,8] {name}-done(%sent)",
        fusion("ROOT %out", "%got"),
    ).replace("ENTRY", wrapped + "ENTRY")
    # 6 s before the transfer starts, 10 s of transfer of which 6 are hidden, 6 s after
    # it.
    assert time_of(text) == (22.0, 4.0)


def test_two_transfers_share_links() -> None:
    text = program(
        START,
        START.replace("%start", "%second"),
        "%all = bf16[8,8] all-gather-done(%start)",
        "%more = bf16[8,8] all-gather-done(%second)",
        fusion("ROOT %out", "%more"),
    )
    assert time_of(text) == (26.0, 20.0)


def test_links_follow_dims_of_group() -> None:
    class Place:
        def __init__(self, *coords: int) -> None:
            self.coords = coords

    topology, sizes = Topology.parse("v5p:4x4x4"), {"data": 1, "fsdp": 4}
    devices = [Place(i, 0, 0) for i in range(4)]
    text = program(f"%all = bf16[8,8] {GATHER}", fusion("ROOT %out", "%all"))
    link = topology.hardware.link_bandwidth / 6
    sent = 8 * 8 * 2 * 3 / 4
    found = read_schedule(text, topology, devices, sizes)
    # A ring along one full dim wraps around, and so has two links.
    assert found.waits == {"fsdp": pytest.approx((sent / (2 * link),) * 2)}
    # The best case is the peak of the matrix units, the worst the compiler's estimate.
    peak, clock = topology.hardware.peak("bfloat16"), topology.hardware.clock
    assert found.products == (2 * 8**3 / peak, 6 / clock)
    spent = found.time(Assumptions(links=(0.5, 1.0)))
    assert spent.fast == pytest.approx(2 * 8**3 / peak + sent / (2 * link))
    assert spent.slow == pytest.approx(6 / clock + sent / link)
    a_line = read_schedule(text, Topology.parse("v5p:4x4x2"), devices, sizes)
    assert a_line.waits["fsdp"][0] == pytest.approx(sent / link)


def test_unknown_clock_raises() -> None:
    hardware = dataclasses.replace(Topology.parse("v5p:4x4x4").hardware, clock=0.0)
    topology = Topology(hardware=hardware, num_devices=4, shape=(2, 2, 1))
    with pytest.raises(PlanError, match="The clock of v5p is not known"):
        read_schedule(program(), topology, [], {})


def test_clocks_match_published_values() -> None:
    # The clock of 1.05 GHz is from Jouppi et al., "TPU v4", 2023, table 4.
    assert Topology.parse("v4:4x4x4").hardware.clock == pytest.approx(1.05e9, rel=0.01)
    assert Topology.parse("v5p:4x4x4").hardware.clock == pytest.approx(1.75e9, rel=0.01)
