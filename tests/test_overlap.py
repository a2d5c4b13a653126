"""Rings hide their transfers in the schedule of the TPU compiler.

Nothing runs: a child process compiles the step for described TPU chips.
"""

from typing import Any

import pytest

from benchmarks.overlap import schedule_of
from nnx_parallel.audit import audit

SCHEDULED = """
HloModule m, is_scheduled=true, num_partitions=4

%product (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %s1 = (f32[8,8]{1,0}, f32[8,8]{1,0}) collective-permute-start(%x), PAIRS
  %f = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%product
  %d1 = f32[8,8]{1,0} collective-permute-done(%s1)
  %s2 = (f32[8,8]{1,0}, f32[8,8]{1,0}) collective-permute-start(%d1), PAIRS
  %a = f32[8,8]{1,0} add(%f, %d1)
  %d2 = f32[8,8]{1,0} collective-permute-done(%s2)
  %g = f32[8,8]{1,0} all-reduce(%a), replica_groups={{0,1,2,3}}, to_apply=%product
  ROOT %r = f32[8,8]{1,0} add(%g, %d2)
}
""".replace("PAIRS", "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}")


def test_transfer_behind_product_is_hidden():
    sent = audit(SCHEDULED).collectives
    found = [(each.kind, each.sent_bytes, each.is_hidden) for each in sent]
    shard = 8 * 8 * 4
    assert found == [
        ("collective-permute", shard, True),
        ("collective-permute", shard, False),
        ("all-reduce", shard * 2 * 3 / 4, False),
    ]


def test_running_sum_hides_nothing():
    """The TPU compiler turns a running sum into a convolution, not a product."""
    fusion = "fusion(%x), kind=kOutput, calls=%product"
    metadata = 'metadata={op_name="jit(f)/jit(cumsum)/reduce_window_sum"}'
    text = SCHEDULED.replace(fusion, f"{fusion}, {metadata}")
    assert not any(each.is_hidden for each in audit(text).collectives)


@pytest.mark.slow
def test_tensor_parallelism_hides_ninety_percent():
    """Measured in bytes. Only transfers of embedding and head are exposed."""
    figures = schedule_or_skip("ring")
    assert figures["exposed"] <= 0.1 * figures["sent"]


@pytest.mark.slow
def test_halves_expose_less_than_whole_rows():
    """Both send the same bytes with SparseCores; halves need no more temporaries."""
    whole, halves = (schedule_or_skip(x, remat="full") for x in ("bulk", "halves"))
    assert halves["sent"] == pytest.approx(whole["sent"], rel=1e-3)
    assert halves["exposed"] <= 0.6 * whole["exposed"]
    assert halves["temporaries"] <= whole["temporaries"]


def schedule_or_skip(name: str, **options: Any) -> dict[str, float]:
    """Calls `schedule_of` for a strategy, or skips the test without libtpu."""
    pytest.importorskip("libtpu")
    return schedule_of(name, **options)
