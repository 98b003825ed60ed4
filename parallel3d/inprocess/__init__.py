"""Ranks as threads of one process: the real trainer, membership protocol and pipeline without processes."""
