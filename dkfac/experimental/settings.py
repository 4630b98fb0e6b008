"""The settings of this package, for ``KFAC(..., experimental=ExperimentalSettings(...))``. Imports no torch."""

from dkfac.config.experimental import ExperimentalSettings as ExperimentalSettings
