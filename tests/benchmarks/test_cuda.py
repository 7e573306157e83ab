"""What the CUDA section does that needs no GPU: its ways to train, its count of operations, and its refusal."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from benchmarks.__main__ import main
from benchmarks.sections.cuda import Way, flops_of_step, seconds_a_step, ways


class Watched(nn.Module):
    """Notes what reaches the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.seen: list[tuple[bool, bool, torch.dtype]] = []

    def forward(self, images: Tensor) -> Tensor:
        maps = self.convolution(images)
        last = torch.channels_last
        weights = self.convolution.weight.is_contiguous(memory_format=last)
        self.seen.append((images.is_contiguous(memory_format=last), weights, maps.dtype))
        return self.head(maps.mean((2, 3)))


@pytest.mark.parametrize("name", [name for name in ways() if "compiled" not in name])
def test_each_way_trains_as_its_name_says(name: str) -> None:
    made: list[Watched] = []

    def build() -> nn.Module:
        made.append(Watched())
        return made[-1]

    way = ways()[name]
    batch = torch.randn(4, 3, 8, 8), torch.arange(4) % 2
    assert seconds_a_step(way, build, batch, steps=3) > 0
    seen = made[0].seen
    assert len(seen) == 5  # Two that do not count.
    dtype = torch.bfloat16 if way.bf16 else torch.float32
    assert set(seen) == {(way.channels_last, way.channels_last, dtype)}
    torch.manual_seed(1)
    assert not torch.equal(made[0].head.weight, Watched().head.weight)


def test_ways_add_one_thing_each() -> None:
    found = list(ways().values())
    assert found[0] == Way()
    for before, after in pairwise(found):
        changed = [name for name in vars(after) if vars(after)[name] != vars(before)[name]]
        assert len(changed) == 1
        assert after == replace(before, **{changed[0]: True})


def test_operations_are_those_of_the_formula() -> None:
    # A product of (1, 8) by (8, 4): 2 x 8 x 4 forward, as many for the weights' gradients, none for the inputs'.
    assert flops_of_step(nn.Linear(8, 4, bias=False), torch.ones(1, 8)) == 2 * 2 * 8 * 4
    # Each of 6 x 6 outputs sums 3 x 3 x 3 products in each of 4 channels.
    assert flops_of_step(nn.Conv2d(3, 4, 3, bias=False), torch.ones(1, 3, 8, 8)) == 2 * 2 * 36 * 27 * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cuda", "--quick"])
    assert ended.value.code == 1
    assert "error in cuda: this section needs a CUDA GPU, and there is none; leave it out" in capsys.readouterr().err
