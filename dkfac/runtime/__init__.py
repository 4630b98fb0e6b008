"""The engine of a step, refreshes, replanning, diagnostics, reports, and attaching to a model."""
