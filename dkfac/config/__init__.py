"""Settings: one validated definition, what goes together, which steps measure and refresh, and what is chosen by
optimizer and device.
"""
