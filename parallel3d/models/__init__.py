"""Models: plain modules over a range of layers."""
