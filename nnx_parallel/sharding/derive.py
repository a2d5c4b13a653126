"""Derives names of dims from a traced loss, not from the spelling of paths.

`DimTrace` finds which dims of parameters are the same dim of the computation. Such a
dim gets the name of hidden units, of heads or of the vocabulary if sharding it needs
only the collectives of Megatron's pattern: products with parameters make the dim,
elementwise operations and attention keep it, and products with other parameters sum
over it. Only one such dim of an array gets a name, because a mesh axis can split only
one dim. It is the dim that splits the most elements of parameters.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from nnx_parallel.programs import TracedFunction
from nnx_parallel.sharding.dims import Dims, DimTrace, Event, follow
from nnx_parallel.sharding.names import ArrayInfo, MeshAxes, dotted

Path = tuple[Hashable, ...]


@dataclass(frozen=True)
class DerivedName:
    """The name of a dim, with its evidence.

    Attributes:
        name: A logical axis; empty if the dim is not recognised.
        evidence: The operations from which the name was derived.
        problem: The reason why the dim must not be split; empty if it can be split.
    """

    name: str
    evidence: str
    problem: str = ""


@dataclass(frozen=True)
class DerivedNames:
    """The result of `derive_names`.

    Attributes:
        names: By path: a name or ``None`` for each dim of the array.
        evidence: By path: the evidence for the array's names, or the reason why no dim
            of the array is split.
        flops: By path: the number of floating-point operations in the forward pass's
            products with the parameter.
    """

    names: dict[Path, tuple[MeshAxes, ...]]
    evidence: dict[Path, str]
    flops: dict[Path, float]


def derive_names(
    traced: TracedFunction,
    paths: Sequence[Path | str | None],
    infos: Mapping[Path, ArrayInfo],
    sizes: Mapping[str, int],
) -> DerivedNames:
    """Derives the names of parameters' dims.

    Args:
        traced: The loss, as a function of parameters, other arrays and a batch.
        paths: For each array in the loss's arguments: the path of a parameter,
            ``"data"`` for an array of the batch, or ``None`` for any other array.
        infos: The parameters by path.
        sizes: By name: the number of devices that split the dims of this name. A
            missing name counts as one device. A dim that the number of devices does not
            divide gets no name.
    """
    trace, dims = follow(traced, paths)
    arrays = {p: d for p, d in zip(paths, dims, strict=True) if isinstance(p, tuple)}
    facts = _Facts(trace, arrays, infos)
    judged = {factor: facts.judge(factor, sizes) for factor in facts.gains}
    chosen = facts.choose({f: n for f, n in judged.items() if n.name})
    names, evidence = {}, {}
    for path in arrays:
        names[path] = facts.names_of(path, judged, chosen)
        evidence[path] = facts.evidence_of(path, judged, chosen)
    flops = defaultdict[Path, float](float)
    for (_, path), count in trace.flops.items():
        flops[path] += count
    return DerivedNames(names, evidence, dict(flops))


class _Facts:
    """The events of a program by factor, after all equal factors are found.

    Attributes:
        gains: By factor: the number of elements of the matrices that it would split.
    """

    def __init__(
        self,
        trace: DimTrace,
        arrays: Mapping[Path, Dims],
        infos: Mapping[Path, ArrayInfo],
    ) -> None:
        self._factors, self._infos = trace.factors, infos
        resolve = trace.factors.resolve
        self._arrays = {p: tuple(map(resolve, dims)) for p, dims in arrays.items()}
        self._events = defaultdict[int, dict[str, list[Event]]](dict)
        self._using = defaultdict[tuple[int, str], set[Path]](set)
        # Sorted, because the order of a set differs between processes.
        for event in sorted(trace.events, key=repr):
            for factor in resolve(event.dim):
                self._events[factor].setdefault(event.kind, []).append(event)
                self._using[factor, event.kind].update(event.paths)
        self._inner, self._twice = set[int](), set[int]()
        self._beside = defaultdict[int, set[int]](set)
        for dims in trace.values:
            outer = [dim[0] for dim in map(resolve, dims) if dim]
            self._inner.update(f for dim in dims for f in resolve(dim)[1:])
            for factor in outer:
                self._beside[factor].update(outer)
                if outer.count(factor) > 1:
                    self._twice.add(factor)
        self.gains = dict[int, int]()
        for path, dims in self._arrays.items():
            info = infos[path]
            is_matrix = len(dims) > 1 + info.is_stacked and info.kind == "Param"
            for dim in dims:
                if dim:
                    gain = info.size if is_matrix else 0
                    self.gains[dim[0]] = self.gains.get(dim[0], 0) + gain

    def _is_routed(self, factor: int) -> bool:
        """True if products are stacked along the factor and a router weights them."""
        if not self._using[factor, "stacked"] or "shared" in self._events[factor]:
            return False
        if "paired" in self._events[factor]:  # the sum of outputs times router weights
            return True
        made = self._using[factor, "made"]
        return any(
            self._rank(path) == 2 and not self._leads(factor, path) for path in made
        )

    def _rank(self, path: Path) -> int:
        return len(self._arrays[path]) - self._infos[path].is_stacked

    def _leads(self, factor: int, path: Path) -> bool:
        return self._arrays[path][0][:1] == (factor,)

    def judge(self, factor: int, sizes: Mapping[str, int]) -> DerivedName:
        """Names a factor, and checks whether Megatron's pattern holds for it."""
        has, size = self._events[factor], self._factors.size((factor,))
        into = "contracted in " + self._listed(factor, "contracted")
        origin = "made by " + self._listed(factor, "made")
        if "residual" in has and has.keys() & {"contracted", "made"}:
            return DerivedName("embed", "", "its dims are the residual stream")
        if "sliced" in has:
            return DerivedName("", "")
        if self._is_routed(factor):
            text = f"experts: {size} stacked products, and a router"
            return DerivedName("expert", text, "it enumerates experts")
        if "shared" in has and "contracted" in has:
            shapes = [event.note for event in has.get("split", ())]
            how = f"reshape {shapes[0]}" if shapes else origin
            name, evidence = "heads", f"attention heads: {how}, {into}"
        elif "contracted" in has and "made" in has:
            name, evidence = "mlp", f"hidden units: {origin}, {into}"
        elif "looked_up" in has or "made" in has:
            parts = [f"looked up in {self._listed(factor, 'looked_up')}", origin]
            kinds = ("looked_up", "made")
            found = [
                text for text, kind in zip(parts, kinds, strict=True) if kind in has
            ]
            name, evidence = "vocab", f"vocabulary: {', '.join(found)}"
        else:
            return DerivedName("", "")
        count = sizes.get(name, 1)
        problem = self._problem(factor, name)
        if not problem and size % count:
            problem = f"{count} devices do not divide its {size} entries"
        return DerivedName(name, evidence, problem)

    def _problem(self, factor: int, name: str) -> str:
        """Returns why splitting a factor needs more than Megatron's sums, or ``""``."""
        has = self._events[factor]
        is_vocab = name == "vocab"
        widths = [event.width for event in has.get("made", ())]
        size = self._factors.size((factor,))
        if "data" in has:
            return "it is a dim of the batch"
        if factor in self._inner:
            return "another factor comes before it in a dim, as in a fused kernel"
        if factor in self._twice:
            return "one array has it twice"
        if "blocked" in has:
            return f"the program rearranges its entries ({has['blocked'][0].note})"
        if "paired" in has:
            return "a product of two activations sums over it"
        if "stacked" in has and name != "heads":
            return "products are stacked along it"
        if ("reduced" in has or "taken" in has) and not is_vocab:
            return "the program sums over it or selects entries, outside of products"
        if is_vocab and widths and size <= max(widths):
            return f"{size} outputs of {max(widths)} inputs are not worth the sums"
        return ""

    def _listed(self, factor: int, kind: str) -> str:
        paths = sorted(map(dotted, self._using[factor, kind]))
        count = len(paths) - 1
        more = f" and {count} other{'s' * (count > 1)}" if count > 0 else ""
        return f"`{paths[0]}`{more}" if paths else "no parameter"

    def choose(self, judged: Mapping[int, DerivedName]) -> set[int]:
        """Chooses factors, the largest gain first, so that no array has two of them."""
        chosen = set[int]()
        for factor in sorted(judged, key=lambda f: (-self.gains[f], f)):
            is_free = chosen.isdisjoint(self._beside[factor])
            if is_free and not judged[factor].problem and self.gains[factor]:
                chosen.add(factor)
        return chosen

    def names_of(
        self, path: Path, judged: Mapping[int, DerivedName], chosen: set[int]
    ) -> tuple[MeshAxes, ...]:
        """Returns a name or ``None`` for each dim of an array."""
        names: list[MeshAxes] = []
        for dim in self._arrays[path]:
            factor = dim[0] if dim else -1
            name = judged[factor].name if factor in judged else ""
            if name == "heads" and self._has_fewer_heads(path, factor):
                name = "kv_heads"
            is_named = factor in chosen or (name == "embed" and len(dim) == 1)
            is_named = is_named or (name == "expert" and self._is_of_experts(path))
            # A name can occur only once in an array.
            names.append(name if is_named and name not in names else None)
        if names and names[0] is None and self._is_sliced(path):
            names[0] = "layers"
        return tuple(names)

    def _is_sliced(self, path: Path) -> bool:
        """True if a loop takes one entry of dim 0 at a time."""
        first = self._arrays[path][0]
        is_sliced = len(first) == 1 and path in self._using[first[0], "sliced"]
        return is_sliced or self._infos[path].is_stacked

    def _has_fewer_heads(self, path: Path, factor: int) -> bool:
        """True for keys and values that are each shared by a group of queries."""

        def width(path: Path) -> int:
            factors = (f for dim in self._arrays[path] for f in dim)
            left = (f for f in factors if path not in self._using[f, "contracted"])
            return self._factors.size(tuple(left))

        made = self._using[factor, "made"]
        if path not in made:
            return False
        most, mine = max(map(width, made)), width(path)
        return mine < most and most % mine == 0

    def _is_of_experts(self, path: Path) -> bool:
        """True for an array of the experts, and False for an array of the router."""
        factors = [f for dim in self._arrays[path] for f in dim]
        in_products = any(path in self._using[f, "made"] for f in factors)
        rank = len(self._arrays[path])
        return rank > 2 or (rank == 2 and not in_products)

    def evidence_of(
        self, path: Path, judged: Mapping[int, DerivedName], chosen: set[int]
    ) -> str:
        """Returns the evidence for an array's names, or why no dim is split."""
        outer = [dim[0] for dim in self._arrays[path] if dim]
        is_expert = "expert" in self.names_of(path, judged, chosen)
        kept = [judged[f] for f in outer]
        found = [judged[f].evidence for f in outer if f in chosen]
        found += [x.evidence for x in kept if is_expert and x.name == "expert"]
        if found:
            return "; ".join(found)
        if not any(path in self._using[f, "contracted"] for f in outer):
            return ""
        # A dim that might have been split comes before a dim of the residual stream.
        kept = sorted(kept, key=lambda x: x.name in ("", "embed"))
        problems = [x.problem for x in kept if x.problem] or ["no dim is recognised"]
        return f"not split: {problems[0]}"
