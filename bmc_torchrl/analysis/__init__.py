"""Reads tables, never trains: summaries, statistics, comparison, figures."""
