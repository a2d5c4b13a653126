"""Several strategies combined into one, independent of their order."""

import re
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import FSDP, Composite, DataParallel, Strategy, TensorParallel
from nnx_parallel.errors import PlacementConflictError
from nnx_parallel.layers import Dense
from nnx_parallel.sharding import LogicalRules, PathRules
from nnx_parallel.sharding.layout import Claims
from nnx_parallel.sharding.names import MeshAxes

PARTS = DataParallel(2), FSDP(2), TensorParallel(2)


@dataclass(frozen=True, repr=False)
class Experts(Strategy):
    """A user's strategy, which claims ``mlp`` for its axis."""

    def claims(self) -> Claims:
        return Claims(axis_sizes={"expert": 2}, logical={"mlp": "expert"})


def test_order_of_parts_does_not_matter() -> None:
    expected = Composite(*PARTS)
    for parts in permutations(PARTS):
        found = Composite(*parts)
        assert found == expected
        assert hash(found) == hash(expected)
        assert repr(found) == repr(expected)
        assert found.make_mesh() == expected.make_mesh()
    assert expected.make_mesh().axis_names == ("data", "fsdp", "tensor")


def test_batch_is_split_over_all_axes() -> None:
    layout = Composite(*reversed(PARTS)).layout()
    assert layout.batch_spec(8) == P(("data", "fsdp"))
    assert layout.batch_spec(6) == P("data")
    assert layout.batch_spec(3) == P()


def test_nested_composites_flatten_with_rules() -> None:
    first, second = PathRules((r"a", P())), PathRules((r"b", P()))
    left = Composite(PARTS[2], PARTS[0], rules=(second,))
    right = Composite(PARTS[1], rules=(first,))
    assert Composite(left, right) == Composite(right, left)
    assert Composite(left, right).parts == PARTS
    assert set(Composite(left, right).claims().rules) == {first, second}


def test_rules_of_part_and_composite_both_apply() -> None:
    part = PathRules((r"kernel", P(None, "fsdp")))
    whole = PathRules((r"bias", P("fsdp")))
    strategy = Composite(FSDP(8, rules=(part,)), rules=(whole,))
    state = nnx.state(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    specs: Any = strategy.specs(state)
    assert specs["kernel"].get_value() == P(None, "fsdp")
    assert specs["bias"].get_value() == P("fsdp")


def test_composite_of_one_matches_its_part() -> None:
    state = nnx.state(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    assert Composite(FSDP()).shardings(state) == FSDP().shardings(state)


def test_repr_shows_non_default_arguments() -> None:
    rule = LogicalRules({"vocab": None})
    strategy = Composite(TensorParallel(2), FSDP(min_size=0), rules=(rule,))
    assert repr(strategy) == (
        "Composite(FSDP(min_size=0), TensorParallel(size=2), "
        "rules=(LogicalRules(items=(('vocab', None),)),))"
    )
    assert repr(Composite(FSDP(), DataParallel(2))) == (
        "Composite(DataParallel(size=2), FSDP())"
    )


def test_parts_with_same_axis_raise() -> None:
    message = (
        "Both FSDP(size=4, shard='optimizer') and FSDP(size=2) use the mesh axis "
        "'fsdp'. Each part of a Composite needs separate axes: keep one of them and "
        "give it the product of the sizes."
    )
    with pytest.raises(PlacementConflictError, match=re.escape(message)):
        Composite(FSDP(2), Composite(FSDP(4, shard="optimizer"), DataParallel()))


def test_parts_with_conflicting_names_raise() -> None:
    message = (
        "Experts() maps dims named 'mlp' to 'expert', TensorParallel(size=4) maps "
        "them to 'tensor'. Decide with rules=(LogicalRules({'mlp': ...}),)."
    )
    with pytest.raises(PlacementConflictError, match=re.escape(message)):
        Composite(TensorParallel(4), Experts())


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ("expert", P(None, "expert")),
        ("tensor", P(None, "tensor")),
        (("expert", "tensor"), P(None, ("expert", "tensor"))),
        (None, P()),
    ],
)
def test_user_rule_resolves_name_conflict(axes: MeshAxes, spec: P) -> None:
    rules = (LogicalRules({"mlp": axes}),)
    state = nnx.state(Dense({"embed": 8}, {"mlp": 8}, rngs=nnx.Rngs(0)))
    for strategy in (
        Composite(TensorParallel(4), Experts(), rules=rules),
        Composite(TensorParallel(4, rules=rules), Experts()),
    ):
        specs: Any = strategy.specs(state)
        assert specs["kernel"].get_value() == spec


def test_empty_composite_raises() -> None:
    message = "Composite() has no strategies. Give it at least one."
    with pytest.raises(ValueError, match=re.escape(message)):
        Composite()
