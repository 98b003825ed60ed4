"""Compares two runs of one configuration: their losses, gradients and weights, whatever the layouts."""
