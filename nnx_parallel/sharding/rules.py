"""Rules: small frozen objects that decide where an array lives.

In a strategy, rules decide first, then the names in the model, then FSDP. Two rules of
a strategy that disagree about an array are an error, regardless of their order. For a
pytree (`shard`, `sharded_jit`, `constrain`) `ChainRules` puts several rules in an
order.
"""

import contextlib
import functools
import hashlib
import inspect
import itertools
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
from nnx_parallel.sharding.names import AXIS_NAMES, ArrayInfo, DimAxes, MeshAxes
from nnx_parallel.sharding.placement import cheapest_dim
from nnx_parallel.sharding.specs import axes_on, check_spec, dim_axes


# This is a protocol, so that a user's rule needs only a method and no base class.
@runtime_checkable
class Rules(Protocol):
    """A rule of the user, which gives an array a spec or leaves it to other rules."""

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """Returns the array's spec and the reason, or ``None`` to pass."""
        ...


RULE_REASONS = ("path rule", "policy")
"""The beginnings of the reasons that rules of the user give."""


def check_regex(owner: str, regex: str) -> None:
    """Raises a `RuleError` for a regex that does not compile."""
    try:
        re.compile(regex)
    except (re.error, TypeError) as error:
        raise RuleError(
            f"{owner} got {regex!r} for a regex, which Python's re refuses: {error}. "
            r"It is searched in dotted paths, such as r'mlp\.up\.kernel'; "
            "re.escape(text) makes a regex that matches the text literally."
        ) from None


@dataclass(frozen=True, init=False)
class PathRules:
    """Gives an array the spec of the first regular expression that matches its path.

    Attributes:
        pairs: ``(regex, spec)`` in order; the regex is searched, not anchored.
        strict: What happens to an array that no regex matches. ``True``: it is an error
            if the array is a parameter. ``None``: a warning lists the array if it stays
            replicated because no later rule answers for it. ``False``: no warning.

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
            check_regex("PathRules", pair[0])  # now, not when a model is placed
        object.__setattr__(self, "pairs", tuple(pairs))
        object.__setattr__(self, "strict", strict)

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """Returns the spec of the first regex that is found in the path."""
        for regex, spec in self.pairs:
            if re.search(regex, info.path):
                return spec, f"path rule {regex!r}"  # `warn_idle` looks for this text
        # Statistics, counters and random keys stay replicated without a rule.
        if self.strict and info.is_param:
            raise UnmatchedRuleError(
                f"No path rule matches `{info.path}` with shape {info.shape}. Strict "
                f"rules must match every parameter: {[r for r, _ in self.pairs]}. Add "
                "one, or end with (r'.*', P()) to replicate the rest."
            )
        return None


@dataclass(frozen=True)
class PolicyRules:
    """Gives an array the spec that a function of its `ArrayInfo` returns.

    The function returns ``None`` to leave the array to other rules.

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
        # Processes compare the reprs of their strategies before the first step. The
        # repr of a function has its address, which differs by process.
        return f"PolicyRules({hash_code(self.policy)})"

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """Returns the spec that the function returns."""
        spec = self.policy(info)
        name = getattr(self.policy, "__name__", type(self.policy).__name__)
        return None if spec is None else (spec, f"policy {name!r}")


@dataclass(frozen=True, init=False)
class LogicalRules:
    """Maps logical names in the model to mesh axes, or to ``None`` for replicated dims.

    In a strategy's rules, each entry replaces the strategy's entry for the same name.

    Example:
        >>> LogicalRules({"mlp": None, "model": "tensor"}).mapping["model"]
        'tensor'
    """

    # A dict cannot be hashed, and a strategy's hash includes its rules.
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
        """Returns mesh axes by logical name."""
        return dict(self.items)

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """Returns a spec with the axes of all names that the mapping has."""
        names: tuple[Any, ...] = info.names or ()
        if self.mapping.keys().isdisjoint(names):
            return None
        return P(*map(self.mapping.get, names)), f"names {info.names}"


@dataclass(frozen=True)
class FSDPRules:
    """Splits one free dim over a mesh axis: the dim whose gather copies the least.

    A dim is a candidate if no other claim splits it and the axis divides it. The
    candidates are ranked by the tiles of a TPU:

    1. Dims with shards of whole tiles: a multiple of 128 entries along the last dim,
       of 8 along the second-to-last dim, and any number along the other dims.
    2. The last dim, if its shards are a multiple of 8 entries.
    3. All other dims. The reason then says ``unaligned``: each gather makes one more
       copy.

    Within a rank, the last dim comes after the other dims, a larger dim comes before a
    smaller one, and the first of equal dims wins. Most kernels are therefore split
    along the dim that a product contracts.

    Attributes:
        axis: The mesh axis.
        min_size: Arrays of fewer elements are not split: a gather would cost latency
            and save next to no memory.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> info = ArrayInfo(path="up.kernel", shape=(64, 256))
        >>> FSDPRules(min_size=0).match(info, make_mesh({"fsdp": None}))
        (P('fsdp',), 'fsdp: free dim 0')
    """

    axis: str = "fsdp"
    min_size: int = 1024

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str):  # perhaps a min_size, passed by position
            raise RuleError(
                f"FSDPRules got {self.axis!r} for its axis, the name of a mesh axis. "
                "Pass other arguments by keyword: FSDPRules(min_size=2**20)."
            )

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """Returns a spec with the axis on one dim, or ``None`` if no dim fits."""
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
        """Chooses the dim to split.

        Args:
            info: The array.
            taken: The mesh axes that other claims give to each dim.
            mesh: The mesh.
            along: Further axes that split the same dim.

        Returns:
            The dim and the reason, or ``None`` and the reason why no dim is split.
        """
        axes = (self.axis, *along)
        size, name = math.prod(mesh.shape[a] for a in axes), "+".join(axes)
        if info.size < self.min_size:
            return None, f"{info.size} elements < min_size {self.min_size}"
        # A scan takes one layer at a time. If dim 0 were split, the device that has
        # the layer would have to send it to all others.
        free = [d for d in range(info.is_stacked, len(info.shape)) if not taken[d]]
        # Every size divides a dim of length 0, but there is nothing to split.
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

    It is an entry of `Claims.zero`.

    Attributes:
        rules: The axis, and the choice of the dim that it splits.
        shard: State that the axis splits: ``params`` (ZeRO-3, with gradients and
            optimizer state), ``gradients`` (ZeRO-2, with optimizer state) or
            ``optimizer`` (ZeRO-1).
        prefetches: True if a `Stack` gathers the first kernel of the next layer while
            it computes the present one.
        along: Further axes that split the same dim, if there is a dim that all of them
            divide. They are the axes of experts and of long sequences. Without this,
            devices along these axes would hold the same state. The `Claims` set it.

    Example:
        >>> ZeroAxis(rules=FSDPRules("groups"), shard="optimizer").axes
        ('groups',)

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
        """Returns all axes that the computation gathers over."""
        return (self.rules.axis, *self.along)


@dataclass(frozen=True, init=False)
class ChainRules:
    """Several rules in order of precedence: the first that answers decides.

    An array is replicated if no rule answers for it. A strict `PathRules` raises an
    error for a parameter that it does not match, so put it last.

    Example:
        >>> rules = ChainRules(PathRules((r"embedding", P("fsdp"))), FSDPRules())
        >>> len(rules.rules)
        2
    """

    rules: tuple[Rules, ...]

    def __init__(self, *rules: Rules) -> None:
        object.__setattr__(self, "rules", check_rules(rules, "ChainRules"))

    def match(self, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
        """Returns the answer of the first rule that has one."""
        answers = (rule.match(info, mesh) for rule in self.rules)
        return next((answer for answer in answers if answer is not None), None)


def is_rule(x: object) -> bool:
    """True for a rule; False for a class of rules, which has the same methods."""
    return isinstance(x, Rules) and not isinstance(x, type)


def check_rules(rules: Any, where: str) -> tuple[Rules, ...]:
    """Returns rules as a tuple; raises a `RuleError` for any other object."""
    is_sequence = isinstance(rules, tuple | list)
    wrong = [rule for rule in rules if not is_rule(rule)] if is_sequence else [rules]
    if wrong:
        raise RuleError(
            f"{where} got {wrong[0]!r}, a {type(wrong[0]).__name__}. A rule is an "
            "instance of PathRules, PolicyRules, LogicalRules, FSDPRules, or of a "
            "class with a method match(info, mesh). Give several rules in a tuple."
        )
    return tuple(rules)


def members(rules: Rules) -> tuple[Rules, ...]:
    """Returns the rules in a chain and its nested chains, or the rule itself."""
    if not isinstance(rules, ChainRules):
        return (rules,)
    return tuple(member for rule in rules.rules for member in members(rule))


def placing_rules(rules: Iterable[Rules], mesh: Mesh) -> list[Rules]:
    """Returns the rules of a strategy that place arrays on a mesh."""

    # LogicalRules are left out: `Claims.on` has applied them to the names. FSDPRules
    # are idle if the mesh lacks their axis and the axis is one of ours.
    def is_idle(rule: Rules) -> bool:
        return isinstance(rule, FSDPRules) and not axes_on(mesh, rule.axis)

    placing = (rule for rule in rules if not isinstance(rule, LogicalRules))
    return [ChainRules(*(m for m in members(r) if not is_idle(m))) for r in placing]


def warn_idle(rules: Iterable[Rules], reasons: Container[str], hint: str) -> None:
    """Warns about path rules that are not among the reasons, and so place no array."""
    paths = [r for rule in rules for r in members(rule) if isinstance(r, PathRules)]
    regexes = [regex for rule in paths for regex, _ in rule.pairs]
    idle = [r for r in regexes if f"path rule {r!r}" not in reasons]
    warn_unmatched("Path rules", idle, hint)


def warn_unmatched(kind: str, regexes: list[str], hint: str) -> None:
    """Warns about regular expressions that place no array, if there are any.

    ``kind`` names the owner of the expressions in the message.
    """
    if regexes:
        warn_user(
            f"{kind} {regexes} match no array, or earlier rules place all arrays that "
            f"match. {hint}",
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
    """Returns the checked answer of several rules; their order does not matter.

    Args:
        rules: The rules. Two rules with different answers are an error.
        info: The array.
        mesh: The mesh.
        path: The path in messages; by default the path of the array.
        translate: Translates a spec to the axes of the mesh.

    Returns:
        The spec and the reason, or ``None`` if no rule answers.
    """
    asked = (_ask(rule, info, mesh) for rule in rules)
    found = [answer for answer in asked if answer is not None]
    if not found:
        return None
    found = [(translate(spec), reason) for spec, reason in found]
    (first, first_reason), ndim = found[0], len(info.shape)
    for spec, reason in found[1:]:
        # Dims are compared, because P('fsdp') and P('fsdp', None) mean the same.
        if dim_axes(spec, ndim) != dim_axes(first, ndim):
            raise PlacementConflictError(
                f"Two rules claim `{info.path}`: {first_reason} says {first}, {reason} "
                f"says {spec}. Keep one, or order them in one PathRules."
            )
    check_spec(path or info.path, info.shape, first, mesh)
    return found[0]


def _ask(rule: Rules, info: ArrayInfo, mesh: Mesh) -> tuple[P, str] | None:
    """Asks one rule, and checks the answer: a user may have written the rule."""
    answer: Any = rule.match(info, mesh)
    # The exact type is compared, because a spec may be a subclass of tuple.
    is_pair = type(answer) is tuple and len(answer) == 2
    if answer is None or (is_pair and isinstance(answer[0], P)):
        return answer
    raise RuleError(
        f"{rule} answers {answer!r} for `{info.path}`. A policy returns a "
        "jax.sharding.PartitionSpec, such as P('fsdp', None), or None to pass; match "
        "returns such a spec and the reason for it, or None."
    )


def logical_items(rules: tuple[Rules, ...]) -> list[tuple[str, MeshAxes]]:
    """Returns all names and mesh axes in the `LogicalRules` among ``rules``."""
    return [item for r in rules if isinstance(r, LogicalRules) for item in r.items]


def check_logical_rules(rules: tuple[Rules, ...], known: Iterable[str]) -> None:
    """Refuses, or warns about, `LogicalRules` for names that no dim has.

    Args:
        rules: The rules of a strategy.
        known: The names of the model's dims, and all other names that dims can have.

    Raises:
        UnknownAxisError: If a name is a misspelling of a known one (`_is_misspelt`).
    """
    known = {*known, *AXIS_NAMES, *(n for names in AXIS_NAMES.values() for n in names)}
    for name, axes in logical_items(rules):
        if name in known:
            continue
        rule = f"LogicalRules({{{name!r}: {axes!r}}})"
        text = f"{rule}: no parameter has a dim of this name."
        for word in sorted(known):
            if _is_misspelt(name, word):
                raise UnknownAxisError(f"{text} Did you mean {word!r}?")
        warn_user(
            f"{text} The rule has an effect only where the model's constrain, or a "
            f"spec in its call, gives a dim this name.{suggest(name, known)}",
            ParallelWarning,
        )


def _is_misspelt(name: str, word: str) -> bool:
    """True if one letter inside a word is left out, added, wrong or swapped.

    A difference at an end is not a misspelling: a call may name dims ``head`` or
    ``q_heads``, which the parameters do not have.
    """
    start = _num_equal(name, word)
    ends = [text[start:][::-1] for text in (name, word)]
    end = _num_equal(*ends)
    left, right = (text[end:] for text in ends)
    is_swapped = len(left) == 2 and left == right[::-1]
    return start > 0 and end > 0 and (max(len(left), len(right)) == 1 or is_swapped)


def _num_equal(left: str, right: str) -> int:
    """Returns the number of letters with which both texts begin."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def hash_code(function: Callable) -> str:
    """Returns a function's name and a short hash of its code, equal for equal code.

    Example:
        >>> hash_code(lambda x: x + 1) == hash_code(lambda x: x + 2)
        False
    """
    inner: Any = function
    # The code of a wrapper does not tell which function it wraps.
    while isinstance(inner, functools.partial) or hasattr(inner, "__wrapped__"):
        inner = (
            inner.func if isinstance(inner, functools.partial) else inner.__wrapped__
        )
    call = type(inner).__call__  # the method of a callable object
    if not hasattr(inner, "__code__") and hasattr(call, "__code__"):
        inner = call
    name = getattr(inner, "__qualname__", type(inner).__name__)
    if not hasattr(inner, "__code__"):
        return name
    code = repr(_constant(inner.__code__))
    return f"{name} {hashlib.sha256(code.encode()).hexdigest()[:12]}"


def _constant(value: Any) -> Any:
    """Converts code, or a constant in it, to a value with one repr in all processes."""
    if isinstance(value, CodeType):
        # File names and line numbers are left out, because they may differ by process.
        return value.co_code.hex(), [*map(_constant, value.co_consts)], value.co_names
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, frozenset):  # the order depends on the process's hash seed
        return "frozenset", sorted(repr(_constant(x)) for x in value)
    return repr(value)
