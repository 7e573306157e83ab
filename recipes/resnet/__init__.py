"""Fine-tuning of torchvision's ResNets on folders of images, with layers that stay frozen."""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
