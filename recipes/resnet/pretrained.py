"""Published weights, ImageNet's of torchvision and timm: downloaded once, and verified."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torchvision.models
from torch import Tensor
from torchvision.models.vision_transformer import interpolate_embeddings

from datamodules.errors import UserError
from datamodules.loading.download import DownloadError, digest_of, download
from datamodules.notes import warn
from recipes.resnet.network import ARCHITECTURES, SMALL_NETWORKS, TIMM, build_timm, timm_config
from recipes.weights import read_weights


def download_weights(url: str, name: str | None = None) -> Path:
    """A file of weights in torch hub's cache, downloaded where it is not there yet, by one process at a time.

    Args:
        url: where it ends in ``-<first digits of the SHA-256>.pth``, as torchvision's do, the file has to have that
            digest.
        name: of the file in the cache; by default the last part of `url`.

    Raises:
        UserError: the download failed, or the file in the cache does not have the digest in its name.
    """
    path = Path(torch.hub.get_dir(), "checkpoints", name or Path(urlsplit(url).path).name)
    named = re.search(r"-([0-9a-f]{8,64})\.", path.name)
    digest = named[1] if named else None
    if not path.exists():
        warn("downloading %s", url)
        try:
            download([url], path, digest, 30.0, "sha256")
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
    weights: Any = getattr(torchvision.models.get_model_weights(arch), "DEFAULT", None)
    if weights is None:
        raise UserError(f"torchvision has no ImageNet weights for {arch}; pass weights='FILE', or weights='none'")
    # Those of DenseNets have the names of before the layers had names without a dot.
    state = read_weights(download_weights(weights.url))
    return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2", name): state[name] for name in state}


def published_weights(arch: str, image_size: int = 224) -> dict[str, Tensor]:
    """The ImageNet weights of an architecture, from the cache or the network, under the names of `build_network`.

    Args:
        image_size: embeddings of positions are interpolated to it.

    Raises:
        UserError: there are none, or they could not be downloaded.
    """
    if arch in SMALL_NETWORKS:
        raise UserError(f"{arch} has no ImageNet weights; pass weights='FILE', or weights='none'")
    if arch.startswith(TIMM):
        return _timm_weights(arch.removeprefix(TIMM), image_size)
    state = imagenet_weights(arch)
    if arch.startswith("vit_"):
        state = dict(interpolate_embeddings(image_size, int(arch.rpartition("_")[2]), state))
    return state


def _timm_weights(name: str, image_size: int) -> dict[str, Tensor]:
    config = timm_config(name)
    if not config.has_weights:
        raise UserError(f"timm has no weights for {name}; pass weights='FILE', or weights='none'")
    url, path, file = config.url, None, None
    if config.hf_hub_id:
        from huggingface_hub import hf_hub_url, try_to_load_from_cache

        hub = config.hf_hub_id, config.hf_hub_filename or "model.safetensors"
        url, path = hf_hub_url(*hub), try_to_load_from_cache(*hub)
        file = f"{config.hf_hub_id.replace('/', '--')}--{hub[1]}"
    if not isinstance(path, str):
        # timm's own download tries for a minute where there is no network, and in each process.
        path = str(download_weights(url, name=file))
    loaded = build_timm(name, image_size, pretrained=True, pretrained_cfg_overlay={"state_dict": read_weights(path)})
    return dict(loaded.state_dict())


def weights_statistics(arch: str) -> dict[str, list[float]]:
    """Mean and standard deviation of pixels from 0 to 1 by which the published weights of an architecture normalise.

    Empty where torchvision has no such weights; timm has a configuration for every name.

    >>> weights_statistics("resnet18")
    {'pixel_mean': [0.485, 0.456, 0.406], 'pixel_std': [0.229, 0.224, 0.225]}
    """
    if arch.startswith(TIMM):
        known: Any = timm_config(arch.removeprefix(TIMM))
    else:
        weights = (
            getattr(torchvision.models.get_model_weights(arch), "DEFAULT", None)
            if arch in ARCHITECTURES and arch not in SMALL_NETWORKS
            else None
        )
        known = weights and weights.transforms()
    return {"pixel_mean": list(known.mean), "pixel_std": list(known.std)} if known else {}
