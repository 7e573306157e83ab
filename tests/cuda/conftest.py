"""The device of a test: a GPU with ``-m cuda``, and otherwise the CPU, on which the same body runs as a rehearsal."""

from typing import Literal

import pytest

Device = Literal["cpu", "cuda"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Device:
    """Where the test computes."""
    kind: Device = request.param
    return kind
