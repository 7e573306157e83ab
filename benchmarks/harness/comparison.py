"""Compares results with those of an earlier run and lists changes beyond the noise of both."""

from collections.abc import Mapping
from typing import Any

__all__ = ["changes", "differing_machines"]


def differing_machines(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the differences of two machines that make results hard to compare.

    Example:
        >>> differing_machines({"processor": "A", "commit": "1"}, {"processor": "B", "commit": "2"})
        ['processor: A, now B']
    """
    compared_keys = ("processor", "system", "versions", "allocator", "accelerator")
    return [f"{key}: {old.get(key)}, now {new.get(key)}" for key in compared_keys if old.get(key) != new.get(key)]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each figure whose ranges do not overlap. Figures of one round have no range and are left out.

    Args:
        old: the results of an earlier run, as ``--json`` writes them.
        new: the results of this run.

    Example:
        >>> def results(*values):
        ...     figure = {"median": values[1], "min": values[0], "max": values[-1], "rounds": len(values)}
        ...     return {"sections": {"loop": {"rows": {"ours": {"us a step": figure}}}}}
        >>> changes(results(10.0, 11.0, 12.0), results(5.0, 5.5, 6.0))
        ['loop: ours, us a step: 11 -> 5.5 (x 0.50)']
        >>> changes(results(10.0, 11.0, 12.0), results(11.5, 12.0, 13.0))
        []
    """
    lines = []
    for section, section_results in new["sections"].items():
        rows = old["sections"].get(section, {}).get("rows", {})
        for row, figures in section_results["rows"].items():
            for column, figure in figures.items():
                before = rows.get(row, {}).get(column)
                if before is None or figure is None or min(before["rounds"], figure["rounds"]) < 2:
                    continue
                if figure["max"] < before["min"] or figure["min"] > before["max"]:
                    ratio = f" (x {figure['median'] / before['median']:.2f})" if before["median"] else ""
                    lines.append(f"{section}: {row}, {column}: {before['median']:.4g} -> {figure['median']:.4g}{ratio}")
    return lines
