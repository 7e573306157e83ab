import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.sync_bn import SyncBN, restore_batchnorm, sync_batchnorm
from datamodules.errors import UserError
from tests.support.ranks import run_ranks
from tests.support.tables import equal, quiet_trainer

LAYERS: list[tuple[type, tuple[int, ...], dict[str, Any]]] = [
    (nn.BatchNorm1d, (), {}),
    (nn.BatchNorm1d, (7,), {"momentum": None}),
    (nn.BatchNorm2d, (3, 5), {"affine": False}),
    (nn.BatchNorm2d, (4, 4), {"momentum": 0.3}),
    (nn.BatchNorm3d, (2, 3, 2), {"track_running_stats": False}),
    (nn.BatchNorm3d, (2, 3, 2), {}),
]


def _gap(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item() if ours.numel() else 0.0


def gaps_to_whole_batch(
    layer: nn.Module, x: Tensor, upstream: Tensor, sizes: tuple[int, ...], convert: Callable = sync_batchnorm
) -> dict[str, float]:
    """Two steps of `layer` on the whole batch, and of a synchronized copy on this rank's part of it."""
    plain, ours = copy.deepcopy(layer), copy.deepcopy(layer)
    ours = convert(ours) or ours
    first = sum(sizes[: dist.get_rank()])
    mine = slice(first, first + sizes[dist.get_rank()])
    gaps: dict[str, float] = {}
    for step in range(2):
        whole, part = (t.detach().clone().requires_grad_() for t in (x + step, (x + step)[mine]))
        expected, actual = plain(whole), ours(part)
        expected.backward(upstream)
        actual.backward(upstream[mine])
        gaps[f"output {step}"] = _gap(actual, expected[mine])
        gaps[f"input gradient {step}"] = _gap(part.grad, whole.grad[mine])
    for name, parameter in ours.named_parameters():
        dist.all_reduce(parameter.grad)
        gaps[f"{name} gradient"] = _gap(parameter.grad, plain.get_parameter(name).grad)
    for name, buffer in ours.named_buffers():
        gaps[name] = _gap(buffer, plain.get_buffer(name))
    return gaps


def _all_gaps(table_of_sizes: list[tuple[int, ...]]) -> dict[str, float]:
    dist.init_process_group("gloo")
    gaps = {}
    for sizes in table_of_sizes:
        for cls, space, settings in LAYERS:
            torch.manual_seed(0)
            layer = cls(3, dtype=torch.float64, **settings)
            if settings.get("momentum") == 0.3:
                layer.bias = None  # The constructor of an old torch has no `bias`.
            for parameter in layer.parameters():
                nn.init.normal_(parameter)
            x = 3 * torch.randn(sum(sizes), 3, *space, dtype=torch.float64) + 2
            if len(space) == 2:
                x = x.to(memory_format=torch.channels_last)
            found = gaps_to_whole_batch(layer, x, torch.randn_like(x), sizes)
            gaps |= {f"{cls.__name__} {settings} {sizes} {name}": gap for name, gap in found.items()}
    with torch.autocast("cpu", torch.bfloat16):
        layer, x = nn.BatchNorm2d(3), (torch.randn(sum(sizes), 3, 4, 4) + 1).bfloat16()
        found = gaps_to_whole_batch(layer, x, torch.randn_like(x), sizes)
    # Activations have 8 bits, statistics 24: the running mean would be off by 1e-3 if they were taken in bfloat16.
    assert max(found.values()) < 0.1
    assert found["running_mean"] < 1e-6
    assert found["running_var"] < 1e-6
    return gaps


@pytest.mark.parametrize(
    ("world_size", "table"), [(2, [(8, 8), (11, 5), (15, 1)]), (3, [(5, 1, 0), (4, 0, 0), (3, 4, 5)])]
)
def test_processes_together_equal_one_process_on_the_whole_batch(world_size: int, table: list[tuple[int, ...]]):
    for gaps in run_ranks(_all_gaps, world_size, table):
        worst = max(gaps, key=gaps.__getitem__)
        assert gaps[worst] < 1e-12, worst


class Net(pl.LightningModule):
    """conv -> BN -> frozen BN -> linear, in float64, with a few awkward habits of users' modules."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.fail_at = fail_at

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.BatchNorm2d(3), nn.Flatten())
        self.body[3].running_mean.fill_(0.25)
        self.body[3].eval()
        self.head = nn.Linear(12, 1)
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.fail_at:
            raise ZeroDivisionError("the user's own error")
        self.classes = [type(self.body[1]).__name__, type(self.body[3]).__name__]
        x, y = batch
        return ((self.head(self.body(x)).squeeze(1) - y) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert isinstance(self.body[1], nn.BatchNorm2d)
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader(n: int, batch_size: int, rank: int = 0, world_size: int = 1) -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 1, 3, 3, dtype=torch.float64, generator=generator)
    starts = range(rank * batch_size, n, world_size * batch_size)
    batches = [list(range(start, start + batch_size)) for start in starts]
    return DataLoader(TensorDataset(x, x.mean((1, 2, 3))), batch_sampler=batches)


def _train_with_both() -> str:
    with pytest.raises(UserError) as caught:
        quiet_trainer(SyncBN(), world_size=2, sync_batchnorm=True).fit(Net(), _loader(16, 4))
    return str(caught.value)


def test_lightnings_conversion_beside_it_is_rejected_in_one_line():
    expected = "SyncBN synchronizes BatchNorm itself: leave Trainer(sync_batchnorm=True) out"
    assert all(expected in message for message in run_ranks(_train_with_both, 2))


def _train_with_sync_bn(folder: str) -> dict[str, Any]:
    net = Net()
    trainer = quiet_trainer(SyncBN(), world_size=2, max_epochs=2)
    net.on_train_epoch_end = lambda: trainer.save_checkpoint(Path(folder, "during.ckpt"))
    trainer.fit(net, _loader(16, 4, trainer.global_rank, 2))
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(SyncBN(), world_size=2).fit(failing := Net(fail_at=1), _loader(16, 4))
    return {
        "during": [net.classes, failing.classes],
        "after": [[type(layer) for layer in each.body] for each in (net, failing)],
        "training": [layer.training for layer in net.body],
        "state": {name: tensor.clone() for name, tensor in net.state_dict().items()},
    }


def _both_modes_in_one_loss(world_size: int) -> Tensor:
    """The gradients of two losses that call the layer in evaluation mode, then in training mode."""
    torch.manual_seed(1)
    inputs, layer = 3 * torch.randn(8, 4, dtype=torch.float64) + 1, nn.BatchNorm1d(4, dtype=torch.float64)
    if world_size > 1:
        dist.init_process_group("gloo")
        sync_batchnorm(layer)
        inputs = inputs.chunk(world_size)[dist.get_rank()]
    found = []
    for _ in range(2):
        part = inputs.clone().requires_grad_()
        first = layer.eval()(part)
        (first * layer.train()(part)).pow(2).sum().backward()
        found.append(part.grad)
    return torch.stack(found)


def test_a_layer_in_both_modes_has_the_gradients_of_one_process():
    assert torch.allclose(
        torch.cat(run_ranks(_both_modes_in_one_loss, 2, 2), 1), _both_modes_in_one_loss(1), rtol=1e-10
    )


def _second_derivative(_: int) -> list[str]:
    dist.init_process_group("gloo")
    layer, found = nn.BatchNorm1d(4), []
    sync_batchnorm(layer)
    for scale in (torch.ones(4), torch.ones(4, requires_grad=True)):
        inputs = torch.randn(8, 4, requires_grad=True)
        gradient = torch.autograd.grad((layer(inputs).pow(3) * scale).sum(), inputs, create_graph=True)[0]
        try:
            gradient.pow(2).sum().backward()
        except UserError as error:
            found.append(str(error))
    (gradient,) = torch.autograd.grad(layer(inputs).sum(), inputs, create_graph=True)
    return [*found, str(gradient.requires_grad)]


def test_a_gradient_penalty_is_rejected_in_one_line():
    for *messages, requires_grad in run_ranks(_second_derivative, 2, 0):
        assert len(messages) == 2
        assert all(message.startswith("SyncBN has no second derivative") for message in messages)
        assert requires_grad == "True"


def test_a_run_on_two_ranks_equals_one_process(tmp_path: Path):
    first, second = run_ranks(_train_with_sync_bn, 2, str(tmp_path))
    plain = Net()
    quiet_trainer(SyncBN(), max_epochs=2).fit(plain, _loader(16, 8))
    assert plain.classes == ["BatchNorm2d", "BatchNorm2d"], "nothing changes on one process"
    for name, tensor in plain.state_dict().items():
        assert torch.equal(first["state"][name], second["state"][name]), name
        assert _gap(first["state"][name].double(), tensor.double()) < 1e-12, name
    for result in (first, second):
        assert result["during"] == [["SynchronizedBatchNorm2d"] * 2] * 2, "in a run that fails, too"
        assert result["after"] == [[nn.Conv2d, nn.BatchNorm2d, nn.Tanh, nn.BatchNorm2d, nn.Flatten]] * 2
        assert result["training"] == [True, True, True, False, True]
    assert (first["state"]["body.3.running_mean"] == 0.25).all(), "a frozen layer stays frozen"
    assert torch.load(tmp_path / "during.ckpt", weights_only=True)["state_dict"].keys() == plain.state_dict().keys()


def _single_value() -> str:
    dist.init_process_group("gloo")
    layer = nn.BatchNorm1d(2)
    sync_batchnorm(layer)
    with pytest.raises(ValueError, match="found 1 value per channel") as caught:
        layer(torch.ones(1 - dist.get_rank(), 2))
    # Nobody has a sample: nothing to learn from, nothing to spoil.
    assert layer(torch.ones(0, 2)).shape == (0, 2)
    assert layer.running_var.tolist() == [1.0, 1.0]
    return str(caught.value)


def test_what_cannot_work_is_rejected_alike_on_every_rank():
    first, second = run_ranks(_single_value, 2)
    assert first == second


class _CallsSuper(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class _Inlined(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.batch_norm(input, self.running_mean, self.running_var, training=True)


def _subclass_output() -> Tensor:
    dist.init_process_group("gloo")
    net = nn.Sequential(_CallsSuper(2))
    sync_batchnorm(net)
    output = net(torch.arange(8.0).view(1, 2, 2, 2) + 10 * dist.get_rank())
    restore_batchnorm(net)
    assert type(net[0]) is _CallsSuper
    return output


def test_a_users_subclass_keeps_its_forward_or_is_rejected():
    x = torch.arange(8.0).view(1, 2, 2, 2)
    expected = nn.BatchNorm2d(2)(torch.cat([x, x + 10])).relu()
    torch.testing.assert_close(torch.cat(run_ranks(_subclass_output, 2)), expected)
    with pytest.raises(UserError, match=r"_Inlined.forward normalizes by itself"):
        sync_batchnorm(nn.Sequential(_Inlined(2)))


def _timms_gaps() -> dict[str, float]:
    norm_act = pytest.importorskip("timm.layers.norm_act")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = norm_act.BatchNormAct2d(4, drop_layer=nn.Hardtanh, act_layer="silu").double()
    nn.init.uniform_(layer.weight, 0.5, 2.0)
    x, upstream = torch.randn(2, 7, 4, 3, 3, dtype=torch.float64)
    gaps = gaps_to_whole_batch(layer, x, upstream, (5, 2))
    synchronized = copy.deepcopy(layer)
    sync_batchnorm(synchronized)
    gaps["evaluation"] = _gap(synchronized.eval()(x), layer.eval()(x))
    restore_batchnorm(synchronized)
    assert type(synchronized) is type(layer)
    return gaps


def test_batch_norm_with_an_activation_sees_the_whole_batch():
    pytest.importorskip("timm")
    for gaps in run_ranks(_timms_gaps, 2):
        assert max(gaps.values()) < 1e-12, gaps


def test_copies_of_synchronized_layers_are_plain():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(_CallsSuper(2)))
    sync_batchnorm(net)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(buffer, weights_only=False)):
        assert [type(twin[0]), type(twin[1][0])] == [nn.BatchNorm1d, _CallsSuper]
        assert equal(twin.state_dict(), net.state_dict())
