"""Rings hide what they send: asserted on the schedule of the TPU compiler.

Nothing runs: the step is compiled for chips that are not there, in a child process.
"""

from typing import Any

import pytest

from benchmarks.overlap import CONFIG, CompilerMissingError, schedule_of
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


def test_a_transfer_is_hidden_if_a_product_runs_before_it_is_awaited():
    sent = audit(SCHEDULED).collectives
    found = [(each.kind, each.sent_bytes, each.is_hidden) for each in sent]
    shard = 8 * 8 * 4
    assert found == [
        ("collective-permute", shard, True),
        ("collective-permute", shard, False),
        ("all-reduce", shard * 2 * 3 / 4, False),
    ]


def test_a_running_sum_hides_nothing():
    """Which the TPU compiler writes as a convolution."""
    fusion = "fusion(%x), kind=kOutput, calls=%product"
    metadata = 'metadata={op_name="jit(f)/jit(cumsum)/reduce_window_sum"}'
    text = SCHEDULED.replace(fusion, f"{fusion}, {metadata}")
    assert not any(each.is_hidden for each in audit(text).collectives)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ring", "bidirectional"])
def test_nine_tenths_of_what_tensor_parallelism_sends_is_hidden(mode: str):
    """By bytes: what is left are the edges, embedding and head, which are no rings."""
    figures = schedule_or_skip(mode)
    assert figures["exposed"] <= 0.1 * figures["sent"]


@pytest.mark.slow
def test_halves_expose_at_most_six_tenths_of_what_whole_rows_do():
    """The same bytes and no more temporaries, sent by SparseCores in both cases."""
    whole, halves = (schedule_or_skip(x, remat="full") for x in ("bulk", "halves"))
    assert halves["sent"] == pytest.approx(whole["sent"], rel=1e-3)
    assert halves["exposed"] <= 0.6 * whole["exposed"]
    assert halves["temporaries"] <= whole["temporaries"]


@pytest.mark.slow
def test_most_of_what_a_prefetching_fsdp_gathers_is_hidden():
    """Two thirds are, where SparseCores send nothing; without prefetch nothing is.

    A device holds one more layer. Backward, the scheduler packs some of the hops behind
    the last product.
    """
    options = {"sets_options": False, "remat": "full"}
    plain = schedule_or_skip("fsdp", **options)
    ring = schedule_or_skip("fsdp, prefetch ring", **options)
    gathered, exposed = gathers(plain)
    assert exposed >= 0.95 * gathered
    more, left = gathers(ring)
    assert left <= more / 3
    layer = 2 * 12 * CONFIG.embed_dim**2
    assert more <= gathered + layer
    assert ring["temporaries"] <= plain["temporaries"] + 1.5 * layer


def schedule_or_skip(name: str, **options: Any) -> dict[str, float]:
    """`schedule_of` a strategy; without libtpu there is nothing to test."""
    pytest.importorskip("libtpu")
    try:
        return schedule_of(name, **options)
    except CompilerMissingError as error:
        pytest.skip(str(error))


def gathers(figures: dict[str, float]) -> tuple[float, float]:
    """Bytes sent and exposed, without sums."""
    sent = figures["sent"] - figures["summed"]
    return sent, figures["exposed"] - figures["summed, exposed"]
