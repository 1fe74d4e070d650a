"""Adaptive ε-greedy exploration for TorchRL."""
