"""Draws an array inside a compiled function, once the compiler has placed it."""

from pathlib import Path
from typing import Any

import jax
from rich.text import Text

from nnx_parallel.distributed.runtime import print_once
from nnx_parallel.drawing import Picture
from nnx_parallel.errors import ParallelError, user_frame
from nnx_parallel.visualize.arrays import ShardMap, array_picture

_printed: set[str] = set()
"""Texts that have been printed. Each starts with a file and line of the user's code."""


def visualize_traced(x: jax.Array) -> Picture:
    """Prints the sharding of a traced array, when the function is compiled.

    Returns a picture that refers to this output.
    """
    frame = user_frame()
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    shape, dtype = x.shape, x.dtype
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if type(x).__name__ == "BatchTracer":  # JAX has no public name for it
        _print(Picture(place, Text(_of_batched(shape, dtype))))
    elif manual:
        # The compiler sees only the block, and would call it replicated.
        size = " \u00d7 ".join(map(str, shape)) or "scalar"
        text = (
            f"{size} {dtype} \u00b7 one block for each index of {', '.join(manual)}: "
            "these axes are manual here, and only this code knows how the blocks differ"
        )
        _print(Picture(place, Text(text)))
    else:

        def draw(sharding: jax.sharding.Sharding) -> None:
            # Inside a transformation of `jax.vmap` the sharding has a further dim. An
            # error here would end the compilation.
            try:
                placed = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
                picture = array_picture(ShardMap(placed, place))
            except (ValueError, ParallelError):
                picture = Picture(place, Text(_of_batched(shape, dtype)))
            _print(picture)

        jax.debug.inspect_array_sharding(x, callback=draw)
    return Picture(
        place, Text("The sharding is printed when the function is compiled.")
    )


def _of_batched(shape: tuple[int, ...], dtype: Any) -> str:
    size = " \u00d7 ".join(map(str, shape)) or "scalar"
    return f"{size} {dtype} \u00b7 one element of jax.vmap, which has no sharding"


def _print(picture: Picture) -> None:
    # A program may be compiled several times, and a loss is traced several times.
    text = str(picture)
    if text not in _printed:
        _printed.add(text)
        print_once(text)
