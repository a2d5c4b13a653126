"""`sharded_jit` accepts the same signatures and calls as ``jax.jit``."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel import make_mesh
from nnx_parallel.sharding import sharded_jit
from tests.steps import QUICKLY

A, B, C = (np.full(8, value, np.float32) for value in (2.0, 3.0, 5.0))
TREE = {"w": A, "more": [B, {"c": C}, None]}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh({"fsdp": None})


@dataclass(frozen=True)
class Call:
    """A function, the options of both compilers, and one call.

    Attributes:
        static: Names of the function's static arguments.
    """

    fn: Callable
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    static: tuple[str, ...] = ()
    static_at: tuple[int, ...] = ()

    @property
    def arrays(self) -> tuple[tuple, dict]:
        """The arguments of the call to the compiled function, without static ones."""
        args = [x for i, x in enumerate(self.args) if i not in self.static_at]
        return tuple(args), {
            k: x for k, x in self.kwargs.items() if k not in self.static
        }


def minus(a, z):
    return a - 2 * z


def default(a, z=4.0):
    return a - 2 * z


def by_keyword(x, *, a, z=1.0):
    return x - 2 * a + 3 * z


def positional(a, z, /):
    return a - 2 * z


def same_name(a, /, **kwargs):
    return a - 2 * kwargs["a"]


def several(*args):
    return [(i + 1) * x for i, x in enumerate(args)]


def named(**kwargs):
    return {name: x - i for i, (name, x) in enumerate(sorted(kwargs.items()))}


def everything(a, b=1.0, *args, c, d=2.0, **kwargs):
    return a - b, sum(args), c - d, kwargs


def power(x, n=2, *, scale=1.0):
    return scale * x**n


def of_trees(tree, *, other):
    return jax.tree.map(lambda x, y: x - 2 * y, tree, other)


def apply(f, x, *more, **named):
    return f(x, *more, **named)


class Model:
    """A callable object with state and a method."""

    def __call__(self, a, *, z):
        return a - 3 * z

    def method(self, a, z=2.0):
        return a - 4 * z


OBJECT = Model()

CALLS = {
    "positions": Call(minus, (A, B)),
    "keywords backwards": Call(minus, (), {"z": B, "a": A}),
    "a position and a keyword": Call(minus, (A,), {"z": B}),
    "a default": Call(default, (A,)),
    "a default by keyword": Call(default, (A,), {"z": 7}),
    "keyword-only": Call(by_keyword, (A,), {"z": B, "a": C}),
    "keyword-only, defaults": Call(by_keyword, (), {"a": C, "x": A}),
    "positional-only": Call(positional, (A, B)),
    "any arguments": Call(several, (A, B, 3.0)),
    "no arguments": Call(several),
    "any keywords": Call(named, (), {"z": A, "b": B}),
    "keywords that are no names": Call(named, (), {"a.b": A, "class": B, "x-y": C}),
    "everything": Call(everything, (A, B, C, A), {"y": A, "c": C, "d": B, "x": B}),
    "trees": Call(of_trees, (TREE,), {"other": TREE}),
    "NumPy and Python numbers": Call(by_keyword, (3,), {"a": np.int8(2), "z": True}),
    "a static keyword": Call(
        power,
        (A,),
        {"scale": B, "n": 3},
        {"static_argnames": "n"},
        static=("n",),
    ),
    "a static default": Call(power, (A,), {}, {"static_argnames": ["n", "scale"]}),
    "static, named and by position": Call(
        power, (A, 3), {}, {"static_argnames": "n"}, static_at=(1,)
    ),
    "static by index": Call(power, (A, 3), {}, {"static_argnums": 1}, static_at=(1,)),
    "static by index, by keyword": Call(
        power, (A,), {"n": 3}, {"static_argnums": (1,)}, static=("n",)
    ),
    "static among any": Call(
        apply, (minus, A, B), {}, {"static_argnums": 0}, static_at=(0,)
    ),
    "donated by name": Call(minus, (A,), {"z": B}, {"donate_argnames": ("z",)}),
    "donated by index": Call(minus, (A, B), {}, {"donate_argnums": [0, 1]}),
    "donated by index, by keyword": Call(
        minus, (), {"z": B, "a": A}, {"donate_argnums": 1}
    ),
    "a partial": Call(functools.partial(minus, z=3.0), (A,)),
    "a partial, overridden": Call(functools.partial(minus, z=3.0), (A,), {"z": B}),
    "an object": Call(OBJECT, (A,), {"z": B}),
    "a bound method": Call(OBJECT.method, (A,), {"z": B}),
    "a function of JAX": Call(jax.numpy.clip, (A,), {"max": 2.5}),
}


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", CALLS)
def test_call_matches_jit(name: str, mesh: Mesh) -> None:
    call = CALLS[name]
    args, kwargs = call.args, call.kwargs
    # `jax.jit` does not support keywords together with shardings.
    ours = sharded_jit(call.fn, mesh, in_shardings=P(), **call.options)
    theirs = jax.jit(call.fn, **call.options)
    wanted = theirs(*args, **kwargs)
    for _ in range(3):  # the third call is tried without a look-up
        same(ours(*args, **kwargs), wanted)
    backwards = dict(reversed(kwargs.items()))
    same(ours(*args, **backwards), wanted)
    for stage in ("trace", "lower"):
        mine, jaxs = (getattr(f, stage)(*args, **kwargs) for f in (ours, theirs))
        assert mine.in_tree == jaxs.in_tree
        assert mine.out_tree == jaxs.out_tree
        assert mine.donate_argnums == jaxs.donate_argnums
        assert jax.tree.map(str, mine.in_avals) == jax.tree.map(str, jaxs.in_avals)
        if stage == "trace":
            mine, jaxs = mine.lower(), jaxs.lower()
        arrays, keywords = call.arrays
        compiled = mine.compile(QUICKLY)
        same(compiled(*arrays, **keywords), wanted)
        if keywords:  # keywords cannot be passed by position
            with pytest.raises(TypeError, match="does not match the input pytree"):
                compiled(*arrays, *keywords.values())
    shapes, their_shapes = (f.eval_shape(*args, **kwargs) for f in (ours, theirs))
    assert jax.tree.map(str, shapes) == jax.tree.map(str, their_shapes)


def test_keyword_may_have_name_of_positional(mesh: Mesh) -> None:
    """Python allows this call. JAX raises an assertion error."""
    ours = sharded_jit(same_name, mesh, in_shardings=P())
    for _ in range(3):
        same(ours(A, a=B), jax.numpy.asarray(same_name(A, a=B)))


@pytest.mark.parametrize(
    ("fn", "options", "args", "kwargs"),
    [
        (minus, {}, (A,), {}),
        (minus, {}, (A, B, C), {}),
        (minus, {}, (A,), {"y": B}),
        (minus, {}, (A, B), {"z": B}),
        (positional, {}, (A,), {"z": B}),
        (minus, {}, (A, "b"), {}),
        (minus, {}, (A, object()), {}),
        (minus, {}, (A, 2**40), {}),
        (power, {"static_argnames": "n"}, (A, [2]), {}),
        (power, {"static_argnames": "m"}, (A, 2), {}),
        (power, {"static_argnums": 5}, (A, 2), {}),
        (power, {"donate_argnums": -4}, (A, 2), {}),
        (lambda x: "no array", {}, (A,), {}),
    ],
)
def test_calls_refused_by_jit_raise(
    fn: Callable, options: dict, args: tuple, kwargs: dict, mesh: Mesh
) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)) as theirs:
        jax.jit(fn, **options)(*args, **kwargs)
    for placement in (None, P()):
        with pytest.raises((TypeError, ValueError, OverflowError)) as ours:
            sharded_jit(fn, mesh, in_shardings=placement, **options)(*args, **kwargs)
        assert issubclass(ours.type, theirs.type.__mro__[-3])


def test_equal_static_values_of_other_types_retrace(mesh: Mesh) -> None:
    def kind(x: jax.Array, n: object) -> jax.Array:
        return x + {int: 1, bool: 2, float: 3}[type(n)]

    ours = sharded_jit(kind, mesh, in_shardings=P(), static_argnames="n")
    theirs = jax.jit(kind, static_argnames="n")
    for n in (1, 1, 1, True, 1.0, 1.0, 1.0, 1, True):
        np.testing.assert_array_equal(ours(A, n), theirs(A, n))


def documented(x: jax.Array, /, y: float = 2.0, *, n: int = 1) -> jax.Array:
    """Multiplies a value."""
    return x * y * n


def test_wrapper_looks_like_function(mesh: Mesh) -> None:
    documented.mark = "kept"  # pyright: ignore[reportFunctionMemberAccess]
    ours = sharded_jit(documented, mesh, static_argnames="n")
    theirs = jax.jit(documented, static_argnames="n")
    names = "__name__ __qualname__ __doc__ __module__ __wrapped__ __annotations__ mark"
    for name in names.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert callable(ours)
    assert hash(ours) == hash(ours)
    for name in ("lower", "trace", "eval_shape", "clear_cache"):
        assert callable(getattr(ours, name))
        assert callable(getattr(theirs, name))


class Methods:
    """Static, class and instance methods."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @functools.partial(
        sharded_jit, mesh=make_mesh({"fsdp": None}), static_argnums=0, in_shardings=P()
    )
    def method(self, x: jax.Array, *, y: float = 0.0) -> jax.Array:
        return self.factor * x + y

    @classmethod
    @sharded_jit(mesh=make_mesh({"fsdp": None}), static_argnums=0)
    def of_class(cls, x: jax.Array) -> jax.Array:
        return x + len(cls.__name__)

    @staticmethod
    @sharded_jit(mesh=make_mesh({"fsdp": None}))
    def of_none(x: jax.Array) -> jax.Array:
        return x + 1


def test_methods_of_every_kind_are_bound() -> None:
    two, three = Methods(2.0), Methods(3.0)
    np.testing.assert_array_equal(two.method(A), 2 * A)
    np.testing.assert_array_equal(three.method(A, y=B), 3 * A + B)
    np.testing.assert_array_equal(Methods.method(two, A), 2 * A)
    np.testing.assert_array_equal(two.of_class(A), A + 7)
    np.testing.assert_array_equal(Methods.of_class(A), A + 7)
    np.testing.assert_array_equal(two.of_none(A), A + 1)


def branch(x: jax.Array) -> jax.Array:
    return x if x.sum() > 0 else -x


def branch_line(fn: Callable) -> str:
    return f"{fn.__name__} at {__file__}:{fn.__code__.co_firstlineno}"


@pytest.mark.parametrize("jit", [sharded_jit, jax.jit], ids=["ours", "theirs"])
def test_trace_error_names_line_of_user(jit: Any, mesh: Mesh) -> None:
    placed = {"mesh": mesh, "in_shardings": P()} if jit is sharded_jit else {}
    wrapped = functools.wraps(branch)(lambda x: branch(x))
    for fn in (branch, wrapped):
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            jit(fn, **placed)(A)
        message = str(caught.value)
        assert f"while tracing the function {branch_line(branch)} for jit" in message
        assert "depends on the value of the argument x" in message
        assert "sharding" not in message
    # The last frame of the traceback is the user's, as in the message.
    frame = caught.traceback[-1]
    while "jax" in str(frame.path):
        frame = caught.traceback[caught.traceback.index(frame) - 1]
    assert frame.path == caught.traceback[0].path
