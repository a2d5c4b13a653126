"""A Sphinx extension: runs the tutorials two at a time, before their pages are read.

MyST-NB then finds their outputs in the cache. By itself it would run them one by one.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import frame
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn, JupyterCacheAbstract
from jupyter_cache.executors.utils import ExecutionResult, single_nb_execution
from jupyter_client.manager import AsyncKernelManager
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

NUM_AT_A_TIME = 2
MEASURES_TIME = {"11_profiles"}


class QuickCompilation(AsyncKernelManager):
    """Starts a kernel that compiles without LLVM's optimizations, in 3/4 of the time.

    The HLO programs are the same, so a tutorial prints the same bytes, FLOPs and
    collectives.
    """

    def start_kernel(self, **options: Any) -> Any:
        """Starts the kernel."""
        env = options.pop("env", None) or os.environ
        env = {**env, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        return super().start_kernel(env=env, **options)


def run_tutorials(app: Sphinx) -> None:
    """Runs the tutorials that are not in the cache, and adds them to the cache."""
    if app.config.nb_execution_mode != "cache":
        return
    cache = get_cache(app.config.nb_execution_cache_path)
    tutorials = sorted((frame.DOCS / "tutorials").glob("*.py"))
    new = [file for file in tutorials if not _is_kept(cache, file)]
    run = partial(_run, timeout=app.config.nb_execution_timeout)
    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        # Only one thread may use a cache.
        for file, result in zip(new, pool.map(run, new), strict=True):
            if result.err is not None:
                raise ExtensionError(f"{file.name} failed:\n{result.exc_string}")
            bundle = CacheBundleIn(
                result.nb, str(file), data={"execution_seconds": result.time}
            )
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)


def _is_kept(cache: JupyterCacheAbstract, file: Path) -> bool:
    try:
        cache.match_cache_notebook(frame.read_tutorial(file.read_text()))
    except KeyError:
        return False
    return True


def _run(file: Path, timeout: int) -> ExecutionResult:
    """Runs a tutorial as MyST-NB does, in an empty directory."""
    is_quick = file.stem not in MEASURES_TIME
    manager = QuickCompilation if is_quick else AsyncKernelManager
    with TemporaryDirectory() as directory:
        result = single_nb_execution(
            frame.read_tutorial(file.read_text()),
            cwd=directory,
            timeout=timeout,
            allow_errors=False,
            kernel_manager_class=manager,
        )
    ran = f"tutorials/{file.stem} ran in {result.time:.0f} s"
    print(ran, file=sys.stderr, flush=True)  # noqa: T201
    return result


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers `run_tutorials`, which runs before pages are read."""
    app.connect("builder-inited", run_tutorials)
    return {"parallel_read_safe": True}
