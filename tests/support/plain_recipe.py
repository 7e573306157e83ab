"""A user's own recipe: a subclass in a file, with the command line in one line."""

from torch import nn

from datamodules import MNISTDataModule
from recipes import MNISTClassifier, run


class Plain(MNISTClassifier):
    """A small network without BatchNorm or dropout.

    Args:
        hidden: width of the hidden layer.
    """

    title = "plain"

    def __init__(self, hidden: int = 24, **kwargs) -> None:
        super().__init__(**kwargs)

    def build_network(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 12 * 12, self.hparams.hidden),
            nn.ReLU(),
            nn.Linear(self.hparams.hidden, 10),
        )


if __name__ == "__main__":
    run(Plain, MNISTDataModule)
