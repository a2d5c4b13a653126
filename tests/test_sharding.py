"""Which rule decides an array's placement, and the four specs that follow."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    TensorParallel,
    constrain,
    make_mesh,
)
from nnx_parallel.errors import PlacementTreeError, SpecRankError, UnknownAxisError
from nnx_parallel.sharding import FSDPRules, Layout, PathRules, using
from nnx_parallel.sharding.placement import cheapest_dim
from nnx_parallel.sharding.tree import layout_of
from tests.placing import FSDP_TP, place

# Who decides


def test_rules_override_names_and_names_fsdp() -> None:
    names = ("embed", "mlp")
    free = place(FSDP_TP, 64, 128, names=names)
    rule = PathRules((r"\.kernel", P("tensor", "fsdp")))
    ruled = place(Composite(*FSDP_TP.parts, rules=(rule,)), 64, 128, names=names)
    assert (free.stored, free.used) == (P("fsdp", "tensor"), P(None, "tensor"))
    assert free.reason == "name 'mlp' -> tensor; fsdp: free dim 0"
    assert (ruled.stored, ruled.used) == (P("tensor", "fsdp"), P("tensor"))
    assert ruled.reason == r"path rule '\\.kernel'"


def test_replicating_rule_is_applied() -> None:
    strategy = FSDP(rules=(PathRules((r"kernel", P())),))
    assert place(strategy, 64, 128).stored == P()


@pytest.mark.parametrize(
    ("shape", "names", "spec", "reason"),
    [
        # FSDP prefers the dim that a product contracts, if its shards are whole tiles.
        ((64, 128), None, P("fsdp"), "fsdp: free dim 0"),
        ((64, 2048), None, P("fsdp"), "fsdp: free dim 0"),
        ((72, 2048), None, P(None, "fsdp"), "fsdp: free dim 1"),
        ((72, 512), None, P(None, "fsdp"), "fsdp: free dim 1"),
        ((72, 144), None, P("fsdp"), "fsdp: free dim 0, unaligned"),
        ((9, 144), None, P(None, "fsdp"), "fsdp: free dim 1, unaligned"),
        ((64, 100, 64), None, P("fsdp"), "fsdp: free dim 0"),
        ((8, 128, 64), None, P(None, "fsdp"), "fsdp: free dim 1"),
        ((9, 900), None, P(), "fsdp=8 divides no free dim of [9, 900]"),
        ((1023,), None, P(), "1023 elements < min_size 1024"),
        ((1024,), None, P("fsdp"), "fsdp: free dim 0"),
        ((512, 8, 64), ("layers", None, None), P(None, None, "fsdp"), None),
        ((512, 9), ("layers",), P(), "fsdp=8 divides no free dim of [9]"),
    ],
)
def test_fsdp_splits_cheapest_dim(
    shape: tuple, names: tuple | None, spec: P, reason: str | None
) -> None:
    names = names and names + (None,) * (len(shape) - len(names))
    placement = place(FSDP(), *shape, names=names)
    assert placement.stored == spec
    assert placement.used == P()
    assert reason in (None, placement.reason)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        # 64 rows; with 172 columns, the compiler would transpose after the gather.
        ((4096, 11_008), 0),
        ((11_008, 4096), 1),  # 64 columns; 172 rows are not whole tiles
        ((4096, 16_384), 0),
        ((4096, 32, 128), 0),
        ((32, 128, 4096), 2),
        ((32_000, 4096), 1),
        ((32_768, 4096), 0),
    ],
)
def test_llama_dims_are_whole_tiles_over_64_chips(
    shape: tuple[int, ...], dim: int
) -> None:
    fitting = [d for d, size in enumerate(shape) if size % 64 == 0]
    assert cheapest_dim(fitting, shape, 64) == (dim, True)


def test_fsdp_splits_dim_left_by_tensor_parallelism() -> None:
    names = ("mlp", "embed")
    assert place(FSDP_TP, 512, 64, names=names).stored == P("tensor", "fsdp")
    taken = place(FSDP_TP, 512, 9, names=names)
    assert taken.stored == P("tensor")
    assert taken.reason == "name 'mlp' -> tensor; fsdp=4 divides no free dim of [9]"


def test_fsdp_splits_only_parameters() -> None:
    placement = place(FSDP(), 4096, kind="BatchStat", is_param=False)
    assert (placement.stored, placement.reason) == (P(), "not a parameter")


def test_unnamed_arrays_are_replicated_with_reason() -> None:
    placement = place(TensorParallel(), 64, 128)
    assert (placement.stored, placement.reason) == (P(), "no rule names it")


@pytest.mark.parametrize(
    ("shard", "stored", "gradient", "optimizer"),
    [
        ("params", P("fsdp"), P("fsdp"), P("fsdp")),
        ("gradients", P(), P("fsdp"), P("fsdp")),
        ("optimizer", P(), P(), P("fsdp")),
    ],
)
def test_zero_stages_have_expected_specs(
    shard: Any, stored: P, gradient: P, optimizer: P
) -> None:
    found = place(FSDP(shard=shard), 64, 64)
    specs = (found.stored, found.used, found.gradient, found.optimizer)
    assert specs == (stored, P(), gradient, optimizer)
    assert found.is_gathered == (shard != "optimizer")


def test_zero_keeps_axes_of_other_strategies() -> None:
    strategy = Composite(FSDP(4, shard="optimizer"), TensorParallel(2))
    found = place(strategy, 64, 64, names=("embed", "mlp"))
    assert found.stored == found.used == found.gradient == P(None, "tensor")
    assert found.optimizer == P("fsdp", "tensor")


def test_layer_specs_drop_first_dim() -> None:
    names = ("layers", "embed", "mlp")
    layer = place(FSDP_TP, 2, 64, 64, names=names).of_layer()
    assert (layer.stored, layer.used) == (P("fsdp", "tensor"), P(None, "tensor"))
    assert not layer.is_stacked


# Activations


def test_constrain_outside_strategy_returns_same_object() -> None:
    x = jnp.ones((8, 4))
    assert constrain(x, "batch", "embed") is x


@pytest.fixture(scope="module")
def layout() -> Layout:
    parts = DataParallel(2), FSDP(2), TensorParallel(2)
    return Composite(*parts).layout()


@pytest.mark.parametrize(
    ("shape", "names", "spec"),
    [
        ((8, 16, 64), ("batch", "seq", "mlp"), P(("data", "fsdp"), None, "tensor")),
        ((8, 64), ("batch", None), P(("data", "fsdp"))),
        ((6, 64), ("batch", "heads"), P("data", "tensor")),
        ((3, 7), ("batch", "mlp"), P()),
        ((8, 8), ("mlp", "heads"), P("tensor")),
        ((8, 8), ("tensor", "context"), P("tensor")),
        ((8, 8), ("ep", "tp"), P(None, "tensor")),
    ],
)
def test_constrain_splits_divisible_dims(
    layout: Layout, shape: tuple, names: tuple, spec: P
) -> None:
    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        with using(layout):
            return constrain(x, *names) + 0

    expected = layout.sharding(spec)
    assert function(jnp.ones(shape)).sharding.is_equivalent_to(expected, len(shape))


@pytest.mark.parametrize("names", [("fsdp", "tp"), (P("fsdp", "tp"),), ("dp", None)])
def test_rows_follow_axes_of_batch(names: tuple) -> None:
    layout = Composite(DataParallel(4), Pipeline(2)).layout()
    with using(layout):
        found = constrain(jnp.ones((8, 8)), *names).sharding
    assert found.is_equivalent_to(layout.sharding(P("data")), 2)


def test_constrain_with_invalid_names_raises(layout: Layout) -> None:
    message = (
        "constrain got 1 names ('batch',) for an array of shape (8, 4). Give one name, "
        "or None, for each of its 2 dims."
    )
    with pytest.raises(SpecRankError, match=re.escape(message)):
        constrain(jnp.ones((8, 4)), "batch")
    with using(layout), pytest.raises(UnknownAxisError, match="Did you mean 'batch'"):
        constrain(jnp.ones((8, 4)), "bach", None)


@pytest.mark.parametrize(
    ("shape", "names", "spec"),
    [
        ((8, 16), (("data", "tensor"), None), P(("data", "tensor"))),
        ((8, 16), (None, ("tensor", "data")), P(None, ("tensor", "data"))),
        ((8,), (("data", "tensor"),), P(("data", "tensor"))),
        ((8, 16), ((), "tensor"), P(None, "tensor")),
        ((8, 16), (P("tensor"),), P("tensor")),
    ],
)
def test_constrain_applies_on_bare_mesh(shape: tuple, names: tuple, spec: P) -> None:
    layout = layout_of(make_mesh({"data": 4, "tensor": 2}))

    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        with using(layout):
            return constrain(x, *names) + 0

    expected = layout.sharding(spec)
    assert function(jnp.ones(shape)).sharding.is_equivalent_to(expected, len(shape))


@pytest.mark.parametrize(
    ("x", "names"),
    [
        (np.ones((8, 4)), (P("data"), P())),
        (np.ones((8, 4)), ("batch", P("data"))),
        (np.ones((8, 4)), (FSDPRules(), None)),
        ({"a": np.ones((8, 4))}, ("batch", None)),
        (np.ones(8), (3, None)),
    ],
)
def test_constrain_of_tree_with_names_raises(x: Any, names: tuple) -> None:
    message = re.escape(f"constrain got {names} for a {type(x).__name__}. One array")
    for where in (None, layout_of(make_mesh({"data": None})), DataParallel().layout()):
        with using(where), pytest.raises(PlacementTreeError, match=message):
            constrain(x, *names)
    with pytest.raises(SpecRankError, match=re.escape("constrain got 3 names")):
        constrain(np.ones((8, 4)), ("data", "tensor"), None, None)


def test_layout_is_active_only_inside_context() -> None:
    x, layout = jnp.ones((8, 4)), DataParallel().layout()
    with using(layout):
        with using(None):
            assert constrain(x, "batch", None) is x
        assert constrain(x, "batch", None).sharding == layout.sharding(P("data"))
    assert constrain(x, "batch", None) is x
