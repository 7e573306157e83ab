from recipes.runner.start import quick_imports

with quick_imports():
    from datamodules import MNISTDataModule
    from recipes import run

    from .recipe import MNISTClassifier

run(MNISTClassifier, MNISTDataModule)
