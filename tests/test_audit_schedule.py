"""Tests the audit of a schedule: senders, hidden transfers, unreadable instructions."""

import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.audit import audit
from nnx_parallel.audit.collectives import UNREAD

SHARD, WHOLE = 2 * 16 * 2, 8 * 16 * 2  # bytes of bf16[2,16] and of bf16[8,16]

# A loop over three layers under FSDP on 4 chips, in which libtpu schedules transfers on
# SparseCores: a start without operands, an update that hands over the data, and a done.
# The program waits for one gather before the layer's product, and for one after it. The
# reduction gets its data after the product, and another product follows.
SPARSE_CORES = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}

%called.1 (p: bf16[2,16]) -> bf16[8,16] {
  %p = bf16[2,16]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %gather.1 = bf16[8,16]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=1, \
replica_groups=mesh['fsdp'=4] {'fsdp'}, dimensions={0}
}, execution_thread="sparsecore"

%called.2 (p.2: bf16[2,16]) -> bf16[8,16] {
  %p.2 = bf16[2,16]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %gather.2 = bf16[8,16]{1,0:T(8,128)(2,1)} all-gather(%p.2), channel_id=2, \
replica_groups=mesh['fsdp'=4] {'fsdp'}, dimensions={0}
}, execution_thread="sparsecore"

%called.3 (p.3: bf16[8,16]) -> bf16[2,16] {
  %p.3 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %scatter = bf16[2,16]{1,0:T(8,128)(2,1)} reduce-scatter(%p.3), channel_id=3, \
replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}, execution_thread="sparsecore"

%product (a: bf16[16,8], b: bf16[8,16]) -> bf16[16,16] {
  %a = bf16[16,8]{1,0} parameter(0)
  %b = bf16[8,16]{1,0} parameter(1)
  ROOT %dot = bf16[16,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

%body (s: (s32[], bf16[2,16], bf16[16,8], s32[])) -> \
(s32[], bf16[2,16], bf16[16,8], s32[]) {
  %s = (s32[], bf16[2,16]{1,0}, bf16[16,8]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %w = bf16[2,16]{1,0} get-tuple-element(%s), index=1
  %h = bf16[16,8]{1,0} get-tuple-element(%s), index=2
  %one = s32[] get-tuple-element(%s), index=3
  %next = s32[] add(%i, %one)
  %g1-start = ((), (), (s32[8192]{0:T(1024)}, s32[53]{0:T(1)S(11)})) \
custom-call-start(), async_execution_thread="sparsecore", \
custom_call_target="TODO(b/522284627)", called_computations={%called.1}, \
metadata={op_name="jit(step)/while/body/up"}
  %g1-update = ((bf16[2,16]{1,0}), bf16[8,16]{1,0}, (s32[8192]{0})) \
custom-call-update(%g1-start, %w)
  %g1-done = bf16[8,16]{1,0} custom-call-done(%g1-update)
  %g2-start = ((), (), (s32[8192]{0:T(1024)}, s32[53]{0:T(1)S(11)})) \
custom-call-start(), async_execution_thread="sparsecore", \
custom_call_target="TODO(b/522284627)", called_computations={%called.2}
  %g2-update = ((bf16[2,16]{1,0}), bf16[8,16]{1,0}, (s32[8192]{0})) \
custom-call-update(%g2-start, %w)
  %r-start = ((), (), (s32[8192]{0:T(1024)}, s32[53]{0:T(1)S(11)})) \
custom-call-start(), async_execution_thread="sparsecore", \
custom_call_target="TODO(b/522284627)", called_computations={%called.3}
  %f1 = bf16[16,16]{1,0} fusion(%h, %g1-done), kind=kOutput, calls=%product
  %g2-done = bf16[8,16]{1,0} custom-call-done(%g2-update)
  %r-update = ((bf16[8,16]{1,0}), bf16[2,16]{1,0}, (s32[8192]{0})) \
custom-call-update(%r-start, %g2-done)
  SECOND
  %r-done = bf16[2,16]{1,0} custom-call-done(%r-update)
  ROOT %out = (s32[], bf16[2,16]{1,0}, bf16[16,8]{1,0}, s32[]) \
tuple(%next, %r-done, %h, %one)
}

%condition (s.1: (s32[], bf16[2,16], bf16[16,8], s32[])) -> pred[] {
  %s.1 = (s32[], bf16[2,16]{1,0}, bf16[16,8]{1,0}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (w.1: bf16[2,16], h.1: bf16[16,8]) -> bf16[2,16] {
  %w.1 = bf16[2,16]{1,0} parameter(0)
  %h.1 = bf16[16,8]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %one.1 = s32[] constant(1)
  %start = (s32[], bf16[2,16]{1,0}, bf16[16,8]{1,0}, s32[]) \
tuple(%zero, %w.1, %h.1, %one.1)
  %loop = (s32[], bf16[2,16]{1,0}, bf16[16,8]{1,0}, s32[]) while(%start), \
condition=%condition, body=%body
  ROOT %r = bf16[2,16]{1,0} get-tuple-element(%loop), index=1
}
"""
PRODUCT = "%f2 = bf16[16,16]{1,0} fusion(%h, %g2-done), kind=kOutput, calls=%product"
SCHEDULE = SPARSE_CORES.replace("SECOND", PRODUCT)


# libtpu 0.0.52 writes a SparseCore's collective as a custom call, and 0.0.50 as a call.
# Other compilers write an asynchronous computation.
TARGET = 'custom_call_target="TODO(b/522284627)", called_computations={%called.'
AS_CALLS = re.sub(
    rf"{re.escape(TARGET)}(\d)}}", r"to_apply=%called.\1", SCHEDULE
).replace("custom-call-", "call-")
AS_ASYNC = AS_CALLS.replace(" call-", " async-").replace("to_apply=", "calls=")


@pytest.mark.parametrize(
    "text", [SCHEDULE, AS_CALLS, AS_ASYNC], ids=["custom call", "call", "async"]
)
def test_sparse_core_collectives_are_read(text: str) -> None:
    report = audit(text)
    assert [
        (each.kind, each.count, each.bytes_each, each.asynchronous, each.is_hidden)
        for each in report.collectives
    ] == [
        ("all-gather", 3, WHOLE, True, False),  # waited for before the product
        ("all-gather", 3, WHOLE, True, True),
        ("reduce-scatter", 3, WHOLE, True, True),
    ]
    assert report.sent_bytes() == 3 * 3 * WHOLE * 3 / 4
    assert report.sent_bytes("reduce-scatter") == 3 * WHOLE * 3 / 4
    assert report.hidden_share == pytest.approx(2 / 3)
    assert report.hidden_share_of("all-gather") == 0.5
    assert report.unread == ()
    assert report.collectives[0].source == "jit(step)/while/body/up"
    assert not report.custom_calls  # custom_calls lists kernels only


def test_sum_is_hidden_only_after_data_arrive():
    """The reduction starts before the first product, but has no data to send yet."""
    report = audit(SPARSE_CORES.replace("SECOND", "%t = bf16[16,8]{1,0} copy(%h)"))
    assert report.hidden_share_of("reduce-scatter") == 0.0
    assert report.hidden_share == pytest.approx(1 / 3)


def test_compiler_dump_matches_printed_program():
    """The dump wraps a SparseCore's program in a computation, and uses other names."""
    wrapped = "".join(
        f"""
%wrapper.{i} (q: {given}) -> {result} {{
  %q = {given}{{1,0}} parameter(0)
  ROOT %run = {result}{{1,0}} custom-call(%q), \
custom_call_target="TODO(b/522284627)", called_computations={{%called.{i}}}
}}, execution_thread="sparsecore"
"""
        for i, given, result in (
            (1, "bf16[2,16]", "bf16[8,16]"),
            (2, "bf16[2,16]", "bf16[8,16]"),
            (3, "bf16[8,16]", "bf16[2,16]"),
        )
    )
    text = re.sub(
        r'custom_call_target="TODO[^"]*", called_computations={%called\.(\d)}',
        r"calls=%wrapper.\1",
        SCHEDULE,
    ).replace("custom-call-", "async-")
    header, rest = text.split("\n", 1)
    theirs = audit(header + "\n" + wrapped + rest)
    ours = audit(SCHEDULE)
    assert theirs.hidden_share == ours.hidden_share
    assert [(x.kind, x.bytes, x.is_hidden) for x in theirs.collectives] == [
        (x.kind, x.bytes, x.is_hidden) for x in ours.collectives
    ]


def test_text_without_schedule_has_no_hidden_share():
    report = audit(SCHEDULE.replace(", is_scheduled=true", ""))
    assert report.hidden_share is None
    assert {each.is_hidden for each in report.collectives} == {None}
    assert "behind products" not in str(report)


@pytest.mark.parametrize(
    ("written", "name", "num_bytes"),
    [
        # The called computation is missing from the text.
        ("SPARSE", "TODO(b/522284627)", 3 * 4 * (8192 + 53)),
        ("%u = (bf16[16,8]{1,0}, token[]) send(%h, %k), channel_id=9", "send", 256),
        (
            '%u = bf16[16,8]{1,0} custom-call(%h), custom_call_target="tpu_custom_call"'
            ', backend_config={"custom_call_config":{"has_communication": true}}',
            "tpu_custom_call",
            256,
        ),
        (
            '%u = bf16[16,8]{1,0} custom-call(%h), custom_call_target="elsewhere", '
            "to=%called.4",
            "all-gather",
            WHOLE,
        ),
    ],
)
def test_unknown_collective_counts_as_exposed(written: str, name: str, num_bytes: int):
    called = SCHEDULE[SCHEDULE.index("%called.1") : SCHEDULE.index("%called.2")]
    if written == "SPARSE":
        text = SCHEDULE.replace("{%called.1}", "{%gone}").replace(called, "")
    else:
        text = SCHEDULE.replace(PRODUCT, f"{PRODUCT}\n  {written}")
    if "called.4" in written:
        text = text.replace("%called.1 (", called.replace("d.1", "d.4") + "%called.1 (")
    report = audit(text)
    (found,) = {each.source.partition(":")[0] for each in report.unread}
    assert found == name
    (unread,) = report.unread
    assert unread.kind == UNREAD
    assert not unread.is_hidden
    hidden = sum(x.sent_bytes for x in report.collectives if x.is_hidden)
    total = sum(x.sent_bytes for x in report.collectives) + unread.bytes
    assert report.sent_bytes() == total
    assert report.hidden_share == pytest.approx(hidden / total)
    assert unread.bytes >= num_bytes
    assert f"not understood, counted as sent and not hidden: {name}: " in str(report)


def test_report_names_axes_and_is_json():
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh = Mesh(devices, ("data", "fsdp"))
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P("fsdp")))
    whole = NamedSharding(mesh, P())
    compiled = jax.jit(lambda x: x * 2, out_shardings=whole).lower(x).compile()
    report = audit(compiled)
    (gather,) = report.collectives
    assert gather.axes == ("fsdp",)
    assert report.hidden_share == 0.0  # a CPU waits for each transfer
    row = str(report).splitlines()[-1].split()
    assert row[:2] == ["all-gather", "1"]
    assert row[7:9] == ["fsdp", "no"]
    found = json.loads(json.dumps(report.to_json()))
    assert found == report.to_json()
    assert found["hidden_share"] == 0.0
    assert found["sent_bytes"] == 8 * 8 * 4 * 3 / 4
    assert found["collectives"][0]["axes"] == ["fsdp"]
    html = report._repr_html_()  # pyright: ignore[reportPrivateUsage]
    assert "<th>hidden</th>" in html


def test_audit_of_text_uses_given_mesh():
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    assert {each.axes for each in audit(SCHEDULE).collectives} == {None}
    assert {each.axes for each in audit(SCHEDULE, mesh=mesh).collectives} == {("fsdp",)}


# A collective that the TensorCore sends during products, spread over three fusions.
FUSIONS = """\
HloModule m, is_scheduled=true, num_partitions=4

%first (p: bf16[2,16]) -> (bf16[2,16], bf16[8,16]) {
  %p = bf16[2,16]{1,0} parameter(0)
  %g = bf16[8,16]{1,0} all-gather(%p), channel_id=4, replica_groups=[1,4]<=[4], \
dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %begin = (bf16[2,16]{1,0}, bf16[8,16]{1,0}) custom-call(%g), \
custom_call_target="AsyncCollectiveStart"
}

%middle (a: bf16[16,8], b: bf16[8,16], p.1: bf16[2,16]) -> (bf16[16,16], bf16[8,16]) {
  %a = bf16[16,8]{1,0} parameter(0)
  %b = bf16[8,16]{1,0} parameter(1)
  %p.1 = bf16[2,16]{1,0} parameter(2)
  %dot = bf16[16,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
  %g.1 = bf16[8,16]{1,0} all-gather(%p.1), channel_id=4, replica_groups=[1,4]<=[4], \
dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %both = (bf16[16,16]{1,0}, bf16[8,16]{1,0}) tuple(%dot, %g.1)
}

%last (q: bf16[8,16]) -> bf16[8,16] {
  %q = bf16[8,16]{1,0} parameter(0)
  ROOT %end = bf16[8,16]{1,0} custom-call(%q), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[2,16], h: bf16[16,8], w: bf16[8,16]) -> bf16[8,16] {
  %x = bf16[2,16]{1,0} parameter(0)
  %h = bf16[16,8]{1,0} parameter(1)
  %w = bf16[8,16]{1,0} parameter(2)
  %s = (bf16[2,16]{1,0}, bf16[8,16]{1,0}) fusion(%x), kind=kCustom, calls=%first
  %x.1 = bf16[2,16]{1,0} get-tuple-element(%s), index=0
  %m = (bf16[16,16]{1,0}, bf16[8,16]{1,0}) fusion(%h, %w, %x.1), kind=kOutput, \
calls=%middle
  %y = bf16[8,16]{1,0} get-tuple-element(%m), index=1
  ROOT %d = bf16[8,16]{1,0} fusion(%y), kind=kCustom, calls=%last
}
"""


def test_collective_spread_over_fusions_counts_once():
    (found,) = audit(FUSIONS).collectives
    assert (found.kind, found.bytes, found.is_hidden) == ("all-gather", WHOLE, True)
    alone = FUSIONS.replace("convolution(%a, %b), dim_labels=bf_io->bf", "copy(%a)")
    (found,) = audit(alone).collectives
    assert found.is_hidden is False
