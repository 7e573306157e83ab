from .network import ClassicNet as ClassicNet
from .network import MNISTNet as MNISTNet
from .recipe import MNISTClassifier as MNISTClassifier
