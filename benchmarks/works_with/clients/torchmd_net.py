"""TorchMD-Net: potentials with forces, its own warm-up in `optimizer_step`, moving averages of losses, a plateau."""

from typing import Any

import torch
from torch_geometric.data import Data
from torchmdnet.data import DataModule
from torchmdnet.module import LNNP

from ..rows import SAMPLES, Row, Run

LIBRARY = "torchmd-net"
PACKAGE = "lightning.pytorch"
SETTINGS: dict[str, Any] = {
    "activation": "silu",
    "aggr": "add",
    "atom_filter": -1,
    "cutoff_lower": 0.0,
    "cutoff_upper": 5.0,
    "derivative": True,
    "ema_alpha_neg_dy": 1.0,
    "ema_alpha_y": 0.5,
    "embedding_dimension": 8,
    "gradient_clipping": 0.0,
    "lr": 1e-2,
    "lr_factor": 0.5,
    "lr_min": 1e-6,
    "lr_patience": 1,
    "lr_warmup_steps": 3,
    "load_model": None,
    "max_num_neighbors": 16,
    "max_z": 20,
    "model": "graph-network",
    "neg_dy_weight": 1.0,
    "neighbor_embedding": True,
    "num_layers": 1,
    "num_rbf": 4,
    "num_workers": 0,
    "output_model": "Scalar",
    "precision": 32,
    "prior_model": None,
    "rbf_type": "expnorm",
    "reduce_op": "add",
    "reload": 0,
    "remove_ref_energy": False,
    "seed": 1,
    "splits": None,
    "standardize": False,
    "test_interval": -1,
    "test_size": 4,
    "trainable_rbf": False,
    "train_size": SAMPLES,
    "val_size": 8,
    "weight_decay": 0.0,
    "y_weight": 1.0,
}


def potential(run: Run) -> None:
    callbacks = run.callbacks()
    generator = torch.Generator().manual_seed(0)
    molecules = []
    for index in range(SAMPLES + 12):
        atoms = 3 + index % 4
        molecules.append(
            Data(
                z=torch.randint(1, 9, (atoms,), generator=generator),
                pos=torch.randn(atoms, 3, generator=generator),
                y=torch.randn(1, 1, generator=generator),
                neg_dy=torch.randn(atoms, 3, generator=generator),
            )
        )
    folder = str(run.folder / f"log-{run.rank}")
    settings = {**SETTINGS, "batch_size": run.batch_size, "inference_batch_size": 4, "log_dir": folder}
    (run.folder / f"log-{run.rank}").mkdir(exist_ok=True)
    data = DataModule(settings, dataset=Molecules(molecules))
    run.fit(LNNP(settings), callbacks=callbacks, datamodule=data)


class Molecules(torch.utils.data.Dataset[Any]):
    def __init__(self, molecules: list[Any]) -> None:
        self.molecules = molecules

    def __len__(self) -> int:
        return len(self.molecules)

    def __getitem__(self, index: int) -> Any:
        return self.molecules[index]


# Its loss is the sum of a mean over molecules and one over atoms, which no single count weighs.
WHOLE = "its loss adds a mean over atoms to one over molecules"
ROWS = {"potential": Row(potential, "energies and forces, own optimizer_step", whole=WHOLE)}
