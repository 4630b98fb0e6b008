"""Who does what, as data: layer specs, plans, strategies, the program of transfers; and what a step costs: clusters,
simulation, search. Uses only the standard library."""
