import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import tests.support.installed  # noqa: F401  Before Lightning.

# A shared machine is slow at times; that is no defect of the code under test.
settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a script: the processes of tests would inherit that Ctrl-C does nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_ROOT = Path(__file__).parents[1]
collect_ignore = ["support/imported.py"]  # It is imported by the server of `tests.support.ranks`, and changes it.

_NO_GPU = "there is no CUDA GPU here"


def _has_gpu() -> bool:
    # Not at the top: the process that hands out the tests would import torch before it starts the others.
    import torch

    return torch.cuda.is_available()


def _asks_for_cuda(config: pytest.Config) -> bool:
    return "cuda" in config.option.markexpr.replace("not cuda", "")


_STARTERS = ("Agent", "Program", "Shell", "run_ranks", "subprocess", "type_line", "typed")


def _starts_processes(item: pytest.Item) -> bool:
    """Whether the file of a test imports what starts processes."""
    module = getattr(item, "module", None)
    return module is not None and not vars(module).keys().isdisjoint(_STARTERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that start processes.

    Tests marked cuda are left out unless ``-m`` names the mark, and skipped without a GPU.
    """
    for item in filter(_starts_processes, items):
        item.add_marker(pytest.mark.ranks)
    needs_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if not _asks_for_cuda(config):
        items[:] = [item for item in items if not item.get_closest_marker("cuda")]
        config.hook.pytest_deselected(items=needs_gpu)
    elif not _has_gpu():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason=_NO_GPU))


def pytest_collection_finish() -> None:
    """Leave the objects of the imports out of garbage collections, of which each would take a third of a second."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _asks_for_cuda(config) and not _has_gpu():
        terminalreporter.write_line(f"{_NO_GPU}: no test marked cuda has run", yellow=True)


@pytest.fixture(autouse=True, scope="session")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches on disk are those of the tests, in their processes, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def stock_loaders() -> dict[type, dict[str, Any]]:
    """The members of torch's classes before a test; from here on, this process computes on one thread."""
    import torch
    from torch.utils.data import BatchSampler, DataLoader

    # As the ranks of `tests.support.ranks`, whose weights are compared with this process's to the bit.
    torch.set_num_threads(1)
    return {cls: dict(vars(cls)) for cls in (DataLoader, BatchSampler)}


@pytest.fixture(autouse=True)
def unpatched_loaders(stock_loaders: dict[type, dict[str, Any]]) -> Iterator[None]:
    """Lightning patches these classes while it asks for a loader, and leaves them so where that raises an error."""
    yield
    for cls, members in stock_loaders.items():
        for name in vars(cls).keys() - members.keys():
            delattr(cls, name)
        for name in ("__init__", "__setattr__", "__delattr__"):
            if name in members and vars(cls)[name] is not members[name]:
                setattr(cls, name, members[name])


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets, one folder each: ``mnist`` and others; the test is skipped where it is missing."""
    folder = Path(os.environ.get("LIGHTNING_RECIPES_DATA") or _ROOT.parent / "shared" / "data")
    if not (folder / "mnist").is_dir():
        pytest.skip(f"no real data: {folder} holds no folder mnist; name one with LIGHTNING_RECIPES_DATA")
    return folder
