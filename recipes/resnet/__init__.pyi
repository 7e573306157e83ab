from .network import build_resnet as build_resnet
from .recipe import ResNetFineTuner as ResNetFineTuner
