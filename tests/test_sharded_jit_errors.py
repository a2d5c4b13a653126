"""`sharded_jit` raises for invalid arguments before anything is compiled."""

import re
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel import make_mesh
from nnx_parallel.errors import (
    IndivisibleDimError,
    PlacementTreeError,
    SpecRankError,
    UnknownAxisError,
    UnmatchedRuleError,
)
from nnx_parallel.sharding import (
    PathRules,
    sharded_jit,
)
from tests.jitting import RULES


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh({"data": 2, "fsdp": 4})


def two(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"in_shardings": (P("fdsp"), P())},
            UnknownAxisError,
            "Cannot shard `in_shardings` as P('fdsp',): the mesh has no axis 'fdsp'. "
            "Did you mean 'fsdp'? Its axes: ['data', 'fsdp'].",
        ),
        (
            {"in_shardings": (P(), P(), P())},
            PlacementTreeError,
            "in_shardings has 3 entries for the arguments ['x', 'y']. Give one "
            "entry for each argument that is not static, in order, or a mapping by ",
        ),
        (
            {"in_shardings": {"xx": P()}},
            ValueError,
            "in_shardings names 'xx', which the function does not take. Did you mean "
            "'x'? Its parameters: ['x', 'y'].",
        ),
        (
            {"static_argnames": "x", "constrain_args": {"x": P()}},
            ValueError,
            "constrain_args places ['x'], but static arguments are not arrays. Leave "
            "them out; the dynamic arguments are ['y'].",
        ),
        (
            {"donate_argnames": "z"},
            ValueError,
            "donate_argnames names 'z', which the function does not take. Its para",
        ),
        (
            {"in_shardings": "fsdp"},
            PlacementTreeError,
            "in_shardings is a str. Pass one rule, spec or sharding for all arguments",
        ),
    ],
)
def test_invalid_options_raise_before_first_call(
    options: dict, error: type[Exception], message: str, mesh: Mesh
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        sharded_jit(two, mesh, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"in_shardings": P("fsdp")},
            IndivisibleDimError,
            "Cannot shard `x` with global shape (6, 8) as P('fsdp',): mesh axis 'fsdp'",
        ),
        (
            {"in_shardings": {"y": P(None, None, "fsdp")}},
            SpecRankError,
            "Cannot shard `y` with global shape (6, 8) as P(None, None, 'fsdp'): the ",
        ),
        (
            {"in_shardings": (P(),)},
            PlacementTreeError,
            "in_shardings has 1 entries, none for the argument `y`. Give one entry "
            "for each of ['x', 'y'], in order (None leaves it to the compiler), or a ",
        ),
        (
            {"in_shardings": ({"a": P()}, None)},
            PlacementTreeError,
            "The placements of `x` do not fit it: ",
        ),
        (
            {"in_shardings": (PathRules(strict=True), None)},
            UnmatchedRuleError,
            "No path rule matches `` with shape (6, 8).",
        ),
        (
            {"out_shardings": P("fsdp")},
            IndivisibleDimError,
            "Cannot shard `output` with global shape (6, 8) as P('fsdp',): mesh axis",
        ),
        (
            {"out_shardings": {"a": P()}},
            PlacementTreeError,
            "The placements of `output` do not fit it: ",
        ),
        (
            {"out_shardings": (RULES, RULES)},
            PlacementTreeError,
            "The placements of `output` do not fit it: ",
        ),
    ],
)
def test_invalid_placements_raise_before_compiling(
    options: dict, error: type[Exception], message: str, mesh: Mesh
) -> None:
    jitted = sharded_jit(two, mesh, **options)
    for _ in range(2):
        with pytest.raises(error) as caught:
            jitted(np.ones((6, 8)), np.ones((6, 8)))
        assert message in str(caught.value)


def test_invalid_annotation_mapping_raises_before_call(mesh: Mesh) -> None:
    annotations = types.MappingProxyType({"hidden": P("nope")})
    with pytest.raises(UnknownAxisError, match="`annotations`"):
        sharded_jit(two, mesh, annotations=annotations)


def test_sharded_jit_works_under_debugger(mesh: Mesh) -> None:
    def look(frame: types.FrameType, event: str, arg: object) -> Any:
        assert frame.f_locals is not None  # writes the variables into ``locals()``
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        sharded_jit(two, mesh)
    finally:
        sys.settrace(before)


def test_mesh_in_place_of_function_raises(mesh: Mesh) -> None:
    message = "sharded_jit got a Mesh for the function. Write sharded_jit(fn, mesh, "
    with pytest.raises(TypeError, match=re.escape(message)):
        sharded_jit(mesh)
    with pytest.raises(TypeError, match=re.escape("mesh is a NoneType. Pass a jax.sh")):
        sharded_jit(two)
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        sharded_jit(two, mesh)(1.0)
