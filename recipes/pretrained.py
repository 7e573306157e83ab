"""Pretrained weights: ImageNet's from torchvision, downloaded once and verified, or a file."""

import logging
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.download import DownloadError, digest_of, download
from recipes.weights import read_weights

__all__ = ["download_weights", "imagenet_weights"]

log = logging.getLogger("lightning_recipes")


def download_weights(url: str, timeout: float = 30.0, name: str | None = None) -> Path:
    """A file of weights in torch hub's cache, downloaded where it is not there yet, by one process at a time.

    Args:
        url: where it ends in ``-<first digits of the SHA-256>.pth``, as torchvision's do, the file has to have that
            digest.
        timeout: seconds without an answer or without data before the download fails.
        name: of the file in the cache; by default the last part of `url`.

    Raises:
        UserError: the download failed, or the file in the cache does not have the digest in its name.
    """
    path = Path(torch.hub.get_dir(), "checkpoints", name or Path(urlsplit(url).path).name)
    named = re.search(r"-([0-9a-f]{8,64})\.", path.name)
    digest = named[1] if named else None
    if not path.exists():
        rank_zero_only(log.warning)("downloading %s", url)
        try:
            download([url], path, digest, timeout, "sha256")
        except (DownloadError, OSError) as error:
            raise UserError(
                f"{error}; download it elsewhere and copy it to {path}, or pass weights='FILE', or weights='none' to"
                " train everything from scratch"
            ) from error
    if digest and not (found := digest_of(path, "sha256")).startswith(digest):
        raise UserError(
            f"{path} is damaged: its SHA-256 is {found[: len(digest)]}...; delete it and it is downloaded again"
        )
    return path


def imagenet_weights(arch: str) -> dict[str, Tensor]:
    """The newest ImageNet weights of a torchvision architecture, such as resnet18, from the cache or the network.

    Raises:
        UserError: there are none, or they could not be downloaded.
    """
    import torchvision.models

    weights: Any = getattr(torchvision.models.get_model_weights(arch), "DEFAULT", None)
    if weights is None:
        raise UserError(f"torchvision has no ImageNet weights for {arch}; pass weights='FILE', or weights='none'")
    return read_weights(download_weights(weights.url))
