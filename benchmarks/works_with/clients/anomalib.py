"""anomalib: a validated data class as batch, a preprocessor that is a callback, two optimizers by hand."""

from typing import Any

import torch
from anomalib.data import ImageBatch, ImageItem
from anomalib.models import Fastflow, Ganomaly, Padim
from anomalib.pre_processing import PreProcessor
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import Compose, Normalize, Resize

from ..rows import SAMPLES, Row, Run

LIBRARY = "anomalib"
INSTALL = "anomalib==2.2.0 requests"
PACKAGE = "lightning.pytorch"
SIZE = 32


def detector(run: Run, model: Any, **options: Any) -> None:
    callbacks = run.callbacks()
    generator = torch.Generator().manual_seed(0)
    items: Any = [
        ImageItem(image=torch.rand(3, SIZE, SIZE, generator=generator), gt_label=torch.tensor(0))
        for _ in range(SAMPLES)
    ]
    loader = DataLoader(items, run.batch_size, shuffle=True, collate_fn=ImageBatch.collate)
    scale = Compose([Resize((SIZE, SIZE)), Normalize([0.4] * 3, [0.2] * 3)])
    module = model(
        pre_processor=PreProcessor(transform=scale), evaluator=False, visualizer=False, post_processor=False, **options
    )
    run.fit(module, loader, callbacks=callbacks)


def fastflow(run: Run) -> None:
    detector(run, Fastflow, backbone="resnet18", pre_trained=False, flow_steps=1)


def padim(run: Run) -> None:
    detector(run, Padim, backbone="resnet18", pre_trained=False, layers=["layer1"], n_features=8)


def ganomaly(run: Run) -> None:
    detector(run, Ganomaly, batch_size=2, n_features=8, latent_vec_size=8)


ROWS = {
    "Fastflow": Row(fastflow, "normalizing flow, its PreProcessor changes the batch", whole="BatchNorm"),
    "Padim": Row(padim, "fits a Gaussian at the end of its only epoch", whole="no gradient", stops=(1, 1)),
    "Ganomaly, accumulated": Row(ganomaly, "two optimizers by hand, with GradientAccumulation"),
    "Ganomaly": Row(ganomaly, "two optimizers by hand", accumulate="nothing", unused=True, stops=(2, 6)),
}
