"""Helpers of the tests: tables of cells, small models, corpora and processes; each is imported by its full name."""
