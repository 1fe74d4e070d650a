"""The parts of scripts/benchmark.py: each yields rows of work, ours, peer, ratio, goal, met."""
