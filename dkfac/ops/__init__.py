"""Functions from tensors to tensors: outer products, decompositions, preconditioning, packing; Triton kernels; the
cache of CUDA graphs.
"""
