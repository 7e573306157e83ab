"""What became faster or slower since an earlier file of results, beyond the noise of both."""

from collections.abc import Mapping
from typing import Any

__all__ = ["changes", "differing_machines"]


def differing_machines(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What makes two files hard to compare: another processor, system, version, allocator or accelerator.

    Example:
        >>> differing_machines({"processor": "A", "commit": "1"}, {"processor": "B", "commit": "2"})
        ['processor: A, now B']
    """
    told = ("processor", "system", "versions", "allocator", "accelerator")
    return [f"{key}: {old.get(key)}, now {new.get(key)}" for key in told if old.get(key) != new.get(key)]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each figure whose ranges do not overlap; those of one round only have no range, and are left out.

    Args:
        old: the results of an earlier run, as ``--json`` writes them.
        new: those of now.

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
    for section, found in new["sections"].items():
        rows = old["sections"].get(section, {}).get("rows", {})
        for row, figures in found["rows"].items():
            for column, figure in figures.items():
                before = rows.get(row, {}).get(column)
                if before is None or figure is None or min(before["rounds"], figure["rounds"]) < 2:
                    continue
                if figure["max"] < before["min"] or figure["min"] > before["max"]:
                    ratio = f" (x {figure['median'] / before['median']:.2f})" if before["median"] else ""
                    lines.append(f"{section}: {row}, {column}: {before['median']:.4g} -> {figure['median']:.4g}{ratio}")
    return lines
