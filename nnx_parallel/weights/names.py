"""Tables of names, which map arrays of a model to arrays in files and back.

An entry is ``(our path, their name, pattern)``, such as
``("blocks.layer.mlp.up.kernel", "layers.{}.up.weight", "mlp embed -> embed mlp")``.
"Our" arrays are in the model, and "their" arrays are in the files.

- ``{}`` in their name is the number of a layer. The first dim of our array enumerates
  layers. A second ``{}`` is the number of an expert; the next dim enumerates experts.
- ``{3:}`` in place of ``{}`` means that our array has the numbers from 3 on, and
  ``{1::2}`` means the numbers 1, 3, 5 and so on, as in a slice of Python. So layers of
  two kinds can follow each other or alternate in the files.
- ``{}`` in our path is a number in a list of layers. Then the first ``{}`` in their
  name is the same number: ``("layers.{}.kernel", "h.{}.weight", "o i -> i o")``.
- The pattern, in the notation of einops, rearranges their array to ours. It names every
  dim of our array, except the dims of layers and experts.
- ``part 1 of 3: `` before the pattern means that their array holds three of our arrays,
  along the first dim of the pattern's result. Ours is number 1, counted from 0.
- ``rows 0:32 of 48: `` before the pattern means that ours is a slice of their array.
  The dim ``rows`` of the pattern has 48 entries in their array, and the first 32 are
  ours. So an array in files may hold parts of unequal sizes, such as the kernels of
  queries, keys and values:
  ``heads 0:32 of 48: (heads size) embed -> embed heads size``.
- If one of our dims joins several of their dims, as in
  ``embed c p q -> (p q c) embed``, the sizes of their dims follow the pattern:
  ``, p=16 q=16 c=3``. A ``1`` is a dim of their array that our array does not have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from einops import rearrange
from flax import nnx

from nnx_parallel.errors import WeightsError, suggest
from nnx_parallel.layers.experts.moe import RouterBias
from nnx_parallel.weights.files import Tensor

Entry = tuple[str, str, str]

WEIGHTS = (nnx.Param, nnx.BatchStat, RouterBias)
"""Types of Variables in files: parameters, statistics of norms, biases of routers."""

_PART = re.compile(
    r"(?:part (\d+) of (\d+): *|(\w+) (\d+):(\d+) of (\d+): *)?"
    r"(.*?) *-> *([^,]*)(?:, *(.+))?"
)
DIM = re.compile(r"\([^)]*\)|\w+")
"""A dim on one side of a pattern, or several dims that are joined."""
_NUMBER = re.compile(r"\{(?:(\d+):(?::(\d+))?)?\}")
"""A placeholder in a name: ``{}``, ``{start:}`` or ``{start::step}``."""


@dataclass(frozen=True)
class Span:
    """A slice of a dim of their array, which is our array.

    Attributes:
        dim: Name of the dim in the pattern.
        first: Index of the first entry of ours.
        last: Index after the last entry of ours.
        size: Size of the dim in their array.
    """

    dim: str
    first: int
    last: int
    size: int


@dataclass(frozen=True)
class Rule:
    """A parsed entry.

    Attributes:
        ours: Dotted path of our array.
        theirs: Name of their array, which may contain ``{}`` or ``{1::2}``.
        left: Dims of their array, in the notation of einops.
        right: Dims of our array, without the dims of layers and experts. If their array
            has parts, the dim of parts is included.
        part: Number of the part of their array that is our array, from 0.
        num_parts: Number of parts of their array; 0 if their array holds only our
            array.
        given: Names and sizes of dims of their array that one of our dims joins.
        span: The slice of their array that is our array; ``None`` if it is not a
            slice.
    """

    ours: str
    theirs: str
    left: str
    right: str
    part: int = 0
    num_parts: int = 0
    given: tuple[tuple[str, int], ...] = ()
    span: Span | None = None

    @classmethod
    def of(cls, entry: Entry) -> Rule:
        """Parses an entry.

        Raises:
            WeightsError: If the entry does not have the form that this module's
                docstring describes.
        """
        match entry:
            case (str(ours), str(theirs), str(pattern)):
                pass
            case _:
                raise WeightsError(
                    f"The entry {entry!r} of a table of names is invalid. It must be "
                    "three strings: our path, their name, and an einops pattern."
                )
        found = _PART.fullmatch(pattern)
        if found is None:
            raise WeightsError(
                f"The pattern of `{ours}` is {pattern!r}. It must be an einops "
                "pattern, 'their dims -> our dims'. It begins with 'part 1 of 3: ' "
                "for a part of their array, and with 'rows 0:32 of 48: ' for a slice "
                "of the dim rows."
            )
        part, count, dim, *ends, left, right, given = found.groups()
        sizes = tuple((n, int(x)) for n, x in re.findall(r"(\w+)=(\d+)", given or ""))
        rule = cls(ours, theirs, left, right, int(part or 0), int(count or 0), sizes)
        return replace(rule, span=Span(dim, *map(int, ends))) if dim else rule

    @property
    def num_stacked(self) -> int:
        """Number of leading dims of our array that enumerate layers and experts."""
        return len(_NUMBER.findall(self.theirs))

    def names(self, shape: Sequence[int]) -> dict[tuple[int, ...], str]:
        """Returns the names of their arrays that make up our array of this shape.

        The keys are indices along the dims of layers and experts.
        """
        indices = np.ndindex(*shape[: self.num_stacked])
        return {index: name_at(self.theirs, index) for index in indices}

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Returns the size of each dim in the pattern, from the shape of our array.

        Raises:
            WeightsError: If the dims of the pattern do not match the shape.
        """
        dims, given = DIM.findall(self.right), dict(self.given)
        ours = [self.num_parts] if self.num_parts else []
        ours += shape[self.num_stacked :]
        for dim, size in zip(dims, ours, strict=False):
            names = re.findall(r"\w+", dim)
            if dim != names[0] and math.prod(given.get(n, 0) for n in names) != size:
                raise WeightsError(
                    f"Dim {dim} of `{self.ours}` has size {size}, but its pattern "
                    f"gives {given or 'no sizes'}. After the pattern, write "
                    "', name=size' for each dim that is joined."
                )
        if len(dims) != len(ours):
            raise WeightsError(
                f"`{self.ours}` has shape {tuple(shape)}, but its pattern makes dims "
                f"({self.right})" + _after(self.num_stacked)
            )
        single = {n: x for n, x in zip(dims, ours, strict=True) if n.isidentifier()}
        return single | given

    def to_ours(self, theirs: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Returns our array at one index of layers and experts.

        The array is a view unless the pattern joins dims.
        """
        if self.span is None:
            view = rearrange(theirs, f"{self.left} -> {self.right}", **sizes)
            return view[self.part] if self.num_parts else view
        dims = " ".join(self.dims)
        whole = rearrange(theirs, f"{self.left} -> {dims}", **self._whole(sizes))
        before = (slice(None),) * self.dims.index(self.span.dim)
        ours = whole[(*before, slice(self.span.first, self.span.last))]
        return rearrange(ours, f"{dims} -> {self.right}")

    def shape_of_theirs(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of their array."""
        sizes = self._whole(sizes)
        of_each = [re.findall(r"\w+", group) for group in DIM.findall(self.left)]
        return tuple(math.prod(sizes.get(n, 1) for n in names) for names in of_each)

    @property
    def dims(self) -> list[str]:
        """Dims of their array, without the joins of the pattern."""
        return re.findall(r"[A-Za-z_]\w*", self.left)

    def _whole(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of dims in their array, given the sizes in our array."""
        return {**sizes, **({self.span.dim: self.span.size} if self.span else {})}


def join_parts(
    rules: Sequence[Rule],
    ours: Sequence[np.ndarray],
    sizes: Sequence[Mapping[str, int]],
) -> np.ndarray:
    """Returns their array at one index of layers and experts.

    Args:
        rules: The rules that share their array, as `groups_of` yields them.
        ours: Our array of each rule, at this index.
        sizes: Sizes of the dims in the pattern of each rule (`Rule.sizes`).
    """
    first = rules[0]
    if first.span is None:
        joined = np.stack(ours) if first.num_parts else ours[0]
        return rearrange(joined, f"{first.right} -> {first.left}", **sizes[0])
    dims = " ".join(first.dims)
    spans = [
        rearrange(x, f"{rule.right} -> {dims}", **own)
        for rule, x, own in zip(rules, ours, sizes, strict=True)
    ]
    joined = np.concatenate(spans, axis=first.dims.index(first.span.dim))
    return rearrange(joined, f"{dims} -> {first.left}")


def _after(num_stacked: int) -> str:
    return ("", " after the dim of layers", " after the dims of layers and experts")[
        min(num_stacked, 2)
    ] + "."


def numbered_rules(entries: Sequence[Entry], paths: Collection[str]) -> list[Rule]:
    """Parses entries; an entry with ``{}`` in our path gives a rule for each path."""
    rules = []
    for rule in map(Rule.of, entries):
        pattern = re.escape(rule.ours).replace(r"\{\}", r"(\d+)")
        found = [re.fullmatch(pattern, path) for path in paths if "{}" in rule.ours]
        fitting = [
            replace(rule, ours=match[0], theirs=with_numbers(rule.theirs, match))
            for match in found
            if match
        ]
        rules += fitting or [rule]
    return rules


def own_names(shapes: Mapping[str, Sequence[int]]) -> list[Entry]:
    """Returns the table for files with our names and dims, from the shapes by path."""
    dims = {
        path: " ".join(f"d{i}" for i in range(len(x))) for path, x in shapes.items()
    }
    return [(path, path, f"{each} -> {each}") for path, each in dims.items()]


def name_at(name: str, index: Sequence[int]) -> str:
    """Returns the name in files that belongs to these indices of layers and experts."""
    indices = iter(index)

    def number(match: re.Match[str]) -> str:
        start, step = match.groups(default="")
        return str(int(start or 0) + int(step or 1) * next(indices))

    return _NUMBER.sub(number, name)


def find_numbers(name: str, found: str) -> re.Match[str] | None:
    """Matches a name in a file with a name that has placeholders.

    Returns:
        The match, with a group for each number, or ``None`` if the names differ or if
        a number does not belong to our array.
    """
    escaped = _NUMBER.sub("{}", name).split("{}")
    match = re.fullmatch(r"(\d+)".join(map(re.escape, escaped)), found)
    ranges = [(int(a or 0), int(b or 1)) for a, b in _NUMBER.findall(name)]
    numbers = map(int, match.groups()) if match else ()
    is_in = all(
        n >= a and (n - a) % b == 0 for n, (a, b) in zip(numbers, ranges, strict=False)
    )
    return match if is_in else None


def with_numbers(name: str, match: re.Match[str]) -> str:
    """Replaces each ``{}`` of a name by the next number that a regex has found."""
    for number in match.groups():
        name = name.replace("{}", number, 1)
    return name


def rules_of(entries: Sequence[Entry], shapes: Mapping[str, Any]) -> dict[str, Rule]:
    """Returns the rule of each array of a model, by its path.

    Raises:
        WeightsError: If an array has no entry, if an entry has no array, or if a
            pattern does not match its array.
    """
    read = numbered_rules(entries, shapes)
    rules = {rule.ours: rule for rule in read}
    for group in groups_of(read):
        _check_parts(group)
    if missing := sorted(shapes.keys() - rules.keys()):
        raise WeightsError(
            f"The table of names has no entry for `{missing[0]}`"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''} of the model."
            f"{suggest(missing[0], rules)}"
        )
    if unused := sorted(rules.keys() - shapes.keys()):
        raise WeightsError(
            f"The table of names has `{unused[0]}`, which the model does not have."
            f"{suggest(unused[0], shapes)}"
        )
    for path, rule in rules.items():
        sizes = rule.sizes(shapes[path])
        if sorted(rule.dims) != sorted(sizes):
            raise WeightsError(
                f"The pattern of `{path}` has dims ({rule.left}) on its left and "
                f"({rule.right}) on its right. Both sides must have the same dims."
            )
        if (span := rule.span) and sizes.get(span.dim) != span.last - span.first:
            raise WeightsError(
                f"The pattern of `{path}` takes the entries {span.first}:{span.last} "
                f"of {span.dim}, but the array, of shape {tuple(shapes[path])}, has "
                f"{sizes.get(span.dim, 'no')} entries of {span.dim} by its pattern."
            )
    return rules


def _check_parts(group: Sequence[Rule]) -> None:
    """Checks that the rules for one array in files cover the array exactly once.

    Raises:
        WeightsError: If an element of the array belongs to no rule, or to several.
    """
    first, ours = group[0], ", ".join(f"`{rule.ours}`" for rule in group)
    if first.span is None:
        parts = [rule.part for rule in group if rule.span is None]
        if parts != list(range(max(first.num_parts, 1))):
            raise WeightsError(
                f"{first.theirs!r} has the parts {parts}, for {ours}. An array in "
                "files must hold only one of our arrays, or each part from 0 on "
                "exactly once."
            )
        return
    spans = [rule.span for rule in group if rule.span]
    kinds = {
        (rule.left, rule.span and (rule.span.dim, rule.span.size)) for rule in group
    }
    starts = [*(span.first for span in spans), first.span.size]
    if len(kinds) > 1 or starts != [0, *(span.last for span in spans)]:
        found = ", ".join(f"{span.first}:{span.last} of {span.size}" for span in spans)
        raise WeightsError(
            f"{first.theirs!r} is cut along {first.span.dim} into {found}, for {ours}. "
            "The slices must follow each other from 0 to the size, and the left sides "
            "of the patterns must be equal."
        )


def check_numbers(
    rules: Mapping[str, Rule], shapes: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Checks that the files have an array for each layer and expert of a model.

    Raises:
        WeightsError: If arrays are missing. The check comes before names are made for
            all arrays, because a config may have any number of layers.
    """
    for path, rule in rules.items():
        count = math.prod(shapes[path][: rule.num_stacked])
        if count > len(tensors):
            raise WeightsError(
                f"`{path}` of shape {tuple(shapes[path])} needs {count:,} arrays in "
                f"the files, but the files have only {len(tensors):,} arrays. Config "
                "and files disagree."
            )


def check_tensors(
    rules: Mapping[str, Rule],
    shapes: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    ignored: str | None,
) -> None:
    """Checks that names and shapes in the files match the model.

    Raises:
        WeightsError: If an array is missing or has another shape, or if an array in the
            files is not used and does not match the regex ``ignored``.
    """
    used: set[str] = set()
    for path, rule in rules.items():
        sizes = rule.sizes(shapes[path])
        expected = rule.shape_of_theirs(sizes)
        for name in rule.names(shapes[path]).values():
            used.add(name)
            if name not in tensors:
                raise WeightsError(
                    f"The files have no array {name!r}, which is needed for `{path}`."
                    f"{suggest(name, tensors)}"
                )
            if (found := tensors[name].shape) != expected:
                raise WeightsError(
                    f"{name!r} has shape {found} in the files; for `{path}` of shape "
                    f"{tuple(shapes[path])} it must be {expected}. Config and files "
                    "disagree."
                )
    unused = sorted(tensors.keys() - used)
    unused = [n for n in unused if ignored is None or not re.search(ignored, n)]
    if unused:
        raise WeightsError(
            f"The files have {unused[0]!r}"
            f"{f' and {len(unused) - 1} more' if unused[1:] else ''}, which the model "
            "does not use. Add an entry to the table, or pass a regex as ignored=."
        )


def rename_tensors(
    tensors: Mapping[str, Tensor], entries: Sequence[Entry], prefix: str
) -> tuple[dict[str, Tensor], str]:
    """Returns arrays by the names in a table, and the start of their names in files.

    transformers gives the same array other names if the folder was written by a base
    class, without a head, or if the language model is a part of another model.

    Args:
        tensors: Arrays by their names in files.
        entries: The table, with the names that the class with a head writes.
        prefix: Start of the names in the table, except the names of the head.

    Returns:
        The arrays, and the start. Names with another start stay as they are. If the
        files lack the first array of the table, nothing changes and the start is empty.

    Raises:
        WeightsError: If the files have arrays of two language models.
    """
    table = [theirs for _, theirs, _ in entries if theirs.startswith(prefix)]
    first = name_at(table[0].removeprefix(prefix), (0, 0)) if table else ""
    # A key is a start of names that files may have. Its value is the start in a file
    # that the class with a head writes.
    starts = {
        "": "",
        prefix: prefix,
        "model.language_model.": "model.language_model.",
        "language_model.": "language_model.",
        f"language_model.{prefix}": "language_model.",
    }
    found = [start for start in starts if first and start + first in tensors]
    if not found:
        return dict(tensors), ""
    start, parts = found[0], {n.removeprefix(prefix).partition(".")[0] for n in table}
    outer = "language_model." if starts[start] == "language_model." else ""

    def rename(name: str) -> str:
        inner = name.removeprefix(start)
        is_inner = name.startswith(start) and inner.partition(".")[0] in parts
        return prefix + inner if is_inner else name.removeprefix(outer)

    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    if found[1:] or len(renamed) < len(tensors):
        names = ", ".join(repr(start + first) for start in found)
        raise WeightsError(
            "The files have the same array of a language model under two names, so it "
            f"is not clear which to read. They have {names}."
        )
    return renamed, starts[start]


def groups_of(rules: Iterable[Rule]) -> Iterator[list[Rule]]:
    """Yields groups of rules that share an array in files, sorted by part."""
    groups: dict[str, list[Rule]] = {}
    for rule in rules:
        groups.setdefault(rule.theirs, []).append(rule)
    for rules_of_one in groups.values():
        yield sorted(
            rules_of_one, key=lambda rule: rule.span.first if rule.span else rule.part
        )
