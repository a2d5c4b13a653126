"""Signals at random moments do not change a run, and lost machines are noticed."""

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.copies import last_step, wait_for, whole_settings
from benchmarks.faults import Network, Starter, soak
from nnx_parallel.distributed import PEER_LOST

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


@pytest.fixture
def network() -> Iterator[Network]:
    """Two machines."""
    try:
        made = Network(2)
    except OSError as error:
        pytest.skip(f"no network namespaces: {error}")
    with closing(made):
        yield made


def test_machine_without_network_is_noticed(network: Network, tmp_path: Path) -> None:
    log = tmp_path / "run" / "metrics.jsonl"
    settings = whole_settings(10_000, tmp_path / "out.json") | {
        "heartbeat_seconds": 2,
        "checkpoint": {"directory": str(tmp_path / "run"), "every": 10_000},
    }
    with (
        closing(Starter()) as starter,
        starter.run(settings, 2, tmp_path, network) as run,
    ):
        wait_for(run, lambda: last_step(log) > 5)
        network.cut(1)
        assert run.end({PEER_LOST}, seconds=20) == [PEER_LOST] * 2
    lost = "is lost: its machine does not answer (off, or without network)"
    assert [f"Process {i} {lost}" in run.text() for i in range(2)] == [True, True]
