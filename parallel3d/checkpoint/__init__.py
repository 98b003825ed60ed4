"""Checkpoints: written in the background, in the model's terms, and read on any layout."""
