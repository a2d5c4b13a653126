"""A run that is killed at random moments ends with the bits of one that is not."""

import pytest

from benchmarks.faults import soak

pytestmark = pytest.mark.faults


def test_ten_kills_at_random_moments_change_nothing() -> None:
    found = soak(10, seed=1)
    assert found["equal"], found
    assert found["left by dead saves"] == 0, found
