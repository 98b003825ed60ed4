"""Elasticity for any PyTorch training loop: data parallelism that survives losses."""
