import pytest
import torch
import torch.nn.functional as F

from datamodules import UserError
from datamodules.images.labels import check_labels

LABELS = torch.tensor([0, 2, -100, 1, 2, 0])


def test_labels_of_minus_100_are_counted():
    assert check_labels(LABELS, 3, "the training set") == 1
    assert check_labels(LABELS[:0], 3, "the training set") == 0


OUTSIDE = {
    r"label 7 at row 2 of the set is outside 0\.\.2 \(2 of 5 .*; pass num_classes=8 or correct": [0, 1, 7, 4, -100],
    r"label -1 at row 2 of the set is outside 0\.\.2 .*correct the labels; -100 leaves a sample out$": [0, 1, -1],
    r"label -1 at row 0 of the set .*pass num_classes=4 or correct": [-1, 3],
}


def test_a_label_that_is_no_class_is_named_with_its_row():
    for message, labels in OUTSIDE.items():
        with pytest.raises(UserError, match=message):
            check_labels(torch.tensor(labels), 3, "the set")
    with pytest.raises(UserError, match="label 3 at row 40 of the set"):
        check_labels(torch.tensor([0, 3]), 3, "the set", rows=torch.tensor([10, 40]))


OTHERS = {
    r"are float32 of shape \(6,\), expected class numbers 0 to 2, whole .*: pass labels\.long\(\)$": LABELS.float(),
    r"are int64 of shape \(6, 3\).*: pass labels\.argmax\(1\)$": F.one_hot(LABELS.clamp(min=0)),
    r"are float32 of shape \(6, 4\), expected class numbers 0 to 2, whole .* \(6,\)$": torch.zeros(6, 4),
}


@pytest.mark.parametrize("message", OTHERS)
def test_labels_of_another_type_or_shape_name_the_conversion(message: str):
    with pytest.raises(UserError, match=f"^the labels of the set {message}"):
        check_labels(OTHERS[message], 3, "the set")
