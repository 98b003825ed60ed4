"""Pre-training of language models in three dimensions that survives its failures."""

__version__ = "0.1.0"
