"""Checkpoints by layer name."""
