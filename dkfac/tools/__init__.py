"""Command line, recipes, report page, measurements of a machine. Nothing above imports it."""
