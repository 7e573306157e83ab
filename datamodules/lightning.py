"""Names of Lightning that our packages use, imported from the package of Lightning that the program uses.

No other module of our packages imports Lightning. Each name is listed twice; mypy reads the first list.

Tested in `tests/package/test_lightning_package.py`.
"""

# ruff: noqa: F401
from typing import TYPE_CHECKING

from datamodules.lightning_package import lightning_package

if TYPE_CHECKING or lightning_package() == "lightning":
    import lightning.pytorch as pl
    from lightning.fabric.utilities import move_data_to_device
    from lightning.fabric.utilities.apply_func import apply_to_collection
    from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        Callback,
        Checkpoint,
        EarlyStopping,
        GradientAccumulationScheduler,
        LambdaCallback,
        ModelCheckpoint,
        ModelSummary,
        ProgressBar,
        StochasticWeightAveraging,
        Timer,
        WeightAveraging,
    )
    from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
    from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
    from lightning.pytorch.loops.optimization.automatic import ClosureResult
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.profilers import PassThroughProfiler
    from lightning.pytorch.strategies import DDPStrategy, Strategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.connectors import checkpoint_connector
    from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader, _resolve_overfit_batches
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric, _Sync
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn
    from lightning.pytorch.utilities import CombinedLoader, rank_zero_only
    from lightning.pytorch.utilities.data import extract_batch_size
    from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.model_summary import summarize
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning.pytorch.utilities.types import OptimizerLRScheduler
else:
    import pytorch_lightning as pl
    from lightning_fabric.utilities import move_data_to_device
    from lightning_fabric.utilities.apply_func import apply_to_collection
    from lightning_fabric.utilities.data import _set_sampler_epoch, sized_len
    from pytorch_lightning.callbacks import (
        BaseFinetuning,
        Callback,
        Checkpoint,
        EarlyStopping,
        GradientAccumulationScheduler,
        LambdaCallback,
        ModelCheckpoint,
        ModelSummary,
        ProgressBar,
        StochasticWeightAveraging,
        Timer,
        WeightAveraging,
    )
    from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason
    from pytorch_lightning.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
    from pytorch_lightning.loggers.csv_logs import ExperimentWriter
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
    from pytorch_lightning.loops.optimization.automatic import ClosureResult
    from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
    from pytorch_lightning.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from pytorch_lightning.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
    from pytorch_lightning.plugins.io import TorchCheckpointIO
    from pytorch_lightning.profilers import PassThroughProfiler
    from pytorch_lightning.strategies import DDPStrategy, Strategy
    from pytorch_lightning.trainer import call
    from pytorch_lightning.trainer.connectors import checkpoint_connector
    from pytorch_lightning.trainer.connectors.data_connector import _process_dataloader, _resolve_overfit_batches
    from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric, _Sync
    from pytorch_lightning.trainer.states import RunningStage, TrainerFn
    from pytorch_lightning.utilities import CombinedLoader, rank_zero_only
    from pytorch_lightning.utilities.data import extract_batch_size
    from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.model_summary import summarize
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
    from pytorch_lightning.utilities.types import OptimizerLRScheduler
