"""RL4CO: REINFORCE on routes, data drawn for each epoch by the module, TensorDict batches, a baseline network."""

from lightning.pytorch import Trainer
from rl4co.envs import TSPEnv
from rl4co.models import REINFORCE, AttentionModelPolicy
from rl4co.utils.trainer import RL4COTrainer

from ..rows import SAMPLES, Row, Run

LIBRARY = "rl4co"
PACKAGE = "lightning.pytorch"


def reinforce(run: Run, baseline: str) -> None:
    callbacks = run.callbacks()
    env = TSPEnv(generator_params={"num_loc": 6})
    policy = AttentionModelPolicy(
        env_name=env.name, embed_dim=16, num_encoder_layers=1, num_heads=2, feedforward_hidden=16, normalization="layer"
    )
    module = REINFORCE(
        env,
        policy,
        baseline=baseline,
        batch_size=run.batch_size,
        train_data_size=SAMPLES,
        val_data_size=8,
        test_data_size=8,
        optimizer_kwargs={"lr": 1e-3},
    )
    options = run.options()
    options.setdefault("strategy", "auto")
    trainer = RL4COTrainer(callbacks=callbacks, precision="32-true", **options)
    # Its own `fit` has no `weights_only`, and its modules keep the policy in their hyperparameters.
    Trainer.fit(trainer, module, ckpt_path=run.checkpoint, weights_only=False)


ROWS = {
    "rollout": Row(
        lambda run: reinforce(run, "rollout"),
        "a baseline network, updated at an epoch's end",
        whole="sampled actions",
        unused=True,
    ),
    "no baseline": Row(lambda run: reinforce(run, "no"), "without a baseline", whole="sampled actions", unused=True),
}
