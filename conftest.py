"""Eight simulated CPU devices for the tests and for the examples in docstrings.

It is at the root because pytest collects `nnx_parallel/` for its examples
too, and devices can only be chosen before jax first counts them.
"""

import gc
import os
import zlib
from collections.abc import Iterator

import jax
import pytest

from nnx_parallel import simulate_devices
from tests.cores import keep_to_own_cores
from tests.sharing import share_compiled_programs

# Tests that run the TPU compiler do so in child processes, and two of those at a time
# otherwise meet at libtpu's lock file, where one aborts.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# It needs torch, and runs for a new family alone.
collect_ignore_glob = ["tests/goldens/*.py"]

# Tracing makes many objects that stay. With Python's thresholds (700 new objects) the
# garbage collector takes a tenth of the time to find them alive again and again.
gc.set_threshold(200_000, 20, 100)

simulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Without the optimizations of machine code programs compile in two thirds of the time;
# those before it (the partitioner, fusion) are made, so that the programs are the same.
jax.config.update("jax_disable_most_optimizations", True)
# No program says from which lines it comes, which lowering else looks up.
jax.config.update("jax_traceback_in_locations_limit", 0)
# No program is kept on disk; left on, jax hashes each one for the name of its file.
jax.config.update("jax_enable_compilation_cache", False)
share_compiled_programs()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds our own options."""
    parser.addoption(
        "--own-cores", action="store_true", help="a core of its own for each worker"
    )
    parser.addoption(
        "--part", metavar="I/N", help="part I of N parts of the tests, by their names"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the cores, before jax starts its threads; and the width of tables."""
    os.environ["COLUMNS"] = "120"  # as in a file; a worker's would be 80, or yours
    if config.getoption("own_cores"):
        keep_to_own_cores()


@pytest.fixture(scope="session")
def devices() -> list:
    """All eight simulated devices."""
    devices = jax.devices()
    assert len(devices) == 8
    return devices


@pytest.fixture(scope="module", autouse=True)
def _left_alone() -> Iterator[None]:
    """Exempts the objects that a file leaves alive from garbage collection.

    They are mostly jax's caches, and a full collection comes to take half a second.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Gives the tests of a file to one worker, unless they say otherwise.

    They share compiled programs, which each worker would else compile for itself.
    """
    if given := config.getoption("part"):
        part, num_parts = map(int, str(given).split("/"))
        chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            index = zlib.crc32(item.nodeid.encode()) % num_parts
            chosen[index == part - 1].append(item)
        items[:] = chosen[True]
        config.hook.pytest_deselected(items=chosen[False])
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
