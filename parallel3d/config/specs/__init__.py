"""Rows of data, one file for each kind, that other packages' choices follow from. Pure."""
