"""Published weights of torchvision and timm: downloaded once, and verified.

Tested in `tests/recipes/test_weights.py`.
"""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torchvision.models
from torch import Tensor
from torchvision.models.vision_transformer import interpolate_embeddings

from datamodules.errors import UserError, spelled
from datamodules.loading.download import DownloadError, digest_of, download
from datamodules.notes import warn
from recipes.weights import read_weights

from .network import ARCHITECTURES, SMALL_NETWORKS, TIMM, build_timm, timm_config


def _other_weights() -> str:
    """Return what to pass if ImageNet weights are not available."""
    return f"{spelled('weights', 'FILE')}, or {spelled('weights', 'none')}"


def download_weights(url: str, name: str | None = None) -> Path:
    """Return the path of a file of weights in torch hub's cache, after one process has downloaded it.

    Args:
        url: the address; if it ends in ``-<first digits of the SHA-256>.pth``, like torchvision's addresses, the file
            must have this digest.
        name: the name of the file in the cache; by default the last part of `url`.

    Raises:
        UserError: the download failed, or the file in the cache does not have the digest in its name.
    """
    path = Path(torch.hub.get_dir(), "checkpoints", name or Path(urlsplit(url).path).name)
    match = re.search(r"-([0-9a-f]{8,64})\.", path.name)
    digest = match[1] if match else None
    if not path.exists():
        warn("downloading %s", url)
        try:
            download([url], path, digest, 30.0, "sha256")
        except (DownloadError, OSError) as error:
            raise UserError(
                f"{error}; download it elsewhere and copy it to {path}, or pass {_other_weights()} to train everything"
                " from scratch"
            ) from error
    actual_digest = digest_of(path, "sha256") if digest else ""
    if digest and not actual_digest.startswith(digest):
        raise UserError(
            f"{path} is damaged: its SHA-256 is {actual_digest[: len(digest)]}...; delete it and it is downloaded again"
        )
    return path


def imagenet_weights(arch: str) -> dict[str, Tensor]:
    """Return the newest ImageNet weights of a torchvision architecture, such as resnet18.

    Raises:
        UserError: there are no such weights, or they could not be downloaded.
    """
    weights: Any = getattr(torchvision.models.get_model_weights(arch), "DEFAULT", None)
    if weights is None:
        raise UserError(f"torchvision has no ImageNet weights for {arch}; pass {_other_weights()}")
    # Torchvision publishes DenseNets under old tensor names, with a dot inside the names of layers.
    state = read_weights(download_weights(weights.url))
    return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2", name): state[name] for name in state}


def published_weights(arch: str, image_size: int = 224) -> dict[str, Tensor]:
    """Return the ImageNet weights of an architecture, with the tensor names of `build_network`.

    Args:
        arch: the architecture, as for `build_network`.
        image_size: the size to which position embeddings are interpolated.

    Raises:
        UserError: there are no such weights, or they could not be downloaded.
    """
    if arch in SMALL_NETWORKS:
        raise UserError(f"{arch} has no ImageNet weights; pass {_other_weights()}")
    if arch.startswith(TIMM):
        return _timm_weights(arch.removeprefix(TIMM), image_size)
    state = imagenet_weights(arch)
    if arch.startswith("vit_"):
        state = dict(interpolate_embeddings(image_size, int(arch.rpartition("_")[2]), state))
    return state


def _timm_weights(name: str, image_size: int) -> dict[str, Tensor]:
    config = timm_config(name)
    if not config.has_weights:
        raise UserError(f"timm has no weights for {name}; pass {_other_weights()}")
    url = config.url
    path = None
    file = None
    if config.hf_hub_id:
        from huggingface_hub import hf_hub_url, try_to_load_from_cache

        name_in_hub = config.hf_hub_filename or "model.safetensors"
        url = hf_hub_url(config.hf_hub_id, name_in_hub)
        path = try_to_load_from_cache(config.hf_hub_id, name_in_hub)
        file = f"{config.hf_hub_id.replace('/', '--')}--{name_in_hub}"
    if not isinstance(path, str):
        # Not timm's download, which runs in each process, and retries for a minute without a network.
        path = str(download_weights(url, name=file))
    loaded = build_timm(name, image_size, pretrained=True, pretrained_cfg_overlay={"state_dict": read_weights(path)})
    return dict(loaded.state_dict())


def weights_statistics(arch: str) -> dict[str, list[float]]:
    """Return the pixel mean and standard deviation that the published weights expect, for pixels from 0 to 1.

    The result is empty if torchvision has no such weights; timm has a configuration for every name.

    >>> weights_statistics("resnet18")
    {'pixel_mean': [0.485, 0.456, 0.406], 'pixel_std': [0.229, 0.224, 0.225]}
    """
    if arch.startswith(TIMM):
        config: Any = timm_config(arch.removeprefix(TIMM))
    else:
        weights = None
        if arch in ARCHITECTURES and arch not in SMALL_NETWORKS:
            weights = getattr(torchvision.models.get_model_weights(arch), "DEFAULT", None)
        config = weights and weights.transforms()
    if not config:
        return {}
    return {"pixel_mean": list(config.mean), "pixel_std": list(config.std)}
