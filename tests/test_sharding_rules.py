"""Names in a model and rules of a user, with errors that explain them."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Strategy,
    TensorParallel,
    Trainer,
    constrain,
    make_mesh,
    shard,
    sharded_jit,
)
from nnx_parallel.errors import (
    IndivisibleDimError,
    ParallelError,
    ParallelWarning,
    PlacementConflictError,
    PlacementTreeError,
    RuleError,
    SpecRankError,
    UnknownAxisError,
    UnmatchedRuleError,
)
from nnx_parallel.layers import Dense, named
from nnx_parallel.mesh import MESH_AXES
from nnx_parallel.sharding import (
    ArrayInfo,
    ChainRules,
    FSDPRules,
    LogicalRules,
    PathRules,
    PolicyRules,
    Rules,
    resolve_shardings,
)
from nnx_parallel.sharding.constrain import check_names
from nnx_parallel.sharding.names import AXIS_NAMES
from nnx_parallel.sharding.nnx_arrays import array_info, variables_of
from nnx_parallel.sharding.specs import axes_on
from tests.placing import FSDP_TP, place

# Names


def test_logical_rules_override_strategy_entries() -> None:
    rules = (LogicalRules({"mlp": None, "embed": "tensor"}),)
    strategy = TensorParallel(8, rules=rules)
    assert place(strategy, 64, 64, names=("embed", "mlp")).stored == P("tensor")
    assert place(strategy, 64, 64, names=(None, "vocab")).stored == P(None, "tensor")


def test_conflicting_logical_rules_raise() -> None:
    rules = (LogicalRules({"mlp": None}), LogicalRules({"mlp": "tensor"}))
    message = "Two LogicalRules map dims named 'mlp' to () and to ('tensor',). Keep"
    with pytest.raises(PlacementConflictError, match=re.escape(message)):
        TensorParallel(rules=rules).layout()
    same = (LogicalRules({"mlp": "tensor"}), LogicalRules({"mlp": ("tensor",)}))
    assert TensorParallel(rules=same).layout().claims.logical["mlp"] == ("tensor",)


def test_rule_with_unknown_axis_raises() -> None:
    message = (
        "Dims named 'seq' are mapped to the mesh axis 'tensr', which the mesh lacks. "
        "Did you mean 'tensor'? Its axes: ['tensor']. Map the name to one of them, or "
        "to None to replicate."
    )
    with pytest.raises(UnknownAxisError, match=re.escape(message)):
        TensorParallel(rules=(LogicalRules({"seq": "tensr"}),)).layout()


def test_mesh_axis_name_applies_if_present() -> None:
    names = (None, "tensor")
    assert place(TensorParallel(), 64, 64, names=names).stored == P(None, "tensor")
    assert place(DataParallel(), 64, 64, names=names).stored == P()
    both = (None, ("fsdp", "tensor"))
    assert place(FSDP_TP, 64, 64, names=both).stored == P(None, ("fsdp", "tensor"))


class Annotated(nnx.Module):
    """A layer with names as in Flax's guide, including a mesh axis of that guide."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "model"))
        self.linear = nnx.Linear(64, 64, kernel_init=init, use_bias=False, rngs=rngs)


def test_flax_guide_names_map_to_axes() -> None:
    kernel = TensorParallel(8).init(Annotated, 0).linear.kernel[...]  # pyright: ignore[reportAttributeAccessIssue]
    assert kernel.sharding.spec == P(None, "tensor")
    assert kernel.addressable_shards[0].data.shape == (64, 8)
    # A user's rule takes precedence over the convention.
    strategy = TensorParallel(8, rules=(LogicalRules({"model": None}),))
    assert place(strategy, 64, 64, names=(None, "model")).stored == P()


def test_unknown_name_raises_with_working_advice() -> None:
    message = (
        "Name 'columns' of `block.kernel` is neither a logical axis nor a mesh axis. "
        "Map it with rules=(LogicalRules({'columns': 'tensor'}),), or to None to "
        "replicate."
    )
    names = (None, "columns")
    for strategy in (TensorParallel, FSDP, DataParallel):
        with pytest.raises(UnknownAxisError, match=re.escape(message)):
            place(strategy(), 64, 64, names=names)
        rules = (LogicalRules({"columns": "tensor"}),)
        place(strategy(rules=rules), 64, 64, names=names)


@pytest.mark.parametrize(
    ("strategy", "stored", "absent"),
    [
        (DataParallel(), P(), ("fsdp", "tp")),
        (FSDP(), P("fsdp"), ("tp",)),
        (TensorParallel(), P(None, "tensor"), ("fsdp",)),
        (FSDP_TP, P("fsdp", "tensor"), ()),
    ],
    ids=repr,
)
def test_foreign_axis_names_map_or_are_absent(
    strategy: Strategy, stored: P, absent: tuple[str, ...]
) -> None:
    found = place(strategy, 64, 128, names=("fsdp", "tp"))
    assert found.stored == stored
    assert found.absent == absent


def test_conventional_names_map_to_mesh_axes() -> None:
    assert set(AXIS_NAMES) == set(MESH_AXES)
    for axis, names in AXIS_NAMES.items():
        for name in names:
            assert axes_on(make_mesh({axis: None}), name) == (axis,)
            # A user's mesh may have an axis of that name.
            assert axes_on(make_mesh({name: None}), name) == (name,)


def test_description_lists_absent_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    init = nnx.with_partitioning(nnx.initializers.ones_init(), ("fsdp", "tp"))

    def build(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(64, 64, kernel_init=init, rngs=rngs)

    monkeypatch.setenv("COLUMNS", "200")
    text = str(FSDP().describe(build))
    assert "name 'fsdp' -> fsdp; axis 'tp' has size one here" in text


def named_by_sharding(rngs: nnx.Rngs) -> nnx.Module:
    """A layer as in the JAX AI stack's miniGPT, named on a mesh that it makes."""
    mesh = jax.make_mesh((2, 4), ("batch", "model"))
    sharding = NamedSharding(mesh, P(None, "model"))
    init = nnx.with_partitioning(nnx.initializers.ones_init(), sharding)  # pyright: ignore[reportArgumentType]
    return nnx.Linear(64, 64, kernel_init=init, rngs=rngs)


def test_metadata_sharding_is_read_as_spec() -> None:
    message = (
        "1 arrays of the model name their dims by a NamedSharding, such as "
        "P(None, 'model') on {'batch': 2, 'model': 4}. The spec is used, but the mesh "
        "is ignored: the strategy's mesh is {'tensor': 8}."
    )
    with pytest.warns(ParallelWarning, match=re.escape(message)):
        model: Any = TensorParallel(8).init(named_by_sharding, 0)
    assert model.kernel[...].sharding.spec == P(None, "tensor")
    with pytest.warns(ParallelWarning, match="by a NamedSharding"):
        model = FSDP(min_size=0).init(named_by_sharding, 0)
    assert model.kernel[...].sharding == NamedSharding(FSDP().make_mesh(), P("fsdp"))


def test_unknown_name_suggests_nearest_name() -> None:
    message = "Name 'embeds' of `block.kernel` is neither a logical axis nor a mesh "
    with pytest.raises(UnknownAxisError, match=re.escape(message)) as caught:
        place(FSDP(), 64, 64, names=("embeds", None))
    assert "Did you mean 'embed'? " in str(caught.value)
    assert "axes of this mesh: ['fsdp']." in str(caught.value)


def build_unnamed(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(64, 64, rngs=rngs)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("embd", "embed"),
        ("embbed", "embed"),
        ("enbed", "embed"),
        ("ebmed", "embed"),
        ("kv-heads", "kv_heads"),
    ],
)
def test_rule_for_misspelt_name_raises(name: str, word: str) -> None:
    message = (
        f"LogicalRules({{{name!r}: None}}): no parameter has a dim of this name. Did "
        f"you mean {word!r}?"
    )
    with pytest.raises(UnknownAxisError, match=re.escape(message)):
        FSDP(rules=(LogicalRules({name: None}),)).describe(build_unnamed)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("columns", ""),
        ("q_heads", " Did you mean 'heads'?"),
        ("head", " Did you mean 'heads'?"),
        ("embed2", " Did you mean 'embed'?"),
    ],
)
def test_rule_for_name_in_call_warns(name: str, hint: str) -> None:
    message = f"or a spec in its call, gives a dim this name.{hint}"
    with pytest.warns(ParallelWarning, match=f"{re.escape(message)}$"):
        FSDP(rules=(LogicalRules({name: None}),)).describe(build_unnamed)


def test_rule_for_name_in_call_takes_effect() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(8, 64, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return constrain(self.up(x), None, "q_heads")

    def loss(model: Model, batch: jax.Array) -> jax.Array:
        return model(batch).mean()

    strategy = FSDP(rules=(LogicalRules({"q_heads": "fsdp"}),))
    with pytest.warns(ParallelWarning, match="Did you mean 'heads'"):
        trainer = Trainer(Model, optax.sgd(0.1), loss, strategy=strategy, loggers=())
    step: Any = trainer.train_step
    x = trainer.shard_batch(np.ones((8, 8), np.float32))
    text = step.lower(trainer.state, x).as_text()
    assert re.search(r'sharding_constraint.*\[\{\}, \{"fsdp"\}\]', text)


def test_indivisible_dim_of_path_rule_raises() -> None:
    rules = PathRules((r"kernel", P(("fsdp", "tensor"), None)))
    message = r"or keep the dim whole: rules=(PathRules((r'^block\.kernel$', P())),)."
    strategy = Composite(FSDP(4), TensorParallel(2), rules=(rules,))
    with pytest.raises(IndivisibleDimError, match=re.escape(message)):
        place(strategy, 12, 64)


def test_indivisible_named_dim_raises() -> None:
    message = (
        "Cannot shard `block.kernel` with global shape (64, 6, 16) as "
        "P(None, 'tensor'): mesh axis 'tensor' of size 4 does not divide "
        "dim 1 of size 6. Pad the dim to 8, use an axis size among [1, 2, 3], or keep "
        "the dim whole: rules=(LogicalRules({'kv_heads': None}),)."
    )
    names = ("embed", "kv_heads", "head_dim")
    strategy = Composite(DataParallel(2), TensorParallel(4))
    with pytest.raises(IndivisibleDimError, match=re.escape(message)):
        place(strategy, 64, 6, 16, names=names)


def test_few_kv_heads_are_replicated() -> None:
    names = ("embed", "kv_heads", "head_dim")
    parts = (DataParallel(2), TensorParallel(4))
    for size in (1, 2):
        placement = place(Composite(*parts), 64, size, 16, names=names)
        assert placement.stored == P()
        assert "fewer key heads than devices" in placement.reason
    assert place(Composite(*parts), 64, 4, 16, names=names).stored == P(None, "tensor")
    rules = (LogicalRules({"kv_heads": None}),)
    assert place(Composite(*parts, rules=rules), 64, 1, 16, names=names).stored == P()


def test_names_that_claim_same_axis_raise() -> None:
    message = (
        "Cannot shard `block.kernel` with global shape (64, 64) as "
        "P('tensor', 'tensor'): mesh axis 'tensor' splits 2 dims. An "
        "axis can split only one dim of an array; map the other dims to None."
    )
    with pytest.raises(PlacementConflictError, match=re.escape(message)):
        place(TensorParallel(), 64, 64, names=("vocab", "mlp"))


def test_more_names_than_dims_raise() -> None:
    variable = nnx.Param(
        jnp.ones((2, 3)), out_sharding=("embed", "mlp", "heads"), eager_sharding=False
    )
    message = (
        "`up.kernel` has shape (2, 3) but 3 names ('embed', 'mlp', 'heads'). Give one "
        "name, or None, for each of its 2 dims."
    )
    with pytest.raises(SpecRankError, match=re.escape(message)):
        array_info(("up", "kernel"), variable)


def test_missing_names_leave_last_dims_free() -> None:
    variable = nnx.Param(jnp.ones((8, 3)), out_sharding=("mlp",), eager_sharding=False)
    info = array_info(("blocks", 0, "kernel"), variable)
    assert (info.path, info.names, info.size) == ("blocks.0.kernel", ("mlp", None), 24)


def test_shared_variable_is_listed_once() -> None:
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.second = nnx.List([self.first, nnx.Linear(4, 4, rngs=rngs)])

    paths = [path for path, _ in variables_of(Tied(nnx.Rngs(0)))]
    assert len(paths) == 4


# Rules


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (
            P(None, None, "fsdp"),
            SpecRankError,
            "Cannot shard `block.kernel` with global shape (64, 64) as "
            "P(None, None, 'fsdp'): the spec has 3 entries for 2 dims. "
            "Shorten it.",
        ),
        (
            P("fdsp"),
            UnknownAxisError,
            "Cannot shard `block.kernel` as P('fdsp',): the mesh has no "
            "axis 'fdsp'. Did you mean 'fsdp'? Its axes: ['fsdp'].",
        ),
        (P("fsdp", "fsdp"), PlacementConflictError, "'fsdp' splits 2 dims."),
    ],
)
def test_rule_with_invalid_spec_raises(
    spec: P, error: type[ParallelError], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        place(FSDP(rules=(PathRules((r"kernel", spec)),)), 64, 64)


SERVES_ALL = {
    "paths": PathRules((r"kernel", P("fsdp", "tensor"))),
    "others' names": PathRules((r"kernel", P("fsdp", "tp"))),
    "policy": PolicyRules(lambda info: P(("fsdp",), ("tensor",))),
    "chain": ChainRules(PathRules((r"kernel", P("fsdp", "tensor"))), FSDPRules()),
}


@pytest.mark.parametrize("rule", SERVES_ALL.values(), ids=SERVES_ALL)
def test_rule_applies_under_every_strategy(rule: Rules) -> None:
    specs = {
        FSDP(rules=(rule,)): P("fsdp"),
        TensorParallel(rules=(rule,)): P(None, "tensor"),
        DataParallel(rules=(rule,)): P(),
        Composite(FSDP(4), TensorParallel(2), rules=(rule,)): P("fsdp", "tensor"),
    }
    assert {s: place(s, 64, 128).stored for s in specs} == specs
    absent = place(DataParallel(rules=(rule,)), 64, 128).absent
    assert absent[0] == "fsdp"
    assert len(absent) == 2


def test_logical_rules_apply_under_every_strategy() -> None:
    rules = (LogicalRules({"columns": "tensor", "rows": ("dp", "fsdp")}),)
    specs = {
        FSDP(rules=rules): P("fsdp"),
        TensorParallel(rules=rules): P(None, "tensor"),
        DataParallel(rules=rules): P("data"),
        Composite(FSDP(4), TensorParallel(2), rules=rules): P("fsdp", "tensor"),
    }
    names = ("rows", "columns")
    assert {s: place(s, 64, 128, names=names).stored for s in specs} == specs


def test_fsdp_rule_without_axis_splits_nothing() -> None:
    rules = (ChainRules(PathRules((r"bias", P())), FSDPRules()),)
    assert place(TensorParallel(rules=rules), 64, 64).stored == P()
    assert place(FSDP(rules=rules), 64, 64).stored == P("fsdp")


def test_unknown_axis_on_bare_mesh_raises() -> None:
    message = "Cannot shard `the array` as P('tensor',): the mesh has no axis 'tensor'."
    with pytest.raises(UnknownAxisError, match=re.escape(message)):
        shard(jnp.ones(8), P("tensor"), make_mesh({"fsdp": None}))


def test_rules_that_claim_same_array_raise() -> None:
    columns = PathRules((r"kernel", P(None, "fsdp")))

    def rows(info: ArrayInfo) -> P | None:
        return P("fsdp") if info.size > 1000 else None

    strategy = FSDP(rules=(columns, PolicyRules(rows)))
    message = (
        "Two rules claim `block.kernel`: path rule 'kernel' says "
        "P(None, 'fsdp'), policy 'rows' says P('fsdp',). Keep "
        "one, or order them in one PathRules."
    )
    with pytest.raises(PlacementConflictError, match=re.escape(message)):
        place(strategy, 64, 64)
    assert place(strategy, 8, 8).stored == P(None, "fsdp")


def test_chain_applies_first_matching_rule() -> None:
    columns = PathRules((r"kernel", P(None, "fsdp")))
    rows = PathRules((r"kernel", P("fsdp")))
    chain = ChainRules(PathRules((r"bias", P())), rows, columns)
    assert place(FSDP(rules=(chain,)), 64, 64).stored == P("fsdp")
    with pytest.warns(UserWarning, match=re.escape("Path rules ['kernal'] match no")):
        FSDP(rules=(ChainRules(PathRules((r"kernal", P())), FSDPRules()),)).init(
            lambda rngs: nnx.Linear(64, 64, rngs=rngs), 0
        )


def test_first_matching_path_applies() -> None:
    rules = PathRules((r"^block", P("fsdp")), (r"kernel", P(None, "fsdp")))
    assert place(FSDP(rules=(rules,)), 64, 64).stored == P("fsdp")


def test_strict_rules_raise_on_unmatched_parameter() -> None:
    rules = PathRules((r"bias", P()), strict=True)
    message = (
        "No path rule matches `block.kernel` with shape (64, 64). Strict rules must "
        "match every parameter: ['bias']. Add one, or end with (r'.*', P()) to "
        "replicate the rest."
    )
    with pytest.raises(UnmatchedRuleError, match=re.escape(message)):
        place(FSDP(rules=(rules,)), 64, 64)
    assert place(FSDP(rules=(rules,)), 64, is_param=False).stored == P()


def test_unmatched_path_rules_warn() -> None:
    rules = PathRules((r"kernal", P("fsdp")), (r"kernel", P()))
    with pytest.warns(
        UserWarning, match=re.escape("Path rules ['kernal'] match no ar")
    ):
        FSDP(rules=(rules,)).init(lambda rngs: nnx.Linear(64, 64, rngs=rngs), 0)


def test_policy_receives_shape_names_and_kind() -> None:
    seen = []
    strategy = FSDP(rules=(PolicyRules(seen.append),))
    strategy.describe(lambda rngs: nnx.BatchNorm(64, rngs=rngs))
    assert {(i.path, i.shape, i.kind, i.is_param) for i in seen} == {
        ("bias", (64,), "Param", True),
        ("scale", (64,), "Param", True),
        ("mean", (64,), "BatchStat", False),
        ("var", (64,), "BatchStat", False),
    }


def test_duplicate_dim_name_raises() -> None:
    message = (
        "The dims ('embed', 'embed') name 'embed' twice. Give each dim of a parameter "
        "a different name, or None."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check_names(("embed", "embed"))


def test_names_are_stored_in_flax_metadata() -> None:
    dense = Dense({"embed": 4}, {"mlp": 8}, rngs=nnx.Rngs(0))
    assert dense.kernel.get_metadata()["out_sharding"] == ("embed", "mlp")
    value = named(nnx.initializers.ones_init(), "mlp")(jax.random.key(0), (4,))
    assert nnx.Param(value).get_metadata()["out_sharding"] == ("mlp",)


# Malformed rules


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PathRules({"kernel": P("fsdp")}),  # pyright: ignore[reportArgumentType]
            "PathRules got {'kernel': P('fsdp',)}. Its arguments are pairs of a regex "
            "and a PartitionSpec: PathRules((r'up.*kernel', P(None, 'tensor')), ...).",
        ),
        (
            lambda: PathRules((r"kernel", "fsdp")),  # pyright: ignore[reportArgumentType]
            "PathRules got ('kernel', 'fsdp'). Its arguments are pairs of a regex",
        ),
        (
            lambda: PathRules([(r"kernel", P())]),  # pyright: ignore[reportArgumentType]
            "PathRules got [('kernel', P())]. Its arguments are pairs",
        ),
        (
            lambda: PathRules(r"kernel", P()),  # pyright: ignore[reportArgumentType]
            "PathRules got 'kernel'. Its arguments are pairs",
        ),
        (
            lambda: PolicyRules(lambda path, leaf: P("fsdp")),  # pyright: ignore[reportArgumentType]
            "missing a required argument: 'leaf'. A policy takes one ArrayInfo, with "
            "path, shape and dtype: lambda info: P('fsdp').",
        ),
        (
            lambda: PolicyRules(P("fsdp")),  # pyright: ignore[reportArgumentType]
            "PolicyRules got P('fsdp',): P('fsdp',) is not a callable object. A pol",
        ),
        (
            lambda: LogicalRules([("mlp", "tensor")]),  # pyright: ignore[reportArgumentType]
            "LogicalRules got [('mlp', 'tensor')]. It takes a mapping whose values are",
        ),
        (
            lambda: LogicalRules({"mlp": P("tensor")}),  # pyright: ignore[reportArgumentType]
            "LogicalRules got {'mlp': P('tensor',)}. It takes a mapping whose values ",
        ),
        (
            lambda: FSDPRules(2**20),  # pyright: ignore[reportArgumentType]
            "FSDPRules got 1048576 for its axis, the name of a mesh axis. Pass other "
            "arguments by keyword: FSDPRules(min_size=2**20).",
        ),
        (
            lambda: ChainRules(FSDPRules(), PathRules),  # pyright: ignore[reportArgumentType]
            "ChainRules got <class 'nnx_parallel.sharding.rules.PathRules'>, a type. "
            "A rule is an instance of PathRules, PolicyRules, ",
        ),
        (
            lambda: FSDP(rules=FSDPRules()).layout(),  # pyright: ignore[reportArgumentType]
            "a strategy got FSDPRules(axis='fsdp', min_size=1024), a FSDPRules. A rule",
        ),
        (
            lambda: Composite(FSDP(), rules=PathRules()),  # pyright: ignore[reportArgumentType]
            "Composite got PathRules(pairs=(), strict=None), a PathRules. A rule ",
        ),
        (
            lambda: DataParallel(rules=({"kernel": P()},)).layout(),  # pyright: ignore[reportArgumentType]
            "a strategy got {'kernel': P()}, a dict. A rule is an instance",
        ),
    ],
)
def test_malformed_rule_raises_at_construction(make: Callable, message: str) -> None:
    with pytest.raises(RuleError, match=re.escape(message)):
        make()


class Answers:
    """A user's rule that returns a given answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def match(self, info: ArrayInfo, mesh: Any) -> Any:
        return self.answer


@pytest.mark.parametrize(
    "rule",
    [
        PolicyRules(lambda info: "fsdp"),  # pyright: ignore[reportArgumentType]
        PolicyRules(lambda info: ("fsdp", None)),  # pyright: ignore[reportArgumentType]
        Answers(P("fsdp")),
        Answers(("fsdp", "why")),
        Answers(()),
    ],
)
def test_policy_with_invalid_result_raises(rule: Any) -> None:
    message = "for `block.kernel`. A policy returns a jax.sharding.PartitionSpec, such"
    with pytest.raises(RuleError, match=re.escape(message)):
        place(FSDP(rules=(rule,)), 64, 64)
    tree = {"block": {"kernel": jnp.ones((8, 8))}}
    with pytest.raises(RuleError, match=re.escape(message)):
        resolve_shardings(tree, rule, make_mesh({"fsdp": None}))


def test_rule_class_instead_of_instance_raises() -> None:
    mesh = make_mesh({"fsdp": None})
    message = "Cannot place `in_shardings`: <class 'nnx_parallel.sharding.rules.FSDPRul"
    with pytest.raises(PlacementTreeError, match=re.escape(message)):
        sharded_jit(lambda x, y: x, mesh, in_shardings=(FSDPRules, None))
    with pytest.raises(PlacementTreeError, match=r"in_shardings is a type\. Pass"):
        sharded_jit(lambda x, y: x, mesh, in_shardings=FSDPRules)
    with pytest.raises(PlacementTreeError, match=re.escape("Use a rule (not its cla")):
        shard({"a": jnp.ones(8)}, FSDPRules, mesh)
