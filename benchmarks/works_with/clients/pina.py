"""PINA: a subclass of Trainer, its own aggregator of loaders, conditions as batches, LBFGS."""

from typing import Any

import torch
from pina import Condition, LabelTensor, Trainer
from pina.model import FeedForward
from pina.optim import TorchOptimizer, TorchScheduler
from pina.problem import BaseProblem
from pina.solver import SupervisedEnsembleSolver, SupervisedSingleModelSolver

from ..rows import SAMPLES, Row, Run

LIBRARY = "pina-mathlab"
PACKAGE = "lightning.pytorch"


def problem() -> BaseProblem:
    inputs = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(0))
    targets = inputs.sum(1, keepdim=True).sin()

    class Problem(BaseProblem):  # type: ignore[misc]
        input_variables = ["a", "b"]  # noqa: RUF012
        output_variables = ["u"]  # noqa: RUF012
        conditions = {"data": Condition(input=LabelTensor(inputs, ["a", "b"]), target=LabelTensor(targets, ["u"]))}  # noqa: RUF012

    return Problem()


def solver(run: Run, ensemble: bool = False) -> None:
    callbacks = run.callbacks()
    adam = TorchOptimizer(torch.optim.Adam, lr=0.01)
    if ensemble:
        networks = [FeedForward(2, 1, inner_size=8, n_layers=2) for _ in range(2)]
        module = SupervisedEnsembleSolver(
            problem(), networks, optimizers=[adam, TorchOptimizer(torch.optim.Adam, lr=0.01)]
        )
    else:
        schedule = TorchScheduler(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9)
        network = FeedForward(2, 1, inner_size=8, n_layers=2)
        module = SupervisedSingleModelSolver(problem(), network, optimizer=adam, scheduler=schedule)
    options: dict[str, Any] = run.options()
    trainer = Trainer(solver=module, batch_size=run.batch_size, shuffle=True, callbacks=callbacks, **options)
    trainer.train(ckpt_path=run.checkpoint, weights_only=False)


ROWS = {
    "samples": Row(solver, "supervised solver, `global_batch_size`"),
    "steps": Row(solver, "supervised solver, `steps`", accumulate="steps", stops=(1, 2), whole="steps"),
    "ensemble": Row(
        lambda run: solver(run, ensemble=True), "two optimizers by hand", accumulate="nothing", stops=(5, 5)
    ),
}
