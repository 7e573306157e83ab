import sys

try:
    from datamodules import MNISTDataModule
    from recipes import MNISTClassifier, run

    run(MNISTClassifier, MNISTDataModule)
except KeyboardInterrupt:  # The imports take seconds, too.
    sys.exit(130)
