from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.drawing.grad_cam import GradCAM, grad_cam
from callbacks.lib.layers import find_layer
from datamodules import UserError
from tests.support.tables import QUIET

NAMES = ["dark", "light"]


class Net(nn.Module):
    """Two maps at half the resolution, their means, and a head: its Grad-CAM can be written down."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 2, 2, stride=2), nn.BatchNorm2d(2))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(2, 2)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
        self.frozen_forward = False

    def forward(self, images: Tensor) -> Tensor:
        maps = self.trunk(images)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen_forward):
            # In place, as networks do behind their blocks.
            return self.head(self.dropout(maps.relu_().mean((2, 3))))


def expected_maps(net: Net, images: Tensor, classes: Tensor) -> Tensor:
    """With means before a linear head, the weight of a map is the head's, but for positions where it is not above 0."""
    maps = F.conv2d(images, net.trunk[0].weight, net.trunk[0].bias, stride=2)
    norm = net.trunk[1]
    maps = F.batch_norm(maps, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
    positive = (maps > 0).float().mean((2, 3))
    weights = net.head.weight[classes] * positive
    cam = torch.einsum("nk,nkhw->nhw", weights, maps).clamp(min=0)
    cam = F.interpolate(cam[:, None], size=images.shape[2:], mode="bilinear", align_corners=False)[:, 0]
    return cam / cam.amax((1, 2), keepdim=True).clamp(min=1e-12)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(1)
    return Net()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 1, 8, 6, generator=torch.Generator().manual_seed(2))


def test_the_map_is_the_one_written_down_for_any_class(net: Net, images: Tensor):
    for classes in (torch.zeros(5, dtype=torch.int64), torch.tensor([0, 1, 1, 0, 1])):
        found = grad_cam(net, net.trunk, images, classes)
        assert found.shape == (5, 8, 6)
        assert torch.allclose(found, expected_maps(net, images, classes), atol=1e-5)
        assert found.amin() == 0
        assert found.amax() == 1
    predicted = net.eval()(images).argmax(1)
    assert torch.equal(grad_cam(net, net.trunk, images), grad_cam(net, net.trunk, images, predicted))


def test_a_class_without_contributions_has_an_empty_map(net: Net):
    with torch.no_grad():
        net.head.weight.fill_(-1)
        net.trunk[1].bias.fill_(9)
    assert grad_cam(net, net.trunk, torch.zeros(2, 1, 4, 4)).eq(0).all()


def state_of(net: Net) -> Any:
    tensors = {name: value.clone() for name, value in net.state_dict().items()}
    flags = [(p.requires_grad, None if p.grad is None else p.grad.clone()) for p in net.parameters()]
    hooks = [len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    return tensors, flags, [m.training for m in net.modules()], hooks, torch.get_rng_state()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize(("context", "frozen"), [(torch.no_grad, True), (torch.inference_mode, False)])
def test_it_leaves_no_trace_and_needs_no_gradients_around_it(net: Net, images: Tensor, context: Any, frozen: bool):
    expected = grad_cam(net, net.trunk, images)
    net.train()
    net(images).sum().backward()
    for parameter in net.trunk.parameters():
        parameter.requires_grad = not frozen
    net.trunk[1].eval()
    before, expected = state_of(net), grad_cam(net, net.trunk, images)
    with context():
        assert torch.equal(grad_cam(net, net.trunk, images + 0), expected)
    assert same(before, state_of(net))
    for parameter in net.parameters():
        parameter.requires_grad = False
    assert torch.equal(grad_cam(net, net.trunk, images), expected)


def test_recurrent_layers_behind_the_maps_run_in_the_mode_in_which_cudnn_has_a_backward_pass(images: Tensor):
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps, self.reader = nn.Conv2d(1, 4, 3), nn.LSTM(4, 2, num_layers=2, dropout=0.5)

        def forward(self, images: Tensor) -> Tensor:
            self.seen = self.reader.training, self.reader.dropout
            return self.reader(self.maps(images).mean(2).permute(2, 0, 1))[0][-1]

    network = Reads().eval()
    found = grad_cam(network, "maps", images)
    assert network.seen == (True, 0)
    assert torch.equal(grad_cam(network.train(), "maps", images), found)
    assert network.reader.dropout == 0.5


def test_an_error_on_the_way_leaves_no_trace_either(net: Net, images: Tensor):
    net.train()
    before = state_of(net)
    with pytest.raises(RuntimeError):
        grad_cam(net, net.trunk, images.repeat(1, 3, 1, 1))
    with pytest.raises(UserError, match=r"needs a layer with maps .* gives \(5, 2\)"):
        grad_cam(net, net.head, images)
    assert same(before, state_of(net))


def test_a_compiled_network_has_a_map(net: Net, images: Tensor):
    expected = grad_cam(net, net.trunk, images)
    compiled = nn.Sequential(torch.compile(net, backend="eager"))
    compiled.eval()(images)
    assert torch.equal(grad_cam(compiled, "trunk", images), expected)


def test_a_network_without_a_map_is_refused_with_the_reason(net: Net, images: Tensor):
    net.frozen_forward = True
    with pytest.raises(UserError, match="Sequential or what follows it runs without gradients; choose another"):
        grad_cam(net, net.trunk, images)
    net.spare = nn.Conv2d(1, 1, 1)
    with pytest.raises(UserError, match="Conv2d or what follows it does not run; choose another"):
        grad_cam(net, net.spare, images)


def test_layers_are_found_by_the_end_of_their_name(net: Net):
    module = nn.ModuleDict({"network": net, "other": nn.ModuleDict({"deep": nn.ModuleDict({"head": nn.Linear(1, 1)})})})
    assert find_layer(module, "trunk.0") is net.trunk[0]
    assert find_layer(module, "network.trunk") is net.trunk
    assert find_layer(module, "head") is net.head, "the outermost"
    with pytest.raises(UserError, match="`layer`: there is no 'trunks' in the module; did you mean 'network.trunk'"):
        find_layer(module, "trunks")
    module["again"] = nn.ModuleDict({"head": nn.Linear(1, 1)})
    with pytest.raises(
        UserError, match="`layer`: 'head' could be 'again.head' or 'network.head' or .*: write one of them in full"
    ):
        find_layer(module, "head")


class Module(pl.LightningModule):
    class_names = NAMES

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        for parameter in net.trunk.parameters():
            parameter.requires_grad = False

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"logits": self(batch[0]) if batch[0].dim() == 4 else batch[0][:, :2]}

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(images: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(images, torch.arange(len(images)) % 2), batch_size=2)


def figures_in(folder: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = []
    for file in folder.rglob("events*"):
        tags += EventAccumulator(str(file)).Reload().Tags()["images"]
    return tags


def test_images_come_at_the_end_of_training_and_of_a_test(net: Net, images: Tensor, tmp_path: Path):
    trainer = pl.Trainer(
        max_epochs=1,
        callbacks=[GradCAM("trunk", samples=3)],
        **QUIET | {"logger": TensorBoardLogger(tmp_path)},
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Module(net)
    trainer.fit(module, loader(images), loader(images))
    assert figures_in(tmp_path) == ["val/grad_cam"]
    grads = [p.grad for p in net.trunk.parameters()]
    trainer.test(module, loader(images), verbose=False)
    assert sorted(figures_in(tmp_path)) == ["test/grad_cam", "val/grad_cam"]
    assert grads == [None] * 4
    trainer.test(module, loader(images.flatten(1)), verbose=False)
