"""Turn running factors into decompositions: solvers with fallbacks, batched in-place solves, refreshes that are spread
over several steps or run asynchronously, and the agreement between ranks."""
