"""What `benchmarks.before_after` compares, and what it leaves out."""

from pathlib import Path

from benchmarks import before_after

ROOT = Path(__file__).parents[2]


def test_only_a_changed_text_or_hash_is_a_difference() -> None:
    outputs = [
        f"resuming from runs/mnist/2026-11-{day}_10-00-00/last.ckpt, 2.{day} s\nerror: {word}"
        for day, word in ((28, "lr"), (29, "lr"), (29, "--lr"))
    ]
    earlier, same, other = (
        {"runs": {"one": "a" * 64}, "commands": {"go": (2, before_after._plain(output))}} for output in outputs
    )
    assert before_after.differences(earlier, same) == []
    changed = before_after.differences(earlier, other | {"runs": {"one": "b" * 64, "new": "c" * 64}})
    assert changed == [
        "one: aaaaaaaaaaaa before, bbbbbbbbbbbb now",
        "$ go    (2 before, 2 now)",
        "    -error: lr",
        "    +error: --lr",
    ]


def test_the_page_says_how_many_commands_there_are() -> None:
    number = f"{len(before_after.COMMANDS)} commands"
    assert number in (ROOT / "benchmarks/README.md").read_text()
    assert number in str(before_after.__doc__)
    assert len(set(before_after.COMMANDS)) == len(before_after.COMMANDS)
