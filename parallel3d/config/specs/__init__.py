"""Rows that describe the extensions of the project, one file for each kind; validation and sizes derive from them."""
