"""Rules on any pytree: their answers, their order, and their warnings."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import FSDP, constrain, make_mesh
from nnx_parallel.errors import (
    IndivisibleDimError,
    ParallelError,
    ParallelWarning,
    PlacementTreeError,
    SpecRankError,
    UnknownAxisError,
    UnmatchedRuleError,
)
from nnx_parallel.sharding import (
    ArrayInfo,
    ChainRules,
    FSDPRules,
    LogicalRules,
    PathRules,
    PolicyRules,
    named_tree_map,
    resolve_shardings,
    using,
)
from nnx_parallel.sharding.tree import layout_of


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh({"data": 2, "fsdp": 4})


def abstract(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def specs(tree: Any, rules: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda s: s.spec, resolve_shardings(tree, rules, mesh))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((), P()),
        ((1023,), P()),
        ((2048,), P("fsdp")),
        ((31, 31), P()),
        ((64, 256), P("fsdp")),
        ((9, 256), P(None, "fsdp")),
        ((1024, 1024), P("fsdp")),
        ((1025, 1024), P(None, "fsdp")),
        ((64, 8, 64), P("fsdp")),
    ],
)
def test_fsdp_rules_split_divisible_dim(shape: tuple, spec: P, mesh: Mesh) -> None:
    assert specs(abstract(*shape), FSDPRules("fsdp", 1024), mesh) == spec


def test_indivisible_large_array_warns(mesh: Mesh):
    message = (
        "1 large arrays stay replicated: `odd` (33, 35): fsdp=4 divides no free dim of "
        "[33, 35]. Pad a dim, or place them with PathRules."
    )
    tree = {"odd": abstract(33, 35), "small": abstract(3, 5)}
    with pytest.warns(UserWarning, match=re.escape(message)):
        assert specs(tree, FSDPRules(), mesh) == {"odd": P(), "small": P()}


def test_rules_place_optax_training_state(mesh: Mesh) -> None:
    params = {"w": abstract(256, 64), "b": abstract(64)}
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    found = resolve_shardings({"params": params, "opt": state}, FSDPRules(), mesh)
    assert jax.tree.structure(found["opt"]) == jax.tree.structure(state)
    assert found["opt"][0].mu["w"] == NamedSharding(mesh, P("fsdp"))
    assert found["opt"][0].count == NamedSharding(mesh, P())
    assert found["params"]["b"] == NamedSharding(mesh, P())


def test_path_rules_search_dotted_path(mesh: Mesh) -> None:
    tree = {"a": abstract(8, 8), "b": [abstract(8, 8), abstract(8, 8)]}
    rules = PathRules((r"^a$", P("data", "fsdp")), (r"^b\.0$", P("fsdp")), strict=False)
    assert specs(tree, rules, mesh) == {
        "a": P("data", "fsdp"),
        "b": [P("fsdp"), P()],
    }
    nested = {"a": None, "b": PathRules((r"^0$", P("fsdp")), strict=False)}
    found = resolve_shardings(tree, nested, mesh)
    assert found["a"] is None
    assert [s.spec for s in found["b"]] == [P("fsdp"), P()]


def test_strict_path_rules_raise_on_unmatched_leaf(mesh: Mesh) -> None:
    rules = PathRules((r"a", P()), (r"b.c", P("fsdp")), strict=True)
    tree = {"a": abstract(8, 8), "b": {"c": abstract(8), "d": abstract(8, 2)}}
    message = (
        "No path rule matches `b.d` with shape (8, 2). Strict rules must match every "
        "parameter: ['a', 'b.c']. Add one, or end with (r'.*', P()) to replicate the "
        "rest."
    )
    with pytest.raises(UnmatchedRuleError, match=re.escape(message)):
        resolve_shardings(tree, rules, mesh)
    scalar = {"a": abstract(8), "b": {"c": abstract(8)}, "count": abstract()}
    assert specs(scalar, rules, mesh)["count"] == P()


def test_unmatched_regex_warns(mesh: Mesh) -> None:
    message = (
        "Path rules ['kernal'] match no array, or earlier rules place all arrays "
        "that match. Paths: bias, kernel."
    )
    tree = {"kernel": abstract(8, 8), "bias": abstract(8)}
    rules = PathRules((r"kernal", P("fsdp")), strict=False)
    with pytest.warns(ParallelWarning, match=re.escape(message)):
        resolve_shardings(tree, rules, mesh)


def test_unmatched_arrays_warn_once(mesh: Mesh) -> None:
    tree = {"w": abstract(8, 8), "b": [abstract(8), abstract(4)], "n": abstract()}
    message = (
        "2 arrays match no path rule and stay replicated: `b.0` (8,); `b.1` (4,). End "
        "with (r'.*', P()) if this is meant; strict=True refuses them."
    )
    pair = r"w", P("fsdp")
    with pytest.warns(ParallelWarning, match=re.escape(message)) as caught:
        found = specs(tree, PathRules(pair), mesh)
    assert len(caught) == 1
    said = (
        PathRules(pair, strict=False),
        PathRules(pair, (r".*", P())),
        # With a rule that skips small arrays, the user has already decided on them.
        ChainRules(PathRules(pair), FSDPRules()),
    )
    for rules in said:
        assert specs(tree, rules, mesh) == found


def test_policy_receives_path_shape_and_dtype(mesh: Mesh) -> None:
    def policy(info: ArrayInfo) -> P | None:
        if info.path == "a":
            return P("data")
        return P(None, "fsdp") if info.dtype == jnp.int32 else None

    tree = {
        "a": abstract(16, 16),
        "b": {"c": abstract(16, 16), "d": abstract(16, 16, dtype="int32")},
    }
    assert specs(tree, PolicyRules(policy), mesh) == {
        "a": P("data"),
        "b": {"c": P(), "d": P(None, "fsdp")},
    }


def test_chain_applies_first_answer(mesh: Mesh) -> None:
    whole = PathRules((r"embedding", P()))
    tree = {"embedding": abstract(64, 64), "kernel": abstract(64, 64)}
    wanted = {"embedding": P(), "kernel": P("fsdp")}
    assert specs(tree, (whole, FSDPRules()), mesh) == wanted
    assert specs(tree, ChainRules(whole, FSDPRules()), mesh) == wanted
    nested = ChainRules(ChainRules(FSDPRules("data")), whole)
    with pytest.warns(UserWarning, match=re.escape("Path rules ['embedding']")):
        assert specs(tree, nested, mesh) == dict.fromkeys(tree, P("data"))
    with pytest.raises(TypeError, match=re.escape("ChainRules got P('fsdp',), a ")):
        ChainRules(P("fsdp"))  # pyright: ignore[reportArgumentType]


def test_rules_use_names_of_nnx_model(mesh: Mesh) -> None:
    init = nnx.with_partitioning(
        nnx.initializers.ones_init(), ("embed", "mlp"), eager_sharding=False
    )
    model = nnx.eval_shape(
        lambda: nnx.Linear(64, 32, kernel_init=init, rngs=nnx.Rngs(0))
    )
    rules = (LogicalRules({"mlp": "fsdp"}), FSDPRules(min_size=0))
    for tree in (model, nnx.state(model)):
        found = resolve_shardings(tree, rules, mesh)
        kernel, bias = found.kernel, found.bias
        assert kernel.get_value() == NamedSharding(mesh, P(None, "fsdp"))
        assert bias.get_value() == NamedSharding(mesh, P("fsdp"))


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (
            P("fdsp"),
            UnknownAxisError,
            "Cannot shard `the array` as P('fdsp',): the mesh has no axis 'fdsp'. Did "
            "you mean 'fsdp'? Its axes: ['data', 'fsdp'].",
        ),
        (
            {"a": {"b": P(None, None, "fsdp")}},
            SpecRankError,
            "Cannot shard `a.b` with global shape (6, 8) as P(None, None, 'fsdp'): the "
            "spec has 3 entries for 2 dims. Shorten it.",
        ),
        (
            PathRules((r"b", P("fsdp"))),
            IndivisibleDimError,
            "Cannot shard `a.b` with global shape (6, 8) as P('fsdp'): mesh axis "
            "'fsdp' of size 4 does not divide dim 0 of size 6. Pad the dim to 8",
        ),
        (
            FSDPRules("fdsp"),
            UnknownAxisError,
            "FSDPRules(axis='fdsp', min_size=1024) shards over an axis that the mesh "
            "lacks. Did you mean 'fsdp'? Its axes: ['data', 'fsdp'].",
        ),
        (
            {"a": "fsdp"},
            PlacementTreeError,
            "Cannot place `a`: 'fsdp', a str, says nothing about placement. Use a rul",
        ),
        (
            {"a": P(), "c": P()},
            PlacementTreeError,
            "The placements of `the tree` do not fit it: ",
        ),
    ],
)
def test_invalid_specs_raise(
    rules: Any, error: type[ParallelError], message: str, mesh: Mesh
) -> None:
    message = re.escape(message).replace(r"'fsdp'\)", r"'fsdp',?\)")
    with pytest.raises(error, match=message):
        resolve_shardings({"a": {"b": abstract(6, 8)}}, rules, mesh)


def test_non_array_leaf_raises(mesh: Mesh) -> None:
    message = "`a.1` is a str, not an array, and cannot be placed on a mesh. Leave"
    with pytest.raises(TypeError, match=re.escape(message)):
        resolve_shardings({"a": [np.ones(4), "relu"]}, FSDPRules(), mesh)


def test_strategy_may_replace_mesh() -> None:
    assert layout_of(FSDP(8)).claims.batch == ("fsdp",)
    assert resolve_shardings(abstract(64, 64), FSDPRules(), FSDP(8)).spec == P("fsdp")
    message = "mesh is a NoneType. Pass a jax.sharding.Mesh, for example nnx_parallel."
    with pytest.raises(TypeError, match=re.escape(message)):
        resolve_shardings(abstract(8), P(), None)  # pyright: ignore[reportArgumentType]
    explicit = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    found = resolve_shardings(abstract(8), P("x"), explicit)
    assert found.mesh.axis_types == (AxisType.Auto,)


# Constraints


def test_constraint_by_rules_matches_jax(mesh: Mesh) -> None:
    rules = PathRules((r"a", P("data", "fsdp")), (r"b", P("fsdp")))
    shardings = {"a": NamedSharding(mesh, P("data", "fsdp"))}
    shardings |= {"b": NamedSharding(mesh, P("fsdp"))}
    tree = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}

    def by_rules(tree: dict) -> dict:
        with using(layout_of(mesh)):
            return jax.tree.map(jnp.sin, constrain(tree, rules))

    def by_jax(tree: dict) -> dict:
        tree = jax.lax.with_sharding_constraint(tree, shardings)
        return jax.tree.map(jnp.sin, tree)

    ours, theirs = jax.jit(by_rules), jax.jit(by_jax)
    found, wanted = ours(tree), theirs(tree)
    for name, sharding in shardings.items():
        assert found[name].sharding == wanted[name].sharding == sharding
    text = theirs.lower(tree).as_text().replace("by_jax", "by_rules")
    assert ours.lower(tree).as_text() == text


def test_constraint_by_rules_is_inert_outside_layout(mesh: Mesh) -> None:
    tree = {"a": jnp.ones((8, 8))}
    assert constrain(tree, FSDPRules()) is tree
    with using(layout_of(mesh)), pytest.raises(IndivisibleDimError, match="dim 0"):
        constrain({"a": jnp.ones((6, 8))}, P("fsdp"))


# Paths


def test_named_tree_map_names_every_node() -> None:
    tree = {"a": [1, (2,)], "opt": optax.TraceState(trace={"w": 3})}
    paths: list[str] = []
    same = named_tree_map(lambda path, x: paths.append(path) or x, tree)
    assert same == tree
    assert paths == ["a.0", "a.1.0", "opt.trace.w"]


def test_named_tree_map_takes_trees_and_separator() -> None:
    found = named_tree_map(
        lambda path, x, y: f"{path}{x + y}",
        {"a": {"b": 1}},
        {"a": {"b": 2}},
        separator="/",
    )
    assert found == {"a": {"b": "a/b3"}}


def test_valid_rules_do_not_warn(mesh: Mesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve_shardings({}, PathRules((r"a", P())), mesh)
        resolve_shardings({"a": abstract(8)}, PathRules((r"a", P())), mesh)
