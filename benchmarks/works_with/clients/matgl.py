"""MatGL: potentials of crystals, a loader of PyTorch Geometric made by a function, outputs kept in the module."""

import numpy as np
import torch
from matgl.ext.pymatgen import Structure2Graph
from matgl.graph.data import MGLDataLoader, MGLDataset
from matgl.models import M3GNet
from matgl.utils.training import ModelLightningModule
from pymatgen.core import Lattice, Structure

from ..rows import SAMPLES, Row, Run

LIBRARY = "matgl"
PACKAGE = "lightning.pytorch"


def energies(run: Run) -> None:
    callbacks = run.callbacks()
    draws = np.random.default_rng(0)
    crystals = []
    for index in range(SAMPLES + 8):
        atoms = 2 + index % 3
        crystals.append(Structure(Lattice.cubic(4.0), ["Mo", "S", "S", "Mo"][:atoms], draws.random((atoms, 3))))
    data = MGLDataset(
        structures=crystals,
        converter=Structure2Graph(element_types=("Mo", "S"), cutoff=4.0),
        labels={"Eform": draws.normal(size=len(crystals)).tolist()},
        root=str(run.folder / f"data-{run.rank}"),
        save_cache=False,
    )
    train = torch.utils.data.Subset(data, range(SAMPLES))
    held_out = torch.utils.data.Subset(data, range(SAMPLES, SAMPLES + 8))
    loader, validation = MGLDataLoader(train, held_out, batch_size=run.batch_size, num_workers=0)
    model = M3GNet(element_types=("Mo", "S"), is_intensive=True, units=8, nblocks=1, cutoff=4.0, readout_type="set2set")
    run.fit(ModelLightningModule(model=model, lr=0.01), loader, validation, callbacks=callbacks)


ROWS = {"M3GNet": Row(energies, "energies of crystals of unequal size, validation", unused=True)}
