"""Labels that are no class end a run with the reason, and those of -100 count for nothing."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from callbacks import GradientAccumulation
from datamodules import RunFailedError, TrainLoader, UserError
from recipes.labels import LabelCheck, mean_cross_entropy
from recipes.scores import ClassificationScores
from tests.support.own_training import TrainedClassifier
from tests.support.ranks import run_ranks
from tests.support.tables import on_ranks, quiet_trainer

CLASSES, IGNORED = 3, -100
GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(24, 1, 4, 4, dtype=torch.float64, generator=GENERATOR)
LABELS = torch.randint(CLASSES, (24,), generator=GENERATOR)
# All of one micro-batch, some of others: the ranks and micro-batches have unequal numbers of labels.
PARTLY = LABELS.clone()
PARTLY[torch.tensor([0, 1, 2, 3, 5, 9, 13, 14, 15])] = IGNORED


class Linear(TrainedClassifier):
    def __init__(self, num_classes: int = CLASSES, **kwargs: Any) -> None:
        torch.manual_seed(1)
        plain = {"optimizer": "sgd", "lr": 0.5, "weight_decay": 0.0, "schedule": "constant"}
        super().__init__(num_classes=num_classes, **plain, **kwargs)
        self.double()

    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, self.hparams.num_classes))


def loader(labels: Tensor, known: bool = True) -> DataLoader:
    """Of tensors, or of a user's own data set: nobody knows its labels before they are loaded."""
    own: Any = list(zip(INPUTS, labels, strict=True))
    return DataLoader(TensorDataset(INPUTS, labels) if known else own, 4)


def with_label(label: int, row: int = 17) -> Tensor:
    labels = LABELS.clone()
    labels[row] = label
    return labels


# Out of range


@pytest.mark.parametrize(
    ("part", "train", "val"), [("training", with_label(11), LABELS), ("validation", LABELS, with_label(11))]
)
def test_a_label_out_of_range_is_rejected_before_the_first_batch(part: str, train: Tensor, val: Tensor):
    run, module = quiet_trainer(), Linear()
    reason = rf"label 11 at row 17 of the {part} set is outside 0\.\.2 .*pass num_classes=12"
    with pytest.raises(UserError, match=reason):
        run.fit(module, loader(train), loader(val))
    assert run.global_step == 0
    for evaluate, name in ((run.validate, "validation"), (run.test, "test")):
        with pytest.raises(UserError, match=f"label 11 at row 17 of the {name} set"):
            evaluate(module, loader(with_label(11)), verbose=False)


def test_a_loader_that_is_made_anew_is_checked_again():
    class Worse(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return loader(with_label(3) if self.trainer.current_epoch else LABELS)  # type: ignore[union-attr]

    run = quiet_trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    with pytest.raises(UserError, match="label 3 at row 17"):
        run.fit(Linear(), Worse())
    assert run.global_step == 6


def test_a_label_of_your_own_data_ends_the_run_with_the_reason():
    wrong = r"label 11 at row 1 of a {} batch is outside 0\.\.2 \(1 of 4 labels are\); pass num_classes=12"
    run = quiet_trainer()
    with pytest.raises(RunFailedError, match=wrong.format("training")):
        run.fit(Linear(), loader(with_label(11), known=False))
    assert run.global_step == 4
    for evaluate, part in ((run.validate, "validation"), (run.test, "test")):
        with pytest.raises(RunFailedError, match=wrong.format(part)):
            evaluate(Linear(), loader(with_label(11), known=False), verbose=False)


class Shifted(Linear):
    """Its labels begin with 1."""

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0], batch[1] - 1


def test_labels_that_a_hook_changes_are_checked_behind_it():
    quiet_trainer().fit(Shifted(), loader(LABELS + 1), loader(LABELS + 1))
    with pytest.raises(RunFailedError, match="label -1 at row 1 of a training batch"):
        quiet_trainer().fit(Shifted(), loader(with_label(0, row=1)))


@pytest.mark.parametrize("every", [1, 50])
def test_batches_without_any_label_end_no_run(every: int):
    labels = torch.full_like(LABELS, IGNORED)
    labels[13] = 1
    run = quiet_trainer(log_every_n_steps=every)
    run.fit(Linear(), loader(labels, known=False))
    assert run.global_step == 6
    assert run.callback_metrics["train/loss"].isfinite()


@pytest.mark.parametrize(
    ("labels", "cure"), [(LABELS.double(), "long"), (LABELS.unsqueeze(1), "squeeze"), (F.one_hot(LABELS), "argmax")]
)
def test_labels_of_another_form_are_rejected_with_the_conversion(labels: Tensor, cure: str):
    reason = rf"expected class numbers 0 to 2.*pass labels\.{cure}\("
    with pytest.raises(UserError, match=reason):
        quiet_trainer().fit(Linear(), loader(labels))
    with pytest.raises(UserError, match=reason):
        quiet_trainer().validate(Linear(), loader(labels, known=False), verbose=False)


def test_probabilities_are_labels_in_training_alone():
    soft = F.one_hot(LABELS, CLASSES).double() * 0.7 + 0.1
    for known in (True, False):
        quiet_trainer().fit(Linear(), loader(soft, known))
        with pytest.raises(UserError, match=r"pass labels\.argmax\(1\)"):
            quiet_trainer().validate(Linear(), loader(soft, known), verbose=False)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are not read in each step."""
    monkeypatch.setattr("recipes.labels.is_on_cpu", lambda _: False)


@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_a_wrong_label_is_ignored_until_a_wait():
    check = LabelCheck(CLASSES, "training")
    check.check_batch(PARTLY)
    check.raise_found()
    for labels in (with_label(11), with_label(-7), LABELS):
        check.check_batch(labels)
    with pytest.raises(RunFailedError, match="label 11 at row 17 of the last training batches is outside"):
        check.raise_found()
    check.raise_found()
    check.check_batch(labels := with_label(11))
    for _ in range(48):
        check.check_batch(labels.fill_(0))
    with pytest.raises(RunFailedError, match="label"):
        check.check_batch(LABELS)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("when", ["a checkpoint", "the epoch's end", "a score"])
def test_what_a_gpu_has_found_ends_the_run_before(when: str, tmp_path: Path):
    module = Linear()
    wrong = loader(with_label(11), known=False)
    with pytest.raises(RunFailedError, match="label"):
        if when == "a score":
            quiet_trainer().validate(module, wrong, verbose=False)
        else:
            saving = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=5)
            more = {"callbacks": [saving], "enable_checkpointing": True} if when == "a checkpoint" else {}
            quiet_trainer(**more).fit(module, wrong)
    assert not list(tmp_path.iterdir())


# Labels of -100


@pytest.mark.parametrize("weight", [None, torch.ones(CLASSES)])
def test_without_a_label_the_mean_loss_is_0(weight: Tensor | None) -> None:
    logits = torch.randn(4, CLASSES)
    loss, count = mean_cross_entropy(logits, torch.full((4,), IGNORED), weight)
    assert (float(loss), count) == (0.0, 0)


def weights_on_ranks(world_size: int, accumulate: int, known: bool) -> Tensor:
    batch = 12 // world_size // accumulate

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            rank = self.trainer.global_rank  # type: ignore[union-attr]
            rows = torch.arange(24)
            ours = TrainLoader(INPUTS, PARTLY, rows, batch, 1, rank, world_size, shuffle=False)
            return ours if known else DataLoader(list(ours), batch_size=None)

    run = quiet_trainer(**on_ranks(world_size), max_epochs=2, callbacks=[GradientAccumulation(accumulate)])
    module = Linear(label_smoothing=0.1)
    run.fit(module, Data())
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("known", [True, False])
def test_an_update_is_the_mean_over_all_labels_that_are_given(known: bool):
    module = Linear(label_smoothing=0.1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9, nesterov=True)
    for start in (0, 12, 0, 12):
        some = slice(start, start + 12)
        given = PARTLY[some] != IGNORED
        optimizer.zero_grad()
        F.cross_entropy(module(INPUTS[some][given]), PARTLY[some][given], label_smoothing=0.1).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in module.parameters()])
    found = [run_ranks(weights_on_ranks, n, n, steps, known)[0] for n, steps in ((1, 1), (1, 3), (2, 3))]
    assert [(weights - expected).abs().max().item() < 1e-12 for weights in found] == [True] * 3


def test_scores_are_those_of_the_samples_with_labels():
    logits = torch.randn(24, 7, generator=torch.Generator().manual_seed(2))
    partly, given = ClassificationScores(7), ClassificationScores(7)
    partly.update(logits, PARTLY)
    given.update(logits[PARTLY != IGNORED], PARTLY[PARTLY != IGNORED])
    (found, matrix), (expected, expected_matrix) = partly.compute(), given.compute()
    assert torch.equal(matrix, expected_matrix)
    assert found == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-6)
    assert torch.equal(found["accuracy"], expected["accuracy"])


def test_a_set_without_any_label_is_rejected():
    none, run = torch.full_like(LABELS, IGNORED), quiet_trainer()
    for act, part, later in (
        (run.fit, "training", "epoch 1 had no target"),
        (run.validate, "validation", "no validation sample has a label"),
    ):
        with pytest.raises(UserError, match=f"all 24 labels of the {part} set are -100"):
            act(Linear(), loader(none))
        with pytest.raises(RunFailedError, match=later):
            act(Linear(), loader(none, known=False))
