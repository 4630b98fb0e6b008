"""``dkfac selftest``: whether K-FAC's collectives do what they should on these ranks, and how fast they are."""
