"""Attention of a loaded checkpoint as maps."""
