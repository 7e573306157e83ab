import sys

try:
    from datamodules import ImageFolderDataModule
    from recipes import ResNetFineTuner, run

    run(ResNetFineTuner, ImageFolderDataModule)
except KeyboardInterrupt:  # The imports take seconds, too.
    sys.exit(130)
