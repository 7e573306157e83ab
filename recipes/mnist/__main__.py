from datamodules import MNISTDataModule
from recipes import run
from recipes.mnist import MNISTClassifier

run(MNISTClassifier, MNISTDataModule)
