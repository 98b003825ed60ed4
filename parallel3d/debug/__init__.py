"""Debugging: replica check, tensor dumps, traces."""
