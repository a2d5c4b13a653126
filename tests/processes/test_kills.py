"""A run that signals interrupt at random moments gives the bits of a normal run."""

import signal

import pytest

from benchmarks.faults import soak

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("number", "count", "processes"),
    [(signal.SIGKILL, 10, 1), (signal.SIGINT, 2, 2)],
)
def test_random_signals_do_not_change_result(
    number: signal.Signals, count: int, processes: int
) -> None:
    found = soak(count, seed=1, number=number, processes=processes)
    assert found["equal"], found
    assert found["left by dead saves"] == 0, found
