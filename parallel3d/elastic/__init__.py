"""Fault tolerance: protocol/ decides (pure), coordinator/ serves, guardian/ watches, worker/ takes part."""
