"""A message broker that always hands out the true next message."""

__version__ = "0.1.0"
