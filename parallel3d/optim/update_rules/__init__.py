"""The arithmetic of the update rules, one file each; their rows are in parallel3d/config/specs/update_rules.py."""
