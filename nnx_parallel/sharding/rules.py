"""Rules: who says where an array lives, as small frozen objects.

The rules of a strategy come before the names in the model, and these before FSDP's
choice; in any order, two that disagree are an error. In placements of a pytree
(`shard`, `sharded_jit`, `constrain`) `ChainRules` orders several.
"""

import contextlib
import functools
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal, Protocol, runtime_checkable

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import (
    ParallelWarning,
    PlacementConflictError,
    RuleError,
    UnknownAxisError,
    UnmatchedRuleError,
    suggest,
    warn_user,
)
from nnx_parallel.sharding.names import ArrayInfo, DimAxes, MeshAxes
from nnx_parallel.sharding.placement import cheapest_dim
from nnx_parallel.sharding.specs import axes_on, check_spec, dim_axes


# A protocol: a user's rule needs a method and no base class.
@runtime_checkable
class Rules(Protocol):
    """A rule of the user: it gives an array a spec, or passes."""

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """The array's spec and the reason for it, or ``None`` to pass."""
        ...


def check_regex(owner: str, regex: str) -> None:
    """Refuses a regex of a path that does not compile."""
    try:
        re.compile(regex)
    except (re.error, TypeError) as error:
        raise RuleError(
            f"{owner} got {regex!r} for a regex, which Python's re refuses: {error}. "
            r"It is searched in dotted paths, such as r'mlp\.up\.kernel'; "
            "re.escape(text) takes a text as it is."
        ) from None


@dataclass(frozen=True, init=False)
class PathRules:
    """Specs by regular expression over the dotted path; the first that matches counts.

    Attributes:
        pairs: ``(regex, spec)`` in order; the regex is searched, not anchored.
        strict: Raise for an array that no regex matches. By default one that is
            replicated for it, as no later rule answers either, is named in a warning;
            ``False`` leaves that out.

    Example:
        >>> rules = PathRules((r"mlp.*kernel", P(None, "tensor")), (r".*", P()))
        >>> rules.pairs[0][1] == P(None, "tensor")
        True
    """

    pairs: tuple[tuple[str, P], ...]
    strict: bool | None = None

    def __init__(self, *pairs: tuple[str, P], strict: bool | None = None) -> None:
        for pair in pairs:
            if not (type(pair) is tuple and len(pair) == 2 and isinstance(pair[1], P)):
                raise RuleError(
                    f"PathRules got {pair!r}. Its arguments are pairs of a regex and a "
                    "PartitionSpec: PathRules((r'up.*kernel', P(None, 'tensor')), ...)."
                )
            check_regex("PathRules", pair[0])  # here, not when a model is placed
        object.__setattr__(self, "pairs", tuple(pairs))
        object.__setattr__(self, "strict", strict)

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """The spec of the first regex found in the path."""
        for regex, spec in self.pairs:
            if re.search(regex, info.path):
                return spec, f"path rule {regex!r}"  # which `warn_idle` looks for
        # Statistics, counters and random keys stay whole: they need no rule.
        if self.strict and info.is_param:
            raise UnmatchedRuleError(
                f"No path rule matches `{info.path}` with shape {info.shape}. Strict "
                f"rules must match every parameter: {[r for r, _ in self.pairs]}. Add "
                "one, or end with (r'.*', P()) to replicate the rest."
            )
        return None


@dataclass(frozen=True)
class PolicyRules:
    """Specs by any function of an `ArrayInfo`; ``None`` passes.

    Example:
        >>> rules = PolicyRules(lambda info: P("fsdp") if info.size > 1e6 else None)
    """

    policy: Callable[[ArrayInfo], P | None]

    def __post_init__(self) -> None:
        with contextlib.suppress(ValueError):  # some functions in C have no signature
            try:
                inspect.signature(self.policy).bind("info")
            except TypeError as error:
                raise RuleError(
                    f"PolicyRules got {self.policy!r}: {error}. A policy takes one "
                    "ArrayInfo, with path, shape and dtype: lambda info: P('fsdp')."
                ) from None

    def __repr__(self) -> str:
        # Processes compare the reprs of their strategies before the first step; that
        # of a function has its address.
        return f"PolicyRules({hash_code(self.policy)})"

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """The function's spec."""
        spec = self.policy(info)
        name = getattr(self.policy, "__name__", type(self.policy).__name__)
        return None if spec is None else (spec, f"policy {name!r}")


@dataclass(frozen=True, init=False)
class LogicalRules:
    """Mesh axes by the logical names in the model; ``None`` replicates a dim.

    Given to a strategy it replaces the strategy's entry for each name that it has.

    Example:
        >>> LogicalRules({"mlp": None, "model": "tensor"}).mapping["model"]
        'tensor'
    """

    # Not a dict: strategies are hashed, and their rules with them.
    items: tuple[tuple[str, MeshAxes], ...]

    def __init__(self, mapping: Mapping[str, MeshAxes]) -> None:
        is_mapping = isinstance(mapping, Mapping)
        kinds = (str, tuple, type(None))
        if not is_mapping or not all(type(axes) in kinds for axes in mapping.values()):
            raise RuleError(
                f"LogicalRules got {mapping!r}. It takes a mapping whose values are a "
                "mesh axis, a tuple of them, or None: LogicalRules({'mlp': 'tensor'})."
            )
        object.__setattr__(self, "items", tuple(mapping.items()))

    @property
    def mapping(self) -> dict[str, MeshAxes]:
        """Mesh axes by logical name."""
        return dict(self.items)

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """The spec of the dims whose names it knows."""
        names: tuple[Any, ...] = info.names or ()
        if self.mapping.keys().isdisjoint(names):
            return None
        return P(*map(self.mapping.get, names)), f"names {info.names}"


@dataclass(frozen=True)
class FSDPRules:
    """One mesh axis over the free dim that costs its gather the fewest copies.

    Among the free dims that the axis divides, first come dims whose shards are whole
    tiles of a TPU: multiples of 128 along the last dim, of 8 along the one before it,
    of any length along the others. Then a last dim whose shards are multiples of 8.
    Among equals those before the last come first, then the largest, then the first. So
    most kernels are split along the dim that a product contracts. In a reason
    ``unaligned`` says that no dim has such shards: each gather copies once more.

    Attributes:
        axis: The mesh axis.
        min_size: Arrays of fewer elements stay whole: to gather them would cost
            latency and save next to nothing.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> info = ArrayInfo(path="up.kernel", shape=(64, 256))
        >>> FSDPRules(min_size=0).match(info, make_mesh({"fsdp": None}))
        (P('fsdp',), 'fsdp: free dim 0')
    """

    axis: str = "fsdp"
    min_size: int = 1024

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str):  # often the least size, from other libraries
            raise RuleError(
                f"FSDPRules got {self.axis!r} for its axis, the name of a mesh axis. "
                "Other arguments go by keyword: FSDPRules(min_size=2**20)."
            )

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """The spec with the axis on the dim that it chooses; passes without one."""
        if self.axis not in mesh.shape:
            raise UnknownAxisError(
                f"{self} shards over an axis that the mesh lacks."
                f"{suggest(self.axis, mesh.axis_names)} Its axes: "
                f"{list(mesh.axis_names)}."
            )
        dim, reason = self.choose_dim(info, ((),) * len(info.shape), mesh)
        return None if dim is None else (P(*[None] * dim, self.axis), reason)

    def choose_dim(
        self, info: ArrayInfo, taken: DimAxes, mesh: Mesh, along: tuple[str, ...] = ()
    ) -> tuple[int | None, str]:
        """The dim to split and the reason, or ``None`` and the reason against it.

        ``taken`` has the mesh axes that other claims give to each dim; those ``along``
        split the dim too.
        """
        axes = (self.axis, *along)
        size, name = math.prod(mesh.shape[a] for a in axes), "+".join(axes)
        if info.size < self.min_size:
            return None, f"{info.size} elements < min_size {self.min_size}"
        # A scan takes one layer at a time: split over dim 0, it would have to be sent
        # from the device that has it.
        free = [d for d in range(info.is_stacked, len(info.shape)) if not taken[d]]
        # Each size divides a dim of 0 elements, of which there is nothing to split.
        fitting = [d for d in free if info.shape[d] % size == 0 and info.shape[d]]
        if not fitting:
            dims = [info.shape[d] for d in free]
            return None, f"{name}={size} divides no free dim of {dims}"
        dim, is_aligned = cheapest_dim(fitting, info.shape, size)
        return dim, f"{name}: free dim {dim}{'' if is_aligned else ', unaligned'}"


ZeroKind = Literal["params", "gradients", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class ZeroAxis:
    """A mesh axis that splits training state which the computation gathers [1].

    Attributes:
        rules: The axis and how it chooses a dim.
        shard: State that it splits: ``params`` (ZeRO-3: with gradients and optimizer
            state), ``gradients`` (ZeRO-2: with optimizer state) or ``optimizer``
            (ZeRO-1).
        prefetches: True if a `Stack` gathers the first kernel of its next layer ahead.
        along: Axes that split the same dim too, where all divide one. On a mesh these
            are of experts and long sequences, whose devices would hold the same state.

    References:
        [1] Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
        Parameter Models", 2020, section 5, https://arxiv.org/abs/1910.02054
    """

    rules: FSDPRules
    shard: ZeroKind = "params"
    prefetches: bool = False
    along: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that the computation gathers over."""
        return (self.rules.axis, *self.along)


@dataclass(frozen=True, init=False)
class ChainRules:
    """Several rules in order of precedence: the first that answers decides.

    An array that none of them answers for is replicated. A strict `PathRules` raises
    for one that it does not match, so it comes last.

    Example:
        >>> rules = ChainRules(PathRules((r"embedding", P("fsdp"))), FSDPRules())
        >>> len(rules.rules)
        2
    """

    rules: tuple[Rules, ...]

    def __init__(self, *rules: Rules) -> None:
        object.__setattr__(self, "rules", check_rules(rules, "ChainRules"))

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """The first answer."""
        answers = (rule.match(info, mesh) for rule in self.rules)
        return next((answer for answer in answers if answer is not None), None)


def is_rule(x: object) -> bool:
    """True of a rule, but not of its class, which has the same methods."""
    return isinstance(x, Rules) and not isinstance(x, type)


def check_rules(rules: Any, where: str) -> tuple[Rules, ...]:
    """Rules as a tuple, each checked to be one."""
    is_sequence = isinstance(rules, tuple | list)
    wrong = [rule for rule in rules if not is_rule(rule)] if is_sequence else [rules]
    if wrong:
        raise RuleError(
            f"{where} got {wrong[0]!r}, a {type(wrong[0]).__name__}. Its rules are "
            "instances, several in a tuple: of PathRules, PolicyRules, LogicalRules, "
            "FSDPRules, or of a class with a method match(info, mesh)."
        )
    return tuple(rules)


def members(rules: Rules) -> tuple[Rules, ...]:
    """The rules of a chain, nested ones too; a rule by itself is a chain of one."""
    if not isinstance(rules, ChainRules):
        return (rules,)
    return tuple(member for rule in rules.rules for member in members(rule))


def placing_rules(rules: Iterable[Rules], mesh: Mesh) -> list[Rules]:
    """The rules of a strategy that place arrays on a mesh."""

    # `Claims.on` has applied LogicalRules: they change names. An axis of ours that the
    # mesh lacks splits nothing, nor does a rule for it.
    def is_idle(rule: Rules) -> bool:
        return isinstance(rule, FSDPRules) and not axes_on(mesh, rule.axis)

    placing = (rule for rule in rules if not isinstance(rule, LogicalRules))
    return [ChainRules(*(m for m in members(r) if not is_idle(m))) for r in placing]


def warn_idle(rules: Iterable[Rules], reasons: Container[str], hint: str) -> None:
    """Warns of path rules that gave none of the reasons: they decide about no array."""
    paths = [r for rule in rules for r in members(rule) if isinstance(r, PathRules)]
    regexes = [regex for rule in paths for regex, _ in rule.pairs]
    idle = [r for r in regexes if f"path rule {r!r}" not in reasons]
    warn_unmatched("Path rules", idle, hint)


def warn_unmatched(kind: str, regexes: list[str], hint: str) -> None:
    """Warns of the regular expressions among ``kind`` that decide about no array."""
    if regexes:
        warn_user(
            f"{kind} {regexes} match no array, or an earlier rule takes them all. "
            f"{hint}",
            ParallelWarning,
        )


def answer_of(
    rules: Iterable[Rules],
    info: ArrayInfo,
    mesh: Mesh,
    path: str = "",
    *,
    translate: Callable[[P], P] = lambda spec: spec,
) -> tuple[P, str] | None:
    """The one answer of several rules, checked; their order does not matter.

    ``path`` is the path in messages, if not the array's; ``translate`` writes a spec in
    the axes of the mesh.
    """
    asked = (_ask(rule, info, mesh) for rule in rules)
    found = [answer for answer in asked if answer is not None]
    if not found:
        return None
    found = [(translate(spec), reason) for spec, reason in found]
    (first, first_reason), ndim = found[0], len(info.shape)
    for spec, reason in found[1:]:
        # Compared by dims: P('fsdp') and P('fsdp', None) are one answer.
        if dim_axes(spec, ndim) != dim_axes(first, ndim):
            raise PlacementConflictError(
                f"Two rules claim `{info.path}`: {first_reason} says {first}, {reason} "
                f"says {spec}. Keep one, or order them in one PathRules."
            )
    check_spec(path or info.path, info.shape, first, mesh)
    return found[0]


def _ask(rule: Rules, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
    """One rule's answer, which may be a user's function."""
    answer: Any = rule.match(info, mesh)
    # A spec may be a tuple to Python.
    is_pair = type(answer) is tuple and len(answer) == 2
    if answer is None or (is_pair and isinstance(answer[0], P)):
        return answer
    raise RuleError(
        f"{rule} answers {answer!r} for `{info.path}`. A policy returns a "
        "jax.sharding.PartitionSpec, such as P('fsdp', None), or None to pass; match "
        "returns such a spec and the reason for it, or None."
    )


def logical_items(rules: tuple[Rules, ...]) -> list[tuple[str, MeshAxes]]:
    """Every name and its mesh axes that the `LogicalRules` among ``rules`` have."""
    return [item for r in rules if isinstance(r, LogicalRules) for item in r.items]


def hash_code(function: Callable) -> str:
    """A function's name and a short hash of its code, equal for equal code.

    Example:
        >>> hash_code(lambda x: x + 1) == hash_code(lambda x: x + 2)
        False
    """
    inner: Any = function
    # A wrapper's code is the same for all functions that it wraps.
    while isinstance(inner, functools.partial) or hasattr(inner, "__wrapped__"):
        inner = (
            inner.func if isinstance(inner, functools.partial) else inner.__wrapped__
        )
    call = type(inner).__call__  # of an object that can be called
    if not hasattr(inner, "__code__") and hasattr(call, "__code__"):
        inner = call
    name = getattr(inner, "__qualname__", type(inner).__name__)
    if not hasattr(inner, "__code__"):
        return name
    code = repr(_constant(inner.__code__))
    return f"{name} {hashlib.sha256(code.encode()).hexdigest()[:12]}"


def _constant(value: Any) -> Any:
    """Code, or a constant of it, written alike in every process."""
    if isinstance(value, CodeType):
        # Not all of it: file names and line numbers may differ by process.
        return value.co_code.hex(), [*map(_constant, value.co_consts)], value.co_names
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, frozenset):  # their order depends on the process's hash seed
        return "frozenset", sorted(repr(_constant(x)) for x in value)
    return repr(value)
