"""A checkpoint from somebody else cannot name files for its callback to delete, nor scores that end the run."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from tests.support.tables import quiet_trainer


class Falling(pl.LightningModule):
    """Its score falls with every epoch, so that each epoch's checkpoint is the best and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.weight - batch[0]).square().mean()
        self.log("score", -float(self.current_epoch))
        self.log("val/score", -float(self.current_epoch))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, epochs: int, resume: Path | None = None, **options: Any) -> ExactCheckpoint:
    given = {"filename": "{epoch}", "monitor": "score", "save_top_k": 1, "save_last": True} | options
    checkpoint = ExactCheckpoint(folder, save_on_train_epoch_end=True, **given)
    trainer = quiet_trainer(checkpoint, max_epochs=epochs, plugins=[VerifiedCheckpointIO()])
    trainer.fit(Falling(), DataLoader(TensorDataset(torch.ones(4)), 2), ckpt_path=resume, weights_only=True)
    return checkpoint


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def received(folder: Path, **state: Any) -> Path:
    """A run of two epochs whose last.ckpt says what somebody else has written into it."""
    fit(folder, 2)
    path = folder / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    (key,) = [key for key in checkpoint["callbacks"] if key.startswith("ExactCheckpoint")]
    checkpoint["callbacks"][key] |= state
    torch.save(checkpoint, path)
    return path


def claim(path: str, dirpath: str) -> dict[str, Any]:
    score = torch.tensor(9.0)
    paths = dict.fromkeys(("best_model_path", "kth_best_model_path", "last_model_path"), path)
    return {"dirpath": dirpath, "best_k_models": {path: score}, "best_model_score": score, "kth_value": score, **paths}


def test_only_checkpoints_in_the_folder_are_removed(tmp_path: Path) -> None:
    home, outside = tmp_path / "checkpoints", tmp_path / "outside"
    outside.mkdir()
    victims = [outside / "thesis.tex", outside / "model.ckpt"]
    for victim in victims:
        victim.write_text("precious")
    real = str(home.resolve())
    claims = [
        claim(f"/q/{'../' * 30}{str(victims[0]).lstrip('/')}", "/q"),
        claim(str(victims[0]), str(outside)),
        claim(str(victims[1]), "/"),
        claim(f"{real}/../outside/model.ckpt", real),
        claim(f"{real}/notes.txt", real),
        claim(f"{real}/other/model.ckpt", real),
        claim(f"{real}/link.ckpt", real),
        claim(f"{real}/linked/model.ckpt", real),
    ]
    for said in claims:
        path = received(home, **said)
        (home / "notes.txt").write_text("precious")
        (home / "other").mkdir(exist_ok=True)
        (home / "other" / "model.ckpt").write_text("another model's")
        if not (home / "linked").exists():
            (home / "link.ckpt").symlink_to(victims[1])
            (home / "linked").symlink_to(outside)
        before = set(files(home)) | set(files(outside))
        checkpoint = fit(home, 4, path)
        assert before <= set(files(home)) | set(files(outside)), said
        assert [victim.read_text() for victim in victims] == ["precious"] * 2
        assert all(Path(kept).parent == home.resolve() for kept in checkpoint.best_k_models)


def test_a_moved_run_still_replaces_its_own_checkpoints(tmp_path: Path) -> None:
    fit(tmp_path / "old", 2)
    (tmp_path / "old").rename(tmp_path / "new")
    assert files(tmp_path / "new") == ["epoch=1.ckpt", "last.ckpt"]
    checkpoint = fit(tmp_path / "new", 4, tmp_path / "new" / "last.ckpt")
    assert files(tmp_path / "new") == ["epoch=3.ckpt", "last.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "new" / "epoch=3.ckpt")


def test_checkpoints_named_by_metrics_with_slashes_are_found(tmp_path: Path) -> None:
    options = {"filename": "{epoch}-{val/score}", "monitor": "val/score", "save_top_k": 2}
    fit(tmp_path, 3, **options)
    kept = files(tmp_path)
    checkpoint = fit(tmp_path, 4, tmp_path / "last.ckpt", **options)
    assert len(checkpoint.best_k_models) == 2
    assert checkpoint.best_model_path.endswith("val/score=-3.0.ckpt")
    assert len(files(tmp_path)) == len(kept) == 3


@pytest.mark.parametrize("score", ["high", torch.tensor(float("nan"))], ids=["text", "nan"])
def test_a_score_that_is_no_number_is_forgotten(score: Any, tmp_path: Path) -> None:
    name = f"{tmp_path.resolve()}/epoch=0.ckpt"
    said = claim(name, str(tmp_path.resolve())) | {"best_k_models": {name: score}, "best_model_score": score}
    checkpoint = fit(tmp_path, 4, received(tmp_path, **said))
    assert checkpoint.best_model_path == str(tmp_path.resolve() / "epoch=3.ckpt")
    assert float(checkpoint.best_model_score) == -3.0
