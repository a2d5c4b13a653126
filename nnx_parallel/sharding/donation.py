"""Donated arguments, checked on the host before a compiled program takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from nnx_parallel.errors import DonatedArrayError
from nnx_parallel.mesh import leaving_mesh
from nnx_parallel.sharding.names import path_of

_is_deleted = methodcaller("is_deleted")


class Donating:
    """A ``jax.jit`` that first checks the arrays that a call donates.

    It refuses arrays that were donated to an earlier call, and arrays that are passed
    twice. Without this check each device would find the error separately, while other
    devices may wait for it in a collective (docs/library-notes.md, "Arrays and
    buffers").

    Arguments are passed by position. With ``mesh``, the function runs on this mesh, and
    a mesh that the caller has set by ``jax.set_mesh`` has no effect.
    """

    def __init__(
        self,
        jitted: Any,
        names: Sequence[str],
        donated: Sequence[int],
        mesh: Mesh | None = None,
    ) -> None:
        self._jitted, self._names, self._donated = jitted, names, donated
        self._mesh = mesh
        self._kept = [i for i in range(len(names)) if i not in donated]

    def __call__(self, *values: Any) -> Any:
        """Checks the donated arguments, and runs the program."""
        if len(values) != len(self._names):
            raise TypeError(
                f"The step takes ({', '.join(self._names)}), but got {len(values)} "
                "arguments."
            )
        given = jax.tree.leaves([values[i] for i in self._donated])
        kept = jax.tree.leaves([values[i] for i in self._kept])
        # This check takes a few microseconds. If it fails, `_check` looks for the paths
        # of the wrong arrays.
        ids = set(map(id, given))
        try:
            is_free = len(ids) == len(given) and ids.isdisjoint(map(id, kept))
            is_free = is_free and not any(map(_is_deleted, given))
        except (AttributeError, TypeError):  # NumPy arrays, numbers, tracers
            is_free = False
        if not is_free:
            self._check(values)
        with self._context():
            return self._jitted(*values)

    def lower(self, *values: Any) -> jax.stages.Lowered:
        """Lowers the program, as ``jax.jit`` does."""
        with self._context():
            return self._jitted.lower(*values)

    def running(self, program: Any) -> Donating:
        """Returns the same checks for another program, which is already compiled."""
        return Donating(program, self._names, self._donated, self._mesh)

    def _context(self) -> contextlib.AbstractContextManager:
        mesh = self._mesh
        return contextlib.nullcontext() if mesh is None else leaving_mesh(mesh)

    def __getattr__(self, name: str) -> Any:
        """Returns attributes of the ``jax.jit``, such as ``trace``."""
        return getattr(self._jitted, name)

    def _check(self, values: tuple) -> None:
        donated: dict[int, str] = {}
        for i in (*self._donated, *self._kept):
            for keys, x in jax.tree.leaves_with_path({self._names[i]: values[i]}):
                if not isinstance(x, jax.Array) or isinstance(x, Tracer):
                    continue  # not an array that a device could take
                path = path_of(keys)
                if id(x) in donated:
                    raise DonatedArrayError(
                        f"`{path}` is the same array as `{donated[id(x)]}`, which is "
                        "donated: the outputs take its memory while it is read. Pass "
                        "a copy of one of them: jnp.copy(x)."
                    )
                if i not in self._donated:
                    continue
                if x.is_deleted():
                    raise DonatedArrayError(
                        f"`{path}`, of shape {x.shape}, is gone: it was donated to an "
                        "earlier call, or deleted. Pass the output of that call, or "
                        "give it a copy: jnp.copy(x)."
                    )
                donated[id(x)] = path
