"""What ``python -m benchmarks fine_tuning`` compares does what the table says, and differs in nothing else."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.bare_trainer import suppress_output
from benchmarks.harness.measurements import Options
from benchmarks.sections import fine_tuning
from benchmarks.sections.fine_tuning import (
    EPOCHS,
    FULL,
    HEAD,
    HEAD_CACHED,
    HEAD_EPOCH,
    LAYER4,
    LAYER4_CACHED,
    LAYER4_EPOCH,
    STEPS,
    Clock,
    SameBatch,
    find_photographs,
    fine_tuner,
    fit,
    write_photographs,
)
from datamodules import ImageFolderDataModule
from recipes import ResNetFineTuner

SIZE = 32
LAYERS = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def images(folder: Path) -> ImageFolderDataModule:
    return ImageFolderDataModule(
        data_dir=str(folder), image_size=SIZE, batch_size=4, augment="none", val_fraction=0, num_workers=0
    )


def learn(freeze_until: str, cached: bool, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights before and after two epochs, in float32."""
    torch.manual_seed(1)
    recipe = fine_tuner(freeze_until, SIZE, cached)
    before = {name: tensor.clone() for name, tensor in recipe.network.state_dict().items()}
    with suppress_output():
        fit(recipe, "32-true", max_epochs=2, datamodule=images(folder))
    return before, recipe.network.state_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photographs")
    write_photographs(root, 10, (40, 30))
    return root


@pytest.mark.parametrize("freeze_until", ["layer4", "fc"])
def test_cached_features_teach_what_the_images_teach(freeze_until: str, folder: Path) -> None:
    """Else a difference in time could be one of work."""
    before, without = learn(freeze_until, False, folder)
    start, cached = learn(freeze_until, True, folder)
    moved = float((without["fc.weight"] - before["fc.weight"]).abs().max())
    assert moved > 1e-4
    for name in without:
        assert torch.equal(start[name], before[name])
        torch.testing.assert_close(cached[name], without[name], rtol=0, atol=moved / 10, msg=name)


@pytest.mark.parametrize(("name", "trains"), [(FULL, LAYERS), (LAYER4, LAYERS[-2:]), (HEAD, LAYERS[-1:])])
def test_a_step_trains_the_layers_that_its_row_names(name: str, trains: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    recipe = fine_tuner(STEPS[name], SIZE)
    before = {key: tensor.clone() for key, tensor in recipe.network.state_dict().items()}
    with suppress_output():
        clock = fit(recipe, "32-true", train_dataloaders=SameBatch(4, SIZE, 2))
    moved = {
        key.split(".")[0] for key, tensor in recipe.network.state_dict().items() if not torch.equal(tensor, before[key])
    }
    assert moved == set(trains)
    assert len(clock.step_ends) == 2


def test_the_features_are_computed_before_the_first_epoch_is_timed(folder: Path) -> None:
    epochs_begun: list[bool] = []

    class Watched(ImageFolderDataModule):
        def numbered_batches(self, *args: Any) -> Any:
            clock = next(callback for callback in self.trainer.callbacks if isinstance(callback, Clock))  # type: ignore
            epochs_begun.append(clock._start > 0)
            return super().numbered_batches(*args)

    data = Watched(data_dir=str(folder), image_size=SIZE, batch_size=4, augment="none", val_fraction=0, num_workers=0)
    with suppress_output():
        clock = fit(fine_tuner("fc", SIZE, cache_features=True), "32-true", max_epochs=3, datamodule=data)
    assert epochs_begun == [False]
    assert len(clock.epochs) == 3


def test_an_epoch_leaves_out_the_first_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fake_fit(recipe: Any, precision: Any, max_epochs: int, datamodule: Any) -> Clock:
        asked.append(max_epochs)
        clock = Clock()
        clock.epochs = [100.0, 3.0, 1.0, 2.0][:max_epochs]
        return clock

    monkeypatch.setattr(fine_tuning, "fit", fake_fit)
    assert fine_tuning.epoch_seconds("fc", True, 3, "32-true", folder, 4, SIZE) == 2.0
    assert asked == [4]


def test_photographs_are_found_in_their_own_folder_or_above_it_and_nothing_else_is_taken(tmp_path: Path) -> None:
    (tmp_path / "train" / "cats").mkdir(parents=True)
    assert find_photographs(str(tmp_path)) is None
    write_photographs(tmp_path / "hymenoptera", 2, (8, 8))
    assert find_photographs(str(tmp_path)) == tmp_path / "hymenoptera"
    assert find_photographs(str(tmp_path / "hymenoptera")) == tmp_path / "hymenoptera"


def test_a_quick_run_compares_each_row_with_its_own_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {
        FULL: 6.0,
        LAYER4: 2.0,
        HEAD: 1.0,
        LAYER4_EPOCH: 8.0,
        LAYER4_CACHED: 4.0,
        HEAD_EPOCH: 5.1,
        HEAD_CACHED: 0.1,
    }
    assert list(seconds) == [*STEPS, *EPOCHS]
    monkeypatch.setattr(
        fine_tuning, "contenders", lambda *_: {name: (lambda value=value: value) for name, value in seconds.items()}
    )
    section = fine_tuning.run(Options(quick=True, repeats=1, threads=1))
    faster = {name: row[1] and round(row[1].median, 6) for name, row in section.rows.items()}
    assert faster == {
        FULL: None, LAYER4: 3.0, HEAD: 6.0, LAYER4_EPOCH: None, LAYER4_CACHED: 2.0, HEAD_EPOCH: None, HEAD_CACHED: 51.0
    }  # fmt: skip
    assert [goal.met for goal in section.goals] == [True, True]
    assert "SYNTHETIC" in section.header["data"]
    assert "12 images" in section.header["data"]


def test_ctrl_c_reaches_the_harness_and_the_next_one_is_heard() -> None:
    """Lightning exits the program instead, and ignores further interrupts."""

    class Interrupting(ResNetFineTuner):
        # Later on, Lightning puts the handler back itself.
        def setup(self, stage: str) -> None:
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with suppress_output(), pytest.raises(KeyboardInterrupt):
        fit(Interrupting(num_classes=2, weights="none"), "32-true", train_dataloaders=SameBatch(4, SIZE, 2))
    assert signal.getsignal(signal.SIGINT) == handler
