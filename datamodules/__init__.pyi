from .errors import RunFailedError as RunFailedError
from .errors import UserError as UserError
from .images.data_module import ImageFolderDataModule as ImageFolderDataModule
from .loading.loaders import EvaluationLoader as EvaluationLoader
from .loading.loaders import TrainLoader as TrainLoader
from .mnist.data_module import MNISTDataModule as MNISTDataModule
from .translation.data_module import TranslationDataModule as TranslationDataModule
