"""The score that a checkpoint is saved with is that of its weights, and of equal scores the later is the best."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ExactCheckpoint
from tests.callbacks.test_updates import Line, samples
from tests.support.tables import quiet_trainer

PAIRS = TensorDataset(*samples(8))


class Validated(Line):
    """Logs its loss on each validation loader, by name or with the loader's number."""

    adds_number = True

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        name = "val" if self.adds_number else f"val{dataloader_idx}"
        self.log(name, self.loss(batch), add_dataloader_idx=self.adds_number)


class AtTheEnd(Line):
    """Logs the loss on the second loader as the validation ends."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.last = self.loss(batch)

    def on_validation_epoch_end(self) -> None:
        self.log("val", self.last)


def score(path: str) -> float:
    model = Line()
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    with torch.no_grad():
        return float(F.mse_loss(model.network(PAIRS.tensors[0]), PAIRS.tensors[1]))


KINDS = {
    "one loader": (Validated, True, 1, "val"),
    "the number of the loader": (Validated, True, 2, "val/dataloader_idx_1"),
    "a name of its own": (Validated, False, 2, "val1"),
    "as the validation ends": (AtTheEnd, True, 2, "val"),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_checkpoint_has_the_score_of_its_weights(name: str, tmp_path: Path) -> None:
    kind, adds_number, loaders, monitor = KINDS[name]
    model: Any = kind()
    model.adds_number = adds_number
    checkpoint = ExactCheckpoint(tmp_path, monitor=monitor, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = quiet_trainer(checkpoint, val_check_interval=3, max_epochs=2)
    trainer.fit(model, DataLoader(PAIRS, 1), [DataLoader(PAIRS, 8)] * loaders)
    steps = [Path(path).stem for path in checkpoint.best_k_models]
    assert steps == ["step=3", "step=6", "step=11", "step=14"], "saves that were due since wait for a validation"
    for path, value in checkpoint.best_k_models.items():
        assert score(path) == pytest.approx(value.item(), rel=1e-12)


class Plateau(Line):
    """Reaches its best score twice, or more often."""

    scores = (3.0, 1.0, 2.0, 1.0, 2.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", torch.tensor(self.scores[self.current_epoch]))


def fit(folder: Path, resume: Path | None = None, **options: Any) -> ExactCheckpoint:
    epochs = options.pop("max_epochs", 5)
    checkpoint = ExactCheckpoint(folder, monitor="val", filename="{epoch}", **options)
    trainer = quiet_trainer(checkpoint, max_epochs=epochs)
    trainer.fit(Plateau(), DataLoader(PAIRS, 4), DataLoader(PAIRS, 8), ckpt_path=resume, weights_only=True)
    return checkpoint


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("top", "kept"), [(1, [3]), (2, [1, 3]), (3, [1, 3, 4]), (-1, [0, 1, 2, 3, 4])])
def test_of_equal_scores_the_later_is_the_best(top: int, kept: list[int], mode: str, tmp_path: Path) -> None:
    sign = 1 if mode == "min" else -1
    values: tuple[Tensor | float, ...] = tuple(sign * value for value in (3.0, 1.0, 2.0, 1.0, 2.0))
    before, Plateau.scores = Plateau.scores, values
    try:
        whole = fit(tmp_path / "a", save_top_k=top, mode=mode)
        fit(tmp_path / "b", save_top_k=top, mode=mode, max_epochs=4)
        newest = tmp_path / "b/epoch=3.ckpt"
        resumed = fit(tmp_path / "b", newest, save_top_k=top, mode=mode)
    finally:
        Plateau.scores = before
    for found in (whole, resumed):
        assert Path(found.best_model_path).name == "epoch=3.ckpt"
        assert sorted(Path(path).name for path in found.best_k_models) == [f"epoch={epoch}.ckpt" for epoch in kept]
    states = torch.load(newest, weights_only=True)["callbacks"].values()
    assert [Path(state["best_model_path"]).name for state in states if "best_model_path" in state] == ["epoch=3.ckpt"]
