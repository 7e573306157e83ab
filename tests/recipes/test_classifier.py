import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from datamodules import DataContract, UserError
from datamodules.loading.sampling import evaluation_spans
from recipes.evaluation_tables import Headline
from recipes.inputs import in_dtype_of
from recipes.labels import mean_cross_entropy
from recipes.prediction import prediction_table
from recipes.scores import ClassificationScores, macro_f1
from recipes.weights import load_initial_weights
from tests.support.own_training import TrainedClassifier
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

CLASSES = 7
LOGITS = 2 * torch.randn(300, CLASSES, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(CLASSES - 1, (300,), generator=torch.Generator().manual_seed(2))
LOGITS[torch.arange(300), TARGETS] += 1.5
# Neither a sample nor a prediction has the last class.
LOGITS[:, CLASSES - 1] = -1e3


def scores_of(logits: Tensor, targets: Tensor, batch_size: int = 64) -> tuple[dict[str, Tensor], Tensor]:
    scores = ClassificationScores(logits.shape[1])
    for part in zip(logits.split(batch_size), targets.split(batch_size)):
        scores.update(*part)
    return scores.compute()


def test_scores_are_those_of_scikit_learn():
    from sklearn.metrics import confusion_matrix, f1_score, top_k_accuracy_score

    values, matrix = scores_of(LOGITS, TARGETS)
    predicted, labels = LOGITS.argmax(1), list(range(CLASSES))
    assert matrix.tolist() == confusion_matrix(TARGETS, predicted, labels=labels).tolist()
    # scikit-learn leaves out what is in neither, too, and both work in float64.
    assert values["macro_f1"].item() == pytest.approx(f1_score(TARGETS, predicted, average="macro"), rel=1e-14)
    top5 = top_k_accuracy_score(TARGETS, LOGITS, k=5, labels=labels)
    assert values["top5_accuracy"].item() == pytest.approx(top5)
    assert values["accuracy"] < values["top5_accuracy"] < 1


def test_an_empty_batch_has_scores():
    scores = ClassificationScores(CLASSES)
    scores.update(LOGITS[:0], TARGETS[:0])
    values, matrix = scores.compute()
    assert all(value == 0 for value in values.values())
    assert matrix.sum() == 0


def test_a_diverged_network_has_scores():
    values, matrix = scores_of(torch.full_like(LOGITS, torch.nan), TARGETS)
    assert matrix.sum() == len(TARGETS)
    assert values["accuracy"] < 0.5
    assert macro_f1(torch.zeros(3, 3, dtype=torch.int64)) == 0


def test_many_classes_are_not_logged_one_by_one():
    assert "accuracy_class_24" in scores_of(torch.randn(9, 25), torch.arange(9))[0]
    few = {"accuracy", "loss", "macro_f1", "top5_accuracy"}
    assert scores_of(torch.randn(9, 26), torch.arange(9))[0].keys() == few
    assert "top5_accuracy" not in scores_of(torch.randn(9, 5), torch.arange(9) % 5)[0]


def _scores_on_rank(world_size: int) -> dict[str, Any]:
    rank = 0
    if world_size > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    scores = ClassificationScores(CLASSES)
    for start, stop in evaluation_spans(300, 32, rank, world_size):
        scores.update(LOGITS[start:stop], TARGETS[start:stop])
    values, matrix = scores.compute()
    return {name: value.item() for name, value in values.items()} | {"matrix": matrix.tolist()}


def test_three_ranks_agree_with_one_to_the_last_digit():
    (one,), three = run_ranks(_scores_on_rank, 1, 1), run_ranks(_scores_on_rank, 3, 3)
    for found in three:
        assert found == one


class Small(TrainedClassifier):
    """A linear network over images of 8 x 8."""

    def __init__(self, num_classes: int | None = 3, **kwargs: Any) -> None:
        super().__init__(num_classes=num_classes, **kwargs)

    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.hparams.num_classes))


class Data(pl.LightningDataModule, DataContract):
    """Random images of named classes; soft labels in training on request."""

    def __init__(self, names: tuple[str, ...] = ("ant", "bee", "wasp"), soft: bool = False) -> None:
        super().__init__()
        self.names = names
        self.soft = soft

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def num_classes(self) -> int:
        return len(self.names)

    def _loader(self, soft: bool = False) -> DataLoader:
        classes, labels = len(self.class_names), torch.arange(12) % len(self.class_names)
        targets = F.one_hot(labels, classes).float() * 0.8 + 0.2 / classes if soft else labels
        return DataLoader(TensorDataset(self._images(), targets), batch_size=5)

    def _images(self) -> Tensor:
        return torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(1))

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.soft)

    def val_dataloader(self) -> DataLoader:
        return self._loader()

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self._images(), torch.arange(12)), batch_size=5)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    fit = quiet_trainer()
    fit.fit(Small(), Data())
    fit.save_checkpoint(tmp_path / "small.ckpt")
    return tmp_path / "small.ckpt"


def test_soft_labels_train_while_hard_labels_are_scored():
    module, data = Small(label_smoothing=0.1), Data(soft=True)
    inputs, soft = next(iter(data.train_dataloader()))
    step = module.training_step((inputs, soft), 0)
    expected = -(0.9 * soft + 0.1 / 3).mul(module(inputs).log_softmax(1)).sum(1).mean()
    assert step["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert step["count"] == 5
    fit = quiet_trainer(precision="bf16-mixed")
    fit.fit(module, data)
    assert {"val/accuracy", "val/macro_f1", "val/accuracy_class_2"} <= set(fit.callback_metrics)


def test_a_prediction_names_the_likeliest_classes_in_order(checkpoint: Path):
    module = Small.load_from_checkpoint(checkpoint, top_k=2, weights_only=True)
    outputs = quiet_trainer().predict(module, Data(names=("never looked at",)))
    rows = module.prediction_rows(outputs, [f"{i}.png" for i in range(12)])
    probabilities = torch.cat([batch["probabilities"] for batch in outputs])
    assert [row["file"] for row in rows] == [f"{i}.png" for i in range(12)]
    for row, expected in zip(rows, probabilities, strict=True):
        first, second, _ = expected.argsort(descending=True).tolist()
        names = ("ant", "bee", "wasp")
        assert list(row) == ["file", "class", "probability", "class_2", "probability_2", "note"]
        assert (row["class"], row["class_2"]) == (names[first], names[second])
        assert (row["probability"], row["probability_2"]) == (expected[first].item(), expected[second].item())
    every = Small.load_from_checkpoint(checkpoint, weights_only=True).prediction_rows(outputs, list("abcdefghijkl"))
    assert list(every[0])[-2] == "probability_3", "five were asked for, there are three"
    one = Small.load_from_checkpoint(checkpoint, top_k=1, weights_only=True).prediction_rows(outputs, ["x"] * 12)
    assert list(one[0]) == ["file", "class", "probability", "note"]


def test_the_printed_table_has_the_likeliest_class():
    image = {"file": "a.png", "class": "cat", "probability": 0.5}
    shown = {"file": "a.png", "class": "cat", "probability": "0.5000"}
    assert prediction_table([image | {"class_2": "dog", "probability_2": 0.25}]) == [shown]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft", [False, True])
def test_the_weighted_loss_is_the_sum_of_its_definition(smoothing: float, soft: bool):
    weight = torch.rand(CLASSES, generator=torch.Generator().manual_seed(3))
    logits = LOGITS.clamp(min=-9)
    targets = logits.roll(1, 0).softmax(1) if soft else torch.where(TARGETS == 2, -100, TARGETS)
    shares = targets if soft else F.one_hot(targets.clamp(min=0), CLASSES) * (targets >= 0)[:, None]
    smooth = shares.double() * (1 - smoothing) + smoothing / CLASSES * (shares.sum(1, keepdim=True) > 0)
    expected = -(weight.double() * smooth * logits.double().log_softmax(1)).sum()
    loss, count = mean_cross_entropy(logits, targets, weight, smoothing)
    assert count == (len(targets) if soft else int((targets >= 0).sum()))
    assert (loss * count).item() == pytest.approx(expected.item(), rel=1e-5)
    assert mean_cross_entropy(logits.bfloat16(), targets, weight, smoothing)[0].dtype == torch.float32
    assert mean_cross_entropy(logits, torch.full_like(TARGETS, -100), weight) == (0, 0)


def test_the_headline_is_of_the_test_where_there_is_one():
    scores = {f"{part}/{name}": 0.5 for part in ("val", "test") for name in ("accuracy", "macro_f1", "loss")}
    names = {"val accuracy": "val/accuracy", "test accuracy": "test/accuracy", "test macro-F1": "test/macro_f1"}
    assert Small().headline(scores) == [Headline(title, name, "50.00 %") for title, name in names.items()]
    of_validation = Small().headline({"val/accuracy": 1.0, "val/macro_f1": 0.1})
    assert [row.title for row in of_validation] == ["val accuracy", "val macro-F1"]


def test_the_number_of_classes_comes_from_the_data():
    assert Small.settings_from_data(Data()) == {"num_classes": 3}
    assert Small.settings_from_data(pl.LightningDataModule()) == {}
    with pytest.raises(UserError, match="neither given nor found in the data; pass one such as num_classes=10"):
        Small(num_classes=None)
    with pytest.raises(UserError, match="top_k=0: expected a whole number, 1 or more"):
        Small(top_k=0)


def test_data_with_another_number_of_classes_is_rejected(checkpoint: Path):
    message = r"the data has 2 classes \(ant, bee\), the network 3; pass num_classes=2"
    with pytest.raises(UserError, match=message):
        quiet_trainer().fit(Small(), Data(("ant", "bee")))
    with pytest.raises(UserError, match=message):
        quiet_trainer().test(Small(), Data(("ant", "bee")), ckpt_path=checkpoint, weights_only=True, verbose=False)


def test_data_with_other_class_names_is_rejected(checkpoint: Path):
    message = "order of the classes differs: class 1 is 'bee' in the checkpoint and 'wasp' in the data; rename"
    loaded, data = Small.load_from_checkpoint(checkpoint, weights_only=True), Data(("ant", "wasp", "bee"))
    with pytest.raises(UserError, match=message):
        quiet_trainer().test(loaded, data, verbose=False)
    with pytest.raises(UserError, match=message):
        quiet_trainer().fit(Small(), data, ckpt_path=checkpoint, weights_only=True)
    quiet_trainer().test(Small(), Data(), ckpt_path=checkpoint, weights_only=True, verbose=False)
    quiet_trainer(max_epochs=2).fit(Small(), Data(), ckpt_path=checkpoint, weights_only=True)


class Deep(Small):
    """Two layers with biases, so that there is more to load than a head."""

    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, self.hparams.num_classes))


class TwoHeads(Deep):
    """The layer before the last has a row for each class, too."""

    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, self.hparams.num_classes))


def _begun(recipe: type[Small], trains: bool, data: Data, **settings: Any) -> Small:
    """A recipe that begins a training, or an evaluation, with the weights of a file."""
    warm = recipe(**settings)
    if trains:
        quiet_trainer(max_steps=0).fit(warm, data)
    else:
        load_initial_weights(warm, exact=True)
        quiet_trainer().test(warm, data, verbose=False)
    return warm


@pytest.mark.parametrize("form", ["checkpoint", "lines", "json"])
@pytest.mark.parametrize("trains", [True, False])
def test_a_head_is_loaded_by_the_names_of_its_classes(trains: bool, form: str, tmp_path: Path):
    torch.manual_seed(1)
    source = Deep()
    options = {"weights": str(tmp_path / "a.pt"), "weights_classes": str(tmp_path / "classes")}
    names = ["wasp", "ant", "bee"]
    if form == "checkpoint":
        torch.save({"state_dict": source.network.state_dict(), "class_names": names}, tmp_path / "a.pt")
        del options["weights_classes"]
    else:
        torch.save(source.network.state_dict(), tmp_path / "a.pt")
        (tmp_path / "classes").write_text("\n".join(names) + "\n" if form == "lines" else json.dumps(names))
    warm = _begun(Deep, trains, Data(), **options)
    images = torch.randn(4, 1, 8, 8)
    assert torch.equal(warm.network(images), source.network(images)[:, [1, 2, 0]])
    assert list(warm.class_names) == ["ant", "bee", "wasp"]
    again = _begun(Deep, trains, Data(("wasp", "ant", "bee")), **options)
    assert torch.equal(again.network(images), source.network(images))


def test_a_head_without_class_names_is_loaded_on_request_only(tmp_path: Path, caplog: Any):
    torch.manual_seed(1)
    source = Deep()
    torch.save(source.network.state_dict(), tmp_path / "a.pt")
    weights = {"weights": str(tmp_path / "a.pt")}
    message = "does not name the classes of its last layer; pass weights_classes='FILE' with their names in its order"
    with caplog.at_level("WARNING", "lightning_recipes"):
        new = _begun(Deep, True, Data(), **weights).network.state_dict()
    (note,) = (record.getMessage() for record in caplog.records if message in record.getMessage())
    assert note.startswith("note: 3 begins with new weights")
    assert "of the data's (the data has ant, bee, wasp)" in note
    state = source.network.state_dict()
    assert [name for name in state if not torch.equal(state[name], new[name])] == ["3.weight", "3.bias"]
    with pytest.raises(UserError, match=message):
        _begun(Deep, False, Data(), **weights)
    with pytest.raises(UserError, match=message):
        torch.save(Small().network.state_dict(), tmp_path / "head.pt")
        _begun(Small, True, Data(), weights=str(tmp_path / "head.pt"))
    for trains in (True, False):
        loaded = _begun(Deep, trains, Data(), weights_classes="data", **weights).network.state_dict()
        assert all(torch.equal(state[name], loaded[name]) for name in state)
    # Data without names have numbers for classes, and so has the head.
    unnamed = Data(())
    loader = Data().train_dataloader()
    unnamed.train_dataloader = unnamed.val_dataloader = lambda: loader
    loaded = _begun(Deep, True, unnamed, **weights).network.state_dict()
    assert all(torch.equal(state[name], loaded[name]) for name in state)


def test_names_that_do_not_fit_are_an_error(tmp_path: Path):
    state = TwoHeads().network.state_dict()
    torch.save({"state_dict": state, "class_names": ["bee", "ant", "wasp"]}, tmp_path / "a.pt")
    options = {"weights": str(tmp_path / "a.pt"), "weights_classes": str(tmp_path / "classes")}
    file = tmp_path / "classes"
    for text, message in (
        ("ant\nbee\nwasp", "has other classes than .*a.pt, which names its own: bee, ant, wasp; leave"),
        ("ant\nbee\nant", "has the class 'ant' 2 times"),
        ("[1, 2]", "holds no class names; write one a line, or a JSON list of texts"),
        ("[ant]", "begins as a JSON list, and is none"),
        ("", "holds no class names"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            _begun(TwoHeads, True, Data(), **options)
    torch.save(state, tmp_path / "a.pt")
    file.write_text("ant\nbee")
    with pytest.raises(UserError, match="has 2 classes, and the network 3"):
        _begun(TwoHeads, True, Data(), **options)
    # Which rows are classes is not clear, so that none is moved.
    file.write_text("bee\nant\nwasp")
    message = (
        "order of the classes differs: class 0 is 'bee' in the checkpoint and 'ant' in the data; .* weights_skip='3'"
    )
    with pytest.raises(UserError, match=message):
        _begun(TwoHeads, True, Data(), **options)
    with pytest.raises(UserError, match="names the classes in a file of weights; pass weights='FILE'"):
        Small(weights_classes="data")


@pytest.mark.parametrize(("inputs", "targets"), [(torch.float64, torch.int32), (torch.uint8, torch.int16)])
@pytest.mark.parametrize("in_memory", [True, False])
def test_images_of_other_types_train_as_float32(inputs, targets, in_memory):
    def trained(*types: torch.dtype) -> tuple[list[Tensor], dict[str, float]]:
        images, labels = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 1, 8, 8), torch.arange(8) % 2
        images, labels = images.to(types[0]), labels.to(types[1])
        data = TensorDataset(images, labels) if in_memory else list(zip(images, labels, strict=True))
        torch.manual_seed(1)
        module = Small(num_classes=2, lr=0.01)
        fit = quiet_trainer(max_epochs=2)
        fit.fit(module, DataLoader(data, 4), DataLoader(data, 4))  # type: ignore[arg-type]
        scores = {name: float(value) for name, value in fit.callback_metrics.items() if name.startswith("val/")}
        predicted = fit.predict(module, DataLoader(data, 4))  # type: ignore[arg-type]
        return [batch["probabilities"] for batch in predicted], scores  # type: ignore[index, union-attr]

    (found, scores), (expected, right) = trained(inputs, targets), trained(torch.float32, torch.int64)
    assert all(map(torch.equal, found, expected))
    assert scores == right
    assert right["val/loss"] > 0


def test_tokens_stay_whole_numbers():
    assert in_dtype_of(nn.Linear(2, 2), torch.arange(6).view(2, 3)).dtype == torch.int64
    assert in_dtype_of(nn.Linear(2, 2).double(), torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64
