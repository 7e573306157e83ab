"""Pretrained weights: ImageNet's from torchvision, fetched once and held to their hash, or a file."""

import contextlib
import difflib
import hashlib
import http.client
import logging
import re
import shutil
import socket
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import torch
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from datamodules.errors import UserError
from recipes.weights import WeightsReport, load_weights, read_weights, some_names

__all__ = ["download_weights", "imagenet_weights", "load_pretrained"]

log = logging.getLogger("lightning_recipes")


def _imagenet_url(arch: str) -> str:
    import torchvision.models

    names = torchvision.models.list_models(module=torchvision.models)
    if arch not in names:
        close = difflib.get_close_matches(arch, names) or names
        raise UserError(f"torchvision has no architecture {arch!r}; did you mean {some_names(close)}?")
    weights = getattr(torchvision.models.get_model_weights(arch), "DEFAULT", None)
    if weights is None:
        raise UserError(f"torchvision has no ImageNet weights for {arch}; pass --weights FILE, or --weights none")
    return weights.url


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Torch's download has none of its own, and waits for a silent server for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _fetch_once(url: str, path: Path, digest: str | None, progress: bool, timeout: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    # A folder of our own: what a killed run left in it can go without touching another program's download.
    parts = path.with_name(f".{path.name}.part")
    with FileLock(lock):
        try:
            if path.exists():
                return
            log.warning("downloading %s", url)
            shutil.rmtree(parts, ignore_errors=True)
            parts.mkdir()
            with _time_limit(timeout):
                torch.hub.download_url_to_file(url, str(parts / path.name), digest, progress)
            (parts / path.name).replace(path)
        finally:
            shutil.rmtree(parts, ignore_errors=True)
            # While it is held, so that who comes next makes a new one; Windows removes it by itself.
            with contextlib.suppress(OSError):
                lock.unlink()


def download_weights(url: str, progress: bool | None = None, timeout: float = 30.0) -> Path:
    """A file of weights in torch hub's cache, fetched where it is not there yet, by one process at a time.

    Args:
        url: it ends in ``-<first digits of the SHA-256>.pth``, as torchvision's do; the file is held to them.
        progress: show a bar on standard error; None shows it in a terminal.
        timeout: seconds without an answer or without data before it is given up.

    Raises:
        UserError: it could not be fetched, or is not the file that its name promises.
    """
    path = Path(torch.hub.get_dir(), "checkpoints", Path(urlsplit(url).path).name)
    named = re.search(r"-([0-9a-f]{8,64})\.", path.name)
    digest = named[1] if named else None
    if not path.exists():
        try:
            _fetch_once(url, path, digest, sys.stderr.isatty() if progress is None else progress, timeout)
        # RuntimeError is the wrong hash.
        except (OSError, http.client.HTTPException, RuntimeError) as error:
            reason = error if isinstance(error, urllib.error.HTTPError) else getattr(error, "reason", error)
            raise UserError(
                f"cannot fetch {url} ({reason or type(error).__name__}); pass --weights FILE, "
                "or --weights none to train everything from scratch"
            ) from error
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if digest and not found.startswith(digest):
        raise UserError(
            f"{path} is damaged: its SHA-256 is {found[: len(digest)]}...; delete it and it is fetched again"
        )
    return path


def imagenet_weights(arch: str, progress: bool | None = None) -> dict[str, Tensor]:
    """The newest ImageNet weights of a torchvision architecture, such as resnet18, from the cache or the network.

    Raises:
        UserError: there is no such architecture, or its weights could not be fetched.
    """
    return read_weights(download_weights(_imagenet_url(arch), progress))


def load_pretrained(module: nn.Module, weights: str, arch: str, min_share: float = 0.5) -> WeightsReport | None:
    """Start a module from what ``--weights`` names, and say in one line what came of it.

    Args:
        weights: "imagenet", "none", or a file for `read_weights`.
        arch: torchvision's name of the architecture; only "imagenet" needs it.
        min_share: as in `load_weights`.

    Raises:
        UserError: as `read_weights`, `imagenet_weights` and `load_weights` do.
    """
    if weights == "none":
        return None
    imagenet = weights == "imagenet"
    state = imagenet_weights(arch) if imagenet else read_weights(weights)
    report = load_weights(module, state, f"ImageNet ({arch})" if imagenet else weights, min_share)
    rank_zero_only(log.warning)(report.line())
    return report
