"""From autograd to batch statistics: hooks, backward nodes, the collector, deferred products, exact and sampled
Fisher.
"""
