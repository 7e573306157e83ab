"""stub"""

from torch import nn


def MNISTNet(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, 2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 49, num_classes),
    )


ClassicNet = MNISTNet
