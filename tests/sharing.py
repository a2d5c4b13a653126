"""Programs that are the same share one executable, within a worker.

Tests build the same Trainer again and again, and jax's caches know functions by their
identity. Nothing goes to disk: programs with collectives that come from there are not
safe on simulated devices.
"""

import hashlib
import io
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import compiler

NUM_KEPT = 64
"""Programs that are alike mostly come close to one another."""


def share_compiled_programs() -> None:
    """Has jax compile a program once that is asked for again.

    It has no public seam for that; where a later version has other names, the tests
    take longer.
    """
    if hasattr(compiler, "backend_compile_and_load"):
        compiler.backend_compile_and_load = sharing(compiler.backend_compile_and_load)


def sharing(compile_program: Callable[..., Any]) -> Callable[..., Any]:
    """The function which turns a module into an executable, with a memory."""
    kept: OrderedDict[tuple, Any] = OrderedDict()

    def compile_or_share(
        backend: Any,
        module: Any,
        executable_devices: Sequence[Any],
        options: Any,
        host_callbacks: Sequence[Any],
        *args: Any,
    ) -> Any:
        if host_callbacks:
            return compile_program(
                backend, module, executable_devices, options, host_callbacks, *args
            )
        bytecode = io.BytesIO()  # without lines of Python: conftest
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
