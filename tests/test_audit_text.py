"""The audit of programs in the text formats of other backends' compilers."""

import pytest

from nnx_parallel.audit import Report, audit

GROUPS = {
    "{{0,1,2,3},{4,5,6,7}}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[2,4]<=[4,2]T(1,0)": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['x'=4,'y'=2] {'x'}": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['x'=2,'y'=2,'z'=2] {'x','z'}": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "mesh['x'=4,'y'=1,'z'=2], device_ids=([2,4]T(1,0)) {'x'}": (
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ),
    "{}": (tuple(range(8)),),
}


@pytest.mark.parametrize("written", GROUPS)
def test_replica_group_notations_are_parsed(written):
    text = f"""\
HloModule m, num_partitions=8

ENTRY %main (p: bf16[8,4]) -> bf16[8,4] {{
  %p = bf16[8,4]{{1,0}} parameter(0)
  ROOT %r = bf16[8,4]{{1,0}} all-reduce(bf16[8,4]{{1,0}} %p), \
replica_groups={written}, to_apply=%add
}}
"""
    (found,) = audit(text).collectives
    assert found.groups == GROUPS[written]
    assert found.group_size == len(GROUPS[written][0])
    assert found.bytes_each == 8 * 4 * 2


def test_report_prints_its_class_table():
    class Short(Report):
        def table(self) -> str:
            return f"{self.flops:g} FLOPs"

    text = "ENTRY %main () -> s32[] {\n  ROOT %r = s32[] constant(1)\n}\n"
    assert str(Short(**vars(audit(text)))) == "0 FLOPs"


# Text of the TPU compiler. It has layouts with parentheses, no trip count, asynchronous
# starts, a dot rewritten as a convolution inside a fusion, a reduce-scatter written as
# an all-reduce fused with a slice, and a collective that is repeated in each fusion
# that it spans.
TPU_TEXT = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%fused_dot (a: bf16[64,32], b: bf16[32,16]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[32,16]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %dot = bf16[64,16]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf
  ROOT %tanh = bf16[64,16]{1,0:T(8,128)(2,1)} tanh(%dot)
}

%fused_attention (q: bf16[4,2,32,16], k: bf16[4,2,32,16]) -> bf16[4,2,32,32] {
  %q = bf16[4,2,32,16]{3,2,1,0} parameter(0)
  %k = bf16[4,2,32,16]{3,2,1,0} parameter(1)
  ROOT %dot.1 = bf16[4,2,32,32]{3,2,1,0} convolution(%q, %k), \
window={size=4x2 stride=3x1 lhs_dilate=4x2}, dim_labels=01bf_01oi->01bf
}

%all-reduce-scatter (input: f32[64,16]) -> f32[8,16] {
  %input = f32[64,16]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[64,16]{1,0:T(8,128)} all-reduce(%input), channel_id=2, \
replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add
  %zero = s32[]{:T(128)} constant(0)
  ROOT %slice = f32[8,16]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %zero, %zero), \
dynamic_slice_sizes={8,16}
}

%fused_start (p: bf16[8,16]) -> (bf16[8,16], bf16[64,16]) {
  %p = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[64,16]{1,0} all-gather(%p), channel_id=4, \
replica_groups=[1,8]<=[8], dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %start = (bf16[8,16]{1,0}, bf16[64,16]{1,0}) custom-call(%all-gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%fused_middle (p.1: bf16[8,16], a.1: bf16[64,32], b.1: bf16[32,16]) -> \
(bf16[64,16], bf16[64,16]) {
  %p.1 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %a.1 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(1)
  %b.1 = bf16[32,16]{1,0:T(8,128)(2,1)} parameter(2)
  %dot.2 = bf16[64,16]{1,0} convolution(%a.1, %b.1), dim_labels=bf_io->bf
  %all-gather.2 = bf16[64,16]{1,0} all-gather(%p.1), channel_id=4, \
replica_groups=[1,8]<=[8], dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %both = (bf16[64,16]{1,0}, bf16[64,16]{1,0}) tuple(%dot.2, %all-gather.2)
}

%body (state: (s32[], f32[64,16], s32[])) -> (s32[], f32[64,16], s32[]) {
  %state = (s32[]{:T(128)}, f32[64,16]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = f32[64,16]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %one = s32[]{:T(128)} get-tuple-element(%state), index=2
  %next = s32[]{:T(128)} add(%i, %one)
  %permute-start = (f32[64,16]{1,0:T(8,128)}, f32[64,16]{1,0:T(8,128)}, u32[]{:S(2)}, \
u32[]{:S(2)}) collective-permute-start(%x), channel_id=1, \
source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,4},{6,6}}
  %permute-done = f32[64,16]{1,0:T(8,128)} collective-permute-done(%permute-start)
  %scattered = f32[8,16]{1,0:T(8,128)} fusion(%permute-done), kind=kCustom, \
calls=%all-reduce-scatter, metadata={op_name="jit(step)/while/body/grad"}
  %gather-start = (f32[8,16]{1,0:T(8,128)}, f32[64,16]{1,0:T(8,128)}) \
all-gather-start(%scattered), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
  %gather-done = f32[64,16]{1,0:T(8,128)} all-gather-done(%gather-start)
  ROOT %state.1 = (s32[]{:T(128)}, f32[64,16]{1,0:T(8,128)}, s32[]{:T(128)}) \
tuple(%next, %gather-done, %one)
}

%condition (state.2: (s32[], f32[64,16], s32[])) -> pred[] {
  %state.2 = (s32[]{:T(128)}, f32[64,16]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  %limit = s32[]{:T(128)} constant(12)
  ROOT %goes_on = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (p.2: bf16[8,16], a.2: bf16[64,32], b.2: bf16[32,16], q.1: \
bf16[4,2,32,16], x.1: f32[64,16]) -> f32[64,16] {
  %p.2 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %a.2 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(1)
  %b.2 = bf16[32,16]{1,0:T(8,128)(2,1)} parameter(2)
  %q.1 = bf16[4,2,32,16]{3,2,1,0} parameter(3)
  %x.1 = f32[64,16]{1,0:T(8,128)} parameter(4)
  %start.1 = (bf16[8,16]{1,0}, bf16[64,16]{1,0}) fusion(%p.2), kind=kCustom, \
calls=%fused_start
  %p.3 = bf16[8,16]{1,0} get-tuple-element(%start.1), index=0
  %middle = (bf16[64,16]{1,0}, bf16[64,16]{1,0}) fusion(%p.3, %a.2, %b.2), \
kind=kOutput, calls=%fused_middle
  %h = bf16[64,16]{1,0} fusion(%a.2, %b.2), kind=kOutput, calls=%fused_dot
  %scores = bf16[4,2,32,32]{3,2,1,0} fusion(%q.1, %q.1), kind=kOutput, \
calls=%fused_attention
  %kernel = f32[8]{0} custom-call(%h), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000"}}}
  %other = f32[8]{0} custom-call(%h), custom_call_target="tpu_custom_call"
  %zero.1 = s32[]{:T(128)} constant(0)
  %one.1 = s32[]{:T(128)} constant(1)
  %copy = s32[]{:T(128)} copy(%zero.1)
  %state.3 = (s32[]{:T(128)}, f32[64,16]{1,0:T(8,128)}, /*index=2*/s32[]{:T(128)}) \
tuple(%copy, %x.1, /*index=2*/%one.1)
  %loop = (s32[]{:T(128)}, f32[64,16]{1,0:T(8,128)}, s32[]{:T(128)}) while(%state.3), \
condition=%condition, body=%body, metadata={op_name="jit(step)/while"}
  ROOT %out = f32[64,16]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


class TestTPUText:
    def test_dots_written_as_convolutions_are_counted(self):
        dots = 2 * (2 * 64 * 32 * 16)
        attention = 2 * (4 * 2) * 32 * 32 * 16
        assert audit(TPU_TEXT).flops == dots + attention + 1000

    def test_collectives_are_parsed(self):
        report = audit(TPU_TEXT)
        found = [
            (each.kind, each.count, each.bytes_each, each.group_size, each.asynchronous)
            for each in report.collectives
        ]
        assert found == [
            ("all-gather", 1, 64 * 16 * 2, 8, True),
            ("collective-permute", 12, 64 * 16 * 4, 4, True),
            ("reduce-scatter", 12, 64 * 16 * 4, 8, False),
            ("all-gather", 12, 64 * 16 * 4, 8, True),
        ]
        assert report.unknown_loops == ()
        assert report.collectives[2].source == "jit(step)/while/body/grad"

    def test_kernels_without_flops_are_listed(self):
        assert audit(TPU_TEXT).custom_calls == {"tpu_custom_call": 1}

    def test_text_has_no_memory_statistics(self):
        report = audit(TPU_TEXT)
        assert report.temporary_bytes is None
        assert report.argument_bytes is None
        assert report.output_bytes is None


def test_library_matmuls_are_counted():
    text = """\
HloModule m

ENTRY %main (a: f32[4,32,64], b: f32[4,16,64]) -> f32[4,32,16] {
  %a = f32[4,32,64]{2,1,0} parameter(0)
  %b = f32[4,16,64]{2,1,0} parameter(1)
  %gemm = (f32[4,32,16]{2,1,0}, s8[1024]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$gemm"
  ROOT %out = f32[4,32,16]{2,1,0} get-tuple-element(%gemm), index=0
}
"""
    assert audit(text).flops == 4 * 2 * 32 * 16 * 64


def test_asynchronous_wrapper_counts_as_collective():
    text = """\
HloModule m, num_partitions=2

%wrapped (p: f32[8]) -> f32[4] {
  %p = f32[8]{0} parameter(0)
  ROOT %scatter = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: f32[8]) -> f32[4] {
  %x = f32[8]{0} parameter(0)
  %start = ((f32[8]{0}), f32[4]{0}, u32[]) async-start(%x), calls=%wrapped
  ROOT %done = f32[4]{0} async-done(%start), calls=%wrapped
}
"""
    (found,) = audit(text).collectives
    assert (found.kind, found.count, found.asynchronous) == ("reduce-scatter", 1, True)
    assert found.bytes_each == 8 * 4


def test_multiline_kernel_metadata_is_parsed():
    """The TPU compiler writes such metadata; one of its lines begins with a brace."""
    text = """\
HloModule m, num_partitions=4

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"block_q":"512"
}}, metadata={op_name="splash"}
  %r = f32[8]{0} all-reduce(%k), replica_groups={{0,1,2,3}}, to_apply=%add
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[8]{0}) tuple(%next, %r)
}

%condition (s.1: (s32[], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n = s32[] constant(16)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (p: f32[8]) -> (s32[], f32[8]) {
  %p = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %p)
  ROOT %w = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body
}
"""
    report = audit(text)
    assert report.count("all-reduce") == 16
    assert report.custom_calls == {"tpu_custom_call": 16}


def test_table_sums_equal_collectives():
    lines = str(audit(TPU_TEXT)).splitlines()
    assert lines[0] == "FLOPs per device: 394.22 k"
    (permute,) = (line for line in lines if line.startswith("collective-permute"))
    assert permute.split() == [
        "collective-permute",
        "(async)",
        "12",
        "4.10",
        "kB",
        "49.15",
        "kB",
        "4",
        "-",  # no axes without a mesh
        "no",
    ]


def test_collective_source_is_unescaped():
    path = "state.params[\\'up\\'][\\'kernel\\']"
    text = f"""\
HloModule m, num_partitions=8

ENTRY %main (p: f32[8,4]) -> f32[8,4] {{
  %p = f32[8,4]{{1,0}} parameter(0)
  %a = f32[8,4]{{1,0}} all-reduce(%p), to_apply=%add, metadata={{op_name="{path}"}}
  ROOT %r = f32[8,4]{{1,0}} all-reduce(%a), to_apply=%add, \
metadata={{op_name="jit(step)/{"mul:" * 50}"}}
}}
"""
    first, second = str(audit(text)).splitlines()[-2:]
    assert first.endswith(" state.params['up']['kernel']")
    assert second.endswith("...")
    assert len(second) < 160
