"""The same functions under torchvision's second interface."""

from torchvision.transforms import functional

__all__ = ["functional"]
