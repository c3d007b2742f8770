"""The second edition of the same functions."""

from torchvision.transforms import functional

__all__ = ["functional"]
