"""All pairs: few combinations in which every two values of two factors meet."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product

Combination = tuple[object, ...]


def pairs_of(combination: Combination) -> set[tuple]:
    """The pairs of values in one combination, each with its two factors."""
    return set(combinations(enumerate(combination), 2))


def all_pairs(*factors: Sequence) -> list[Combination]:
    """A small choice from the product of the factors that holds every pair.

    Greedy: it always takes the combination with the most pairs not yet met, the first
    of equals.

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
    """The pairs that occur in some combinations."""
    return set().union(*map(pairs_of, chosen))
