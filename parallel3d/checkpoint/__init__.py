"""Checkpoints: written beside training, in the model's terms, and read on any layout."""
