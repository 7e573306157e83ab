"""A small set of rows in which every pair of values of every two factors occurs (pairwise testing).

Most faults of a configuration need two of its settings (Kuhn, Wallace and Gallo, 2004), and all pairs of a dozen
factors fit into some dozens of rows, where all combinations would be millions.
"""

import itertools
import random
from collections.abc import Mapping, Sequence

__all__ = ["Row", "covering_rows"]

Row = dict[str, str]
"""A value for each factor."""

_CANDIDATES = 20
"""Rows that are built before the one is taken that covers most."""


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
        >>> len(rows), {(row["a"], row["b"]) for row in rows} == {("1", "4"), ("2", "3"), ("2", "4")}
        (5, True)
    """
    choices = random.Random(1)
    values = [(factor, value) for factor in factors for value in factors[factor]]
    pairs = [frozenset(pair) for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]]

    def allowed(row: Mapping[str, str]) -> bool:
        return not any(all(row.get(factor) == value for factor, value in part.items()) for part in excluded)

    missing = dict.fromkeys(pair for pair in pairs if allowed(dict(pair)))

    def complete(row: Row) -> Row | None:
        others = [factor for factor in factors if factor not in row]
        choices.shuffle(others)
        for factor in others:
            possible = [value for value in factors[factor] if allowed(row | {factor: value})]
            if not possible:
                return None
            gain = {v: sum(frozenset(((factor, v), other)) in missing for other in row.items()) for v in possible}
            row[factor] = max(possible, key=lambda value: (gain[value], choices.random()))
        return {factor: row[factor] for factor in factors}

    rows: list[Row] = []
    while missing:
        first = next(iter(missing))
        found = [row for _ in range(_CANDIDATES) if (row := complete(dict(sorted(first)))) is not None]
        if not found:
            raise ValueError(f"{dict(first)} cannot occur in a row: exclude it, too, with its reason")
        covered = [{frozenset(pair) for pair in itertools.combinations(row.items(), 2)} for row in found]
        best = max(range(len(found)), key=lambda number: len(covered[number] & missing.keys()))
        rows.append(found[best])
        for pair in covered[best]:
            missing.pop(pair, None)
    return rows
