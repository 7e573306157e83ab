"""SchNetPack: energies and forces, so the loss needs gradients inside of the step; its own loader and data module."""

import ase
import numpy as np
import schnetpack as spk
import torch
import torchmetrics
from schnetpack import transform

from ..rows import SAMPLES, Row, Run

LIBRARY = "schnetpack"
PACKAGE = "pytorch_lightning"
CUTOFF = 4.0


def potential(run: Run) -> None:
    callbacks = run.callbacks()
    draws = np.random.default_rng(0)
    path = run.folder / f"atoms-{run.rank}.db"
    path.unlink(missing_ok=True)
    molecules = []
    properties = []
    for index in range(SAMPLES + 8):
        atoms = 3 + index % 4
        molecules.append(ase.Atoms(numbers=[6] * atoms, positions=draws.normal(size=(atoms, 3)) * 1.5))
        forces = draws.normal(size=(atoms, 3))
        properties.append({"energy": np.array([float(index % 5)]), "forces": forces})
    units = {"energy": "eV", "forces": "eV/Ang"}
    base = spk.data.ASEAtomsData.create(str(path), distance_unit="Ang", property_unit_dict=units)
    base.add_systems(properties, molecules)
    split = run.folder / f"split-{run.rank}.npz"
    np.savez(split, train_idx=range(SAMPLES), val_idx=range(SAMPLES, SAMPLES + 8), test_idx=[])
    data = spk.data.AtomsDataModule(
        str(path),
        batch_size=run.batch_size,
        num_train=SAMPLES,
        num_val=8,
        split_file=str(split),
        transforms=[transform.ASENeighborList(cutoff=CUTOFF), transform.CastTo32()],
        num_workers=0,
    )
    radial = spk.nn.GaussianRBF(n_rbf=6, cutoff=CUTOFF)
    representation = spk.representation.SchNet(
        n_atom_basis=8, n_interactions=1, radial_basis=radial, cutoff_fn=spk.nn.CosineCutoff(CUTOFF)
    )
    model = spk.model.NeuralNetworkPotential(
        representation=representation,
        input_modules=[spk.atomistic.PairwiseDistances()],
        output_modules=[spk.atomistic.Atomwise(n_in=8, output_key="energy"), spk.atomistic.Forces()],
    )
    outputs = [
        spk.task.ModelOutput(
            name=name,
            loss_fn=torch.nn.MSELoss(),
            loss_weight=weight,
            metrics={"MAE": torchmetrics.MeanAbsoluteError()},
        )
        for name, weight in (("energy", 0.01), ("forces", 0.99))
    ]
    task = spk.task.AtomisticTask(model, outputs, torch.optim.AdamW, {"lr": 0.01})
    run.fit(task, callbacks=callbacks, datamodule=data)


ROWS = {"potential": Row(potential, "energies and forces of molecules of unequal size, mean over atoms and molecules")}
