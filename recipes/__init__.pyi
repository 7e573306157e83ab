from .classification import Classifier as Classifier
from .cli.command_line import run as run
from .mnist.recipe import MNISTClassifier as MNISTClassifier
from .recipe import Recipe as Recipe
from .resnet.recipe import ResNetFineTuner as ResNetFineTuner
from .seq2seq.recipe import Seq2SeqTranslator as Seq2SeqTranslator
from .version import __version__ as __version__
