"""Makes eight simulated CPU devices for the tests and for the examples in docstrings.

This file is in the repository's root because pytest also collects `nnx_parallel/` for
the examples in its docstrings. The number of devices must be set before jax first
counts them.
"""

import gc
import os
import zlib
from collections.abc import Iterator

import jax
import pytest

from nnx_parallel import simulate_devices
from nnx_parallel.plan import calibration
from tests.cores import keep_to_own_cores
from tests.sharing import QUICK, added_options, share_compiled_programs

# Tests run the TPU compiler in child processes. Without this variable two such
# processes at a time meet at libtpu's lock file, and one of them aborts.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# These scripts need torch, and are run only when a family of models is added.
collect_ignore_glob = ["tests/goldens/*.py"]

# Tracing makes many objects that stay alive. With Python's default threshold (700 new
# objects) the garbage collector scans them again and again, which takes a tenth of the
# time.
gc.set_threshold(200_000, 20, 100)

simulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Without LLVM's optimizations, programs compile in two thirds of the time.
# The earlier passes (the partitioner, fusion) still run, so the HLO programs are the
# same.
jax.config.update("jax_disable_most_optimizations", True)
# Programs do not record the Python lines that they come from. Looking up these lines
# would slow down the lowering.
jax.config.update("jax_traceback_in_locations_limit", 0)
# Programs are not cached on disk. With the cache enabled, jax hashes each program to
# name its file.
jax.config.update("jax_enable_compilation_cache", False)
share_compiled_programs()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds this project's options."""
    parser.addoption(
        "--own-cores", action="store_true", help="give each worker separate cores"
    )
    parser.addoption(
        "--part",
        metavar="I/N",
        help="run only part I of N parts of the tests; names decide the part",
    )
    parser.addoption(
        "--part-of",
        metavar="MARK",
        help="divide only the tests with this mark into parts; run all others",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Sets the table width, and assigns cores before jax starts its threads."""
    # The width of a file. A worker would have 80 columns, and a terminal any number.
    os.environ["COLUMNS"] = "120"
    if config.getoption("own_cores"):
        keep_to_own_cores()


@pytest.fixture(scope="session")
def devices() -> list:
    """All eight simulated devices."""
    devices = jax.devices()
    assert len(devices) == 8
    return devices


@pytest.fixture(scope="session", autouse=True)
def _without_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hides a calibration that a developer has stored, which would change plans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "CACHE", tmp_path_factory.mktemp("calibration"))
        yield


@pytest.fixture(scope="module", autouse=True)
def _left_alone() -> Iterator[None]:
    """Exempts the objects that a test file leaves alive from garbage collection.

    Most of them are in jax's caches. Late in a run, a full collection would take half a
    second.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compiles programs with XLA's usual emitters if their bits are compared.

    The comparison is with other programs, or with programs of other processes. This
    hook runs before the fixtures of a file, which compile programs too.
    """
    is_usual = any(map(item.get_closest_marker, ("bits", "faults")))
    added_options[:] = [] if is_usual else QUICK


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Gives all tests of a file to one worker, unless a test has another group.

    The tests of a file share compiled programs, which otherwise each worker would
    compile again.
    """
    if given := config.getoption("part"):
        part, num_parts = map(int, str(given).split("/"))
        mark = config.getoption("part_of")
        chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            is_whole = mark and item.get_closest_marker(mark) is None
            index = zlib.crc32(item.nodeid.encode()) % num_parts
            chosen[is_whole or index == part - 1].append(item)
        items[:] = chosen[True]
        config.hook.pytest_deselected(items=chosen[False])
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
