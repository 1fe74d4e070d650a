"""Peers of scripts/benchmark.py, each a script of its own; common.py says what they agree on."""
