"""Features that the project's own studies could not show to pay off: adaptive refresh intervals, and reducing factors
during the backward pass."""
