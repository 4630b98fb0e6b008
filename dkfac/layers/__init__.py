"""Layers of a model, their gradients in canonical form ``[blocks, out, in]`` and their rows ``[N, S, blocks,
features]``.
"""
