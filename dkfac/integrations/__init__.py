"""Callbacks for trainers, and loggers. Each module needs its package, which dkfac does not install; nothing above
imports it."""
