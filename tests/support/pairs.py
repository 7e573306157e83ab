"""A small set of rows in which every pair of values of every two factors occurs (pairwise testing).

Most faults of a configuration need two of its settings (Kuhn, Wallace and Gallo, 2004), and all pairs of a dozen
factors fit into some dozens of rows, where all combinations would be millions.
"""

import functools
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["Pair", "Row", "covering_rows", "holds", "pairs_of_factors", "pairs_of_row"]

Row = dict[str, str]
"""A value for each factor."""

Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two factors, in the order of the table, with a value each."""

_CANDIDATES = 20
"""Rows that are built before the one is taken that covers most."""


def holds(row: Mapping[str, str], part: Mapping[str, str]) -> bool:
    """Whether a row has all the values of a part.

    Example:
        >>> holds({"a": "1", "b": "2"}, {"b": "2"})
        True
    """
    return all(row.get(factor) == value for factor, value in part.items())


def pairs_of_row(row: Mapping[str, str]) -> set[Pair]:
    """The pairs that occur in a row, which lists its factors in the order of the table."""
    return set(itertools.combinations(row.items(), 2))


def pairs_of_factors(factors: Mapping[str, Sequence[str]], excluded: Iterable[Mapping[str, str]] = ()) -> list[Pair]:
    """All pairs of values, without those that have all the values of an excluded part."""
    excluded = list(excluded)
    pairs: Iterator[Pair] = (
        ((first, a), (second, b))
        for first, second in itertools.combinations(factors, 2)
        for a in factors[first]
        for b in factors[second]
    )
    return [pair for pair in pairs if not any(holds(dict(pair), part) for part in excluded)]


def covering_rows(factors: Mapping[str, Sequence[str]], excluded: Sequence[Mapping[str, str]] = ()) -> list[Row]:
    """Rows that hold every pair of values and no excluded part; the same rows for the same arguments.

    Greedy: each row starts from a pair that is missing, and each further value is the one that adds most pairs.

    Args:
        factors: the values of each.
        excluded: values that must not occur together.

    Raises:
        ValueError: a pair that is not excluded cannot occur in any row.

    Example:
        >>> rows = covering_rows({"a": "12", "b": "34", "c": "56"}, excluded=[{"a": "1", "b": "3"}])
        >>> len(rows), any(holds(row, {"a": "1", "b": "3"}) for row in rows)
        (5, False)
    """
    choices = random.Random(1)
    missing = dict.fromkeys(pairs_of_factors(factors, excluded))
    rows: list[Row] = []
    while missing:
        first = next(iter(missing))
        candidates = [_complete(dict(first), factors, excluded, missing, choices) for _ in range(_CANDIDATES)]
        found = [row for row in candidates if row is not None]
        if not found:
            raise ValueError(f"{dict(first)} cannot occur in a row: exclude it, too, with its reason")
        best = max(found, key=lambda row: len(pairs_of_row(row) & missing.keys()))
        rows.append(best)
        for pair in pairs_of_row(best):
            missing.pop(pair, None)
    return rows


def _complete(
    row: Row,
    factors: Mapping[str, Sequence[str]],
    excluded: Sequence[Mapping[str, str]],
    missing: Mapping[Pair, None],
    choices: random.Random,
) -> Row | None:
    """A row with these values and one of each other factor; None where every value of a factor is excluded."""
    position = {factor: number for number, factor in enumerate(factors)}

    def gain(factor: str, value: str) -> tuple[int, float]:
        here = (factor, value)
        pairs = ((here, other) if position[factor] < position[other[0]] else (other, here) for other in row.items())
        return sum(pair in missing for pair in pairs), choices.random()

    others = [factor for factor in factors if factor not in row]
    choices.shuffle(others)
    for factor in others:
        allowed = [v for v in factors[factor] if not any(holds(row | {factor: v}, part) for part in excluded)]
        if not allowed:
            return None
        row[factor] = max(allowed, key=functools.partial(gain, factor))
    return {factor: row[factor] for factor in factors}
