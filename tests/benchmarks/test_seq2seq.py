import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.contenders.classic_seq2seq import ClassicTranslator, PresentTranslator
from benchmarks.harness.bare_trainer import suppress_output
from benchmarks.harness.measurements import Options
from benchmarks.sections.seq2seq import CLASSIC, RANDOM, SORTED, find_pairs, make_data, run, tutorial_bleu
from datamodules.translation.data_module import TranslationDataModule


@pytest.fixture
def _threads_put_back() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _tiny() -> TranslationDataModule:
    data = make_data(None, test_fraction=0.01)
    data.rows["train"] = data.rows["train"][:96]
    return data


@pytest.mark.parametrize(("kind", "repeats", "lr"), [(ClassicTranslator, 80, 0.1), (PresentTranslator, 800, 0.01)])
def test_a_tutorials_network_learns_what_it_is_trained_on(kind: type, repeats: int, lr: float) -> None:
    torch.manual_seed(0)
    with suppress_output():
        data = _tiny()
    pairs, rows = data.encoded_pairs, data.rows["train"][:2]
    translator = kind(len(data.source_vocabulary), len(data.target_vocabulary), hidden=32)
    for optimizer in translator.optimizers:
        # Higher than the tutorial's, for a few steps.
        optimizer.param_groups[0]["lr"] = lr
    wanted = [pairs.target[row][1:-1] for row in rows.tolist()]
    assert translator.translate(pairs, rows) != wanted
    translator.train_on(pairs, rows.repeat(repeats))
    assert translator.translate(pairs, rows) == wanted


def test_bleu_after_training_is_that_of_the_held_out_part() -> None:
    with suppress_output():
        data = _tiny()

    class Oracle:
        """Knows the held-out translations, and nothing before it has been trained."""

        trained = 0

        def train_on(self, pairs, rows) -> None:
            assert not set(rows.tolist()) & set(data.rows["test"].tolist())
            self.trained += 1

        def translate(self, pairs, rows) -> list[list[int]]:
            assert self.trained == 3
            return [pairs.target[row][1:-1] for row in rows.tolist()]

    assert tutorial_bleu(Oracle(), data, epochs=3, limit=5) == pytest.approx(100)


def test_the_tutorials_file_is_found_in_the_folder_or_beside_others(tmp_path: Path) -> None:
    assert find_pairs(str(tmp_path)) is None
    (tmp_path / "eng-fra").mkdir()
    (tmp_path / "eng-fra" / "eng-fra.txt.zip").touch()
    assert find_pairs(str(tmp_path)) == find_pairs(str(tmp_path / "eng-fra"))


@pytest.mark.slow
@pytest.mark.usefixtures("_threads_put_back")
def test_the_quick_section_has_every_figure(tmp_path: Path) -> None:
    told: list[str] = []
    section = run(Options(quick=True, data_dir=str(tmp_path)), lambda *progress: told.append(progress[0]))
    assert "bundled artificial" in section.header["data"]
    assert CLASSIC in section.rows
    for spreads in section.rows.values():
        assert spreads[0] is not None
        assert spreads[0].median > 0
        assert all(math.isfinite(value) for spread in spreads if spread for value in spread.values)
    sorted_padding, random_padding = section.rows[SORTED][3], section.rows[RANDOM][3]
    assert sorted_padding is not None
    assert random_padding is not None
    assert sorted_padding.median < random_padding.median / 3
    assert len(section.goals) == 2
    assert len(told) == 8 * 2 + 4  # Contenders in two rounds, then trainings.
