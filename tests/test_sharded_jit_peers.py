"""Code of users of a peer library (scalax): its README, and its tests' cases."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import constrain, make_mesh, sharded_jit
from nnx_parallel.sharding import (
    FSDPRules,
    PathRules,
    PolicyRules,
    annotate,
    process_local_to_global,
    resolve_shardings,
)

TUTORIAL = Path(__file__).parents[1] / "tutorials" / "12_migrating.py"


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh({"x": 2, "y": 4})


def test_migration_tutorial_runs_scalax_readme(capsys: Any) -> None:
    source = TUTORIAL.read_text()
    # Runs imports and model, the reference run, and the section; skips the Trainer.
    start, rest = source.split("# %% [markdown]\n# ## After")
    section = rest[rest.index("# ## From scalax") : rest.index("# ## Exercise")]
    names: dict[str, Any] = {"__name__": "tutorial"}
    exec(compile(start + section, TUTORIAL, "exec"), names)
    assert names["readme"] == pytest.approx(names["before"], rel=1e-5)
    assert "P(None, 'fsdp')" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "least"), [(4, 1024), (8, 2048), (2, 512)])
def test_fsdp_splits_large_divisible_arrays(size: int, least: int) -> None:
    tree = {
        "scalar": (),
        "small vector": (least - size,),
        "large vector": (2 * least,),
        "small matrix": (16, 16),
        "large matrix": (least, least),
        "odd rows": (least + 1, least),
    }
    shapes = {name: jax.ShapeDtypeStruct(s, "float32") for name, s in tree.items()}
    fsdp = make_mesh({"fsdp": size}, jax.devices()[:size])
    found = resolve_shardings(shapes, FSDPRules(min_size=least), fsdp)
    assert {name: sharding.spec for name, sharding in found.items()} == {
        "scalar": P(),
        "small vector": P(),
        "large vector": P("fsdp"),
        "small matrix": P(),
        "large matrix": P("fsdp"),
        "odd rows": P(None, "fsdp"),
    }


@pytest.mark.parametrize("dim", [32, 192])
def test_outputs_without_inputs_are_placed(dim: int, mesh: Mesh) -> None:
    rules = PathRules(("a", P("x", "y")), ("b", P("y", "x")), strict=True)

    @sharded_jit(mesh=mesh, out_shardings=(rules, P(("x", "y"))))
    def function(x: float) -> Any:
        zeros = jnp.zeros((dim, dim))
        return {"a": zeros, "b": zeros}, zeros

    by_rule, by_spec = function(1.0)
    assert by_rule["a"].sharding == NamedSharding(mesh, P("x", "y"))
    assert by_rule["b"].sharding == NamedSharding(mesh, P("y", "x"))
    assert by_spec.sharding == NamedSharding(mesh, P(("x", "y")))


def test_constraints_and_annotations_take_rules_and_specs(mesh: Mesh) -> None:
    spec, x = P("x", "y"), np.ones((32, 32), np.float32)
    wanted = NamedSharding(mesh, spec)
    for where in (spec, PolicyRules(lambda info: spec)):
        constrained = sharded_jit(lambda x, to=where: constrain(x, to), mesh)
        named = sharded_jit(
            lambda x: annotate(x, "activation"), mesh, annotations={"activation": where}
        )
        for function in (constrained, named):
            assert function(x).sharding == wanted


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("axes", ["x", ("y",), ("x", "y")])
def test_local_data_is_split_along_any_dim(dim: int, axes: Any, mesh: Mesh) -> None:
    data = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    found = process_local_to_global({"a": data}, mesh, axes, dim=dim)["a"]
    spec = P(*[None] * dim, axes)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    np.testing.assert_array_equal(found, data)
