"""Predicted against reported cached tokens, and blocks against blocks, on real engines with models
of every kind (`make exactness`); docs/exactness.md has the table.
"""
