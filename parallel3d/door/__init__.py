"""Training from Python: `parallel3d.train` starts the command as a process of its own and follows its run folder.

The caller's process is never forked, so it may have threads, torch and a GPU; and nothing that its callbacks do can
slow a worker. docs/python.md describes it.
"""
