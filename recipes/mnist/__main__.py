from recipes.runner.quick_imports import quick_imports

with quick_imports():
    from datamodules import MNISTDataModule
    from recipes import MNISTClassifier, run

run(MNISTClassifier, MNISTDataModule)
