from recipes.runner.start import quick_imports

with quick_imports():
    from datamodules import ImageFolderDataModule
    from recipes import run

    from .recipe import ResNetFineTuner

run(ResNetFineTuner, ImageFolderDataModule)
