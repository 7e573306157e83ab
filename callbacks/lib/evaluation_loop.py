"""Evaluation loop of Lightning whose ranks share what they logged before anything reads it."""

from typing import Any

from typing_extensions import override

from callbacks.lib.update_results import SharedResults
from datamodules.lightning import _EvaluationLoop, call, pl


class SharedEvaluationLoop(_EvaluationLoop):
    """Validation or test whose results are `SharedResults`.

    Args:
        stock: Lightning's loop, whose place it takes.
    """

    def __init__(self, stock: _EvaluationLoop) -> None:
        super().__init__(stock.trainer, stock._trainer_fn, stock._stage, stock.verbose, stock.inference_mode)
        vars(self).update(vars(stock))
        self._shared = SharedResults(stock.trainer, training=False)
        self._results = self._shared

    # A profiler's table has the name of Lightning's class.

    @override
    def _on_before_fetch(self) -> None:
        trainer: Any = self.trainer
        trainer.profiler.start(f"[{_EvaluationLoop.__name__}].{self._stage.dataloader_prefix}_next")

    @override
    def _on_after_fetch(self) -> None:
        trainer: Any = self.trainer
        trainer.profiler.stop(f"[{_EvaluationLoop.__name__}].{self._stage.dataloader_prefix}_next")

    @override
    def _store_dataloader_outputs(self) -> None:
        self._shared.share()
        super()._store_dataloader_outputs()

    @override
    def _on_evaluation_epoch_end(self) -> None:
        name = "on_test_epoch_end" if self.trainer.testing else "on_validation_epoch_end"
        call._call_callback_hooks(self.trainer, name)
        call._call_lightning_module_hook(self.trainer, name)
        self._shared.share()  # In the same place on all ranks, also on one whose hooks have logged nothing.
        self.trainer._logger_connector.on_epoch_end()


def share_evaluations(trainer: pl.Trainer) -> None:
    """Let the ranks share what `validate` and `test` of a Trainer log."""
    for name in ("validate_loop", "test_loop"):
        loop = getattr(trainer, name)
        if not isinstance(loop, SharedEvaluationLoop):
            setattr(trainer, name, SharedEvaluationLoop(loop))
