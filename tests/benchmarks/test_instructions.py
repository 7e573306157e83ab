"""What `benchmarks.instructions` reads of callgrind's files, and what it asks for."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import instructions


def test_the_instructions_of_all_parts_of_a_dump_are_added() -> None:
    parts = ["events: Ir\nsummary: 0\nfn=(1)\n1 70\ntotals: 70\n", "events: Ir\nsummary: 30\ntotals: 30\n"]
    assert instructions.counted(parts) == 100
    assert instructions.counted(["summary: 0\n"]) == 0


def test_a_contender_that_does_not_exist_is_rejected(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        instructions.main(["recepie"])
    assert "no contender 'recepie': expected plain PyTorch loop, recipe" in capsys.readouterr().err


def test_without_callgrind_a_line_says_what_to_install(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        instructions.main(["recipe"])
    assert "apt-get install valgrind" in capsys.readouterr().err
