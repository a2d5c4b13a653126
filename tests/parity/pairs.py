"""Pairwise selection: few combinations that cover all pairs of two factors' values."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product

Combination = tuple[object, ...]


def pairs_of(combination: Combination) -> set[tuple]:
    """The pairs of values in one combination, each pair with its two factors."""
    return set(combinations(enumerate(combination), 2))


def all_pairs(*factors: Sequence) -> list[Combination]:
    """A small subset of the factors' product that contains every pair.

    The choice is greedy: the combination with the most new pairs comes next, and of
    equally good ones the first.

    Example:
        >>> len(all_pairs("abc", "xyz", [1, 4]))
        9
    """
    candidates = list(product(*factors))
    missing = set().union(*map(pairs_of, candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda c: len(pairs_of(c) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen


def pairs_met(chosen: Iterable[Combination]) -> set[tuple]:
    """The pairs that occur in the given combinations."""
    return set().union(*map(pairs_of, chosen))
