import pytest
import torch

from datamodules.mnist.strokes import connected_components, find_strokes


def _flooded(mask: torch.Tensor) -> list[frozenset[tuple[int, int]]]:
    """The regions of a mask, one pixel after the other."""
    left, regions = {(int(y), int(x)) for y, x in mask.nonzero()}, []
    while left:
        region, edge = set(), [left.pop()]
        while edge:
            y, x = edge.pop()
            region.add((y, x))
            around = {(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= around
            edge += around
        regions.append(frozenset(region))
    return regions


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.45, 0.6, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (1, 30), (30, 1), (25, 31)])
def test_regions_are_those_of_a_flood_fill(share, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < share
    numbers, count = connected_components(mask)
    assert torch.equal(numbers > 0, mask)
    found = [frozenset((int(y), int(x)) for y, x in (numbers == n).nonzero()) for n in range(1, count + 1)]
    assert set(found) == set(_flooded(mask))


def test_dotted_paper_has_no_strokes():
    paper = torch.full((320, 320), 230.0)
    paper[::4, ::4] = 20
    assert connected_components(paper < 100)[1] == 6400
    assert find_strokes(paper) is None
