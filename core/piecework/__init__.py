"""Compile a PyTorch model piece by piece."""

__version__ = "0.1.0"
