"""Turn gradients into updates: the curvatures, the length of a step, and writing the result."""
