"""Equal programs share one executable within a worker.

Tests build the same Trainer many times, but jax's caches compare functions by identity.
Programs are not stored on disk, because programs with collectives that are loaded from
there are not safe on simulated devices.
"""

import hashlib
import io
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import compiler

NUM_KEPT = 64
"""Number of executables that are kept. Equal programs mostly follow each other soon."""


QUICK = (
    [("xla_cpu_use_fusion_emitters", False)] if jax.__version_info__ < (0, 11) else []
)
"""An option for quick compilation, which jaxlib 0.10 has and jaxlib 0.12 does not have.

XLA's newer emitters make an MLIR module for each fusion. With the older emitters, a
program compiles in three fifths of the time, but equal operations may be rounded
differently in different programs.
"""
added_options = [*QUICK]
"""The options that are added for the present test, in every thread."""


def share_compiled_programs() -> None:
    """Makes jax compile equal programs only once, and quickly.

    jax has no public hook for that. If a later version has other names, programs are
    not shared and the tests take longer.
    """
    if hasattr(compiler, "backend_compile_and_load"):
        compiler.backend_compile_and_load = sharing(compiler.backend_compile_and_load)


def sharing(compile_program: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a cache to the function that compiles a module into an executable."""
    kept: OrderedDict[tuple, Any] = OrderedDict()

    def compile_or_share(
        backend: Any,
        module: Any,
        executable_devices: Sequence[Any],
        options: Any,
        host_callbacks: Sequence[Any],
        *args: Any,
    ) -> Any:
        overrides = [*options.env_option_overrides, *added_options]
        options.env_option_overrides = overrides
        if host_callbacks:
            return compile_program(
                backend, module, executable_devices, options, host_callbacks, *args
            )
        bytecode = io.BytesIO()  # has no Python lines: see conftest.py
        module.operation.write_bytecode(bytecode)
        key = (
            id(backend),
            hashlib.sha256(bytecode.getvalue()).digest(),
            tuple(device.id for device in executable_devices),
            options.SerializeAsString(),
        )
        if key not in kept:
            kept[key] = compile_program(
                backend, module, executable_devices, options, host_callbacks, *args
            )
        kept.move_to_end(key)
        if len(kept) > NUM_KEPT:
            kept.popitem(last=False)
        return kept[key]

    return compile_or_share
