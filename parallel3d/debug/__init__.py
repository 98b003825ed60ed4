"""Aids for the case that something is wrong: replica check, tensor dumps, traces."""
