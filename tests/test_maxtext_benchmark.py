"""The comparison with MaxText: sums of the cycles that XLA estimates."""

import sys

import pytest

from benchmarks import maxtext
from nnx_parallel.audit.hlo import parse

# A program with one product before a loop, two in it, and one without an estimate.
LOOP = """\
HloModule jit_step, is_scheduled=true

%body (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %carry = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[8] get-tuple-element(%carry), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one), backend_config={"estimated_cycles":"2"}
  %y = f32[8] negate(%x), backend_config={"estimated_cycles":"300"}
  %z = f32[8] negate(%y), backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %pair = (s32[], f32[8]) tuple(%next, %z)
}

%more (carry.1: (s32[], f32[8])) -> pred[] {
  %carry.1 = (s32[], f32[8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %end = s32[] constant(7)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %main (p: f32[8]) -> (s32[], f32[8]) {
  %p = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %q = f32[8] negate(%p), backend_config={"estimated_cycles":"5"}
  %start = (s32[], f32[8]) tuple(%zero, %q)
  ROOT %loop = (s32[], f32[8]) while(%start), condition=%more, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
}
"""


def test_estimated_cycles_multiply_loops() -> None:
    assert maxtext.estimated_cycles(parse(LOOP)) == 5 + 7 * 302


def test_python_without_maxtext_exits_with_message() -> None:
    assert maxtext.version_of_maxtext(None) is None
    with pytest.raises(SystemExit, match=r"has no MaxText: .* for maxtext"):
        maxtext.version_of_maxtext(sys.executable)


def test_both_steps_have_same_shape() -> None:
    config = maxtext.llama2_7b()
    assert config.num_params == 6_738_415_616
    chips = dict.fromkeys(maxtext.PAIRS, 64) | dict.fromkeys(maxtext.FURTHER_PAIRS, 256)
    for name, pair in (maxtext.PAIRS | maxtext.FURTHER_PAIRS).items():
        assert pair.ours.rows == chips[name] * 2
        assert f"max_target_length={config.seq_len}" in pair.theirs
