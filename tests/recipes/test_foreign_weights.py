"""Weights that other programs wrote: read, or rejected for what they are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from datamodules.errors import UserError
from recipes.weights import load_weights, read_weights


def _swin(window: int, classes: int = 3) -> dict[str, Tensor]:
    """The shapes of a network whose position biases depend on its window."""
    biases = torch.zeros((2 * window - 1) ** 2, 3)
    return {"layers.0.table": biases, "layers.0.weight": torch.ones(4, 4), "head.weight": torch.ones(classes, 4)}


class Shaped(nn.Module):
    """A network with tensors of these names and shapes."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in state.items():
            module: nn.Module = self
            *parts, last = name.split(".")
            for part in parts:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.zeros_like(value)))


@pytest.mark.parametrize("classes", [3, 7])
def test_only_the_rows_of_the_head_may_differ(classes: int):
    reason = r"another network: .*layers\.0\.table \(529, 3\) instead of \(169, 3\)"
    with pytest.raises(UserError, match=reason):
        load_weights(Shaped(_swin(7)), _swin(12, classes), "a.pt")
    report = load_weights(Shaped(_swin(7)), _swin(7, classes), "a.pt")
    assert len(report.skipped) == (classes != 3)
    # A further output has the classes of the head.
    further = {"aux.fc.weight": torch.ones(9, 2)}
    report = load_weights(Shaped({"aux.fc.weight": torch.ones(3, 2), **_swin(7)}), {**further, **_swin(7, 9)}, "a.pt")
    assert set(report.skipped) == {"aux.fc.weight", "head.weight"}


@pytest.mark.parametrize("prefix", ["encoder.", "module.encoder_q.", "base_model.model."])
def test_a_prefix_without_which_the_file_fits_is_named(prefix: str):
    state = {f"{prefix}{name}": value for name, value in _swin(7).items()}
    state |= {name.replace("encoder_q", "encoder_k"): value for name, value in state.items()}
    with pytest.raises(UserError, match=f"without the prefix '{prefix}' they fit: save"):
        load_weights(Shaped(_swin(7)), state, "a.pt")


def test_files_of_other_programs_are_read_or_named(tmp_path: Path):
    state = {"fc.weight": torch.ones(2, 2)}
    texts = {"config": "tiny", "class_names": "cat, dog", "hyper_parameters": "{"}
    save_file(state, tmp_path / "a.safetensors", metadata=texts)
    assert torch.equal(read_weights(tmp_path / "a.safetensors")["fc.weight"], state["fc.weight"])
    scores = {"accuracy": np.float64(0.5), "epoch": np.int64(3), "best": np.bool_(True), "loss": np.float32(1)}
    torch.save({"state_dict": state, **scores}, tmp_path / "a.pt")
    assert torch.equal(read_weights(tmp_path / "a.pt")["fc.weight"], state["fc.weight"])
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "b.pt")
    with pytest.raises(UserError, match=r"b\.pt is a TorchScript file, which holds code; pass its weights alone"):
        read_weights(tmp_path / "b.pt")
