"""The comparison with MaxText: both libraries compile the same shapes."""

import sys

import pytest

from benchmarks import maxtext
from nnx_parallel.plan import Topology


def test_python_without_maxtext_exits_with_message() -> None:
    assert maxtext.version_of_maxtext(None) is None
    with pytest.raises(SystemExit, match=r"has no MaxText: .* for maxtext"):
        maxtext.version_of_maxtext(sys.executable)


def test_both_steps_have_same_shape() -> None:
    for pair in (maxtext.PAIRS | maxtext.FURTHER_PAIRS).values():
        ours, theirs = pair.ours, dict(x.split("=") for x in pair.theirs)
        chips = Topology.parse(ours.topology)
        assert ours.rows == chips.num_devices * int(theirs["per_device_batch_size"])
        assert str(ours.config().seq_len) == theirs["max_target_length"]
        # The numbers of v5p's names count cores, two on each chip.
        kind, cores = theirs["compile_topology"].split("-")
        assert ours.topology.startswith(kind)
        assert chips.num_devices * (2 if kind == "v5p" else 1) == int(cores)
    assert maxtext.llama2_7b().num_params == 6_738_415_616
