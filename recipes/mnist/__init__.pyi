from .network import ClassicNet as ClassicNet
from .network import MNISTNet as MNISTNet
from .network import TutorialNet as TutorialNet
from .recipe import MNISTClassifier as MNISTClassifier
