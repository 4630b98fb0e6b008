"""Process groups, collectives, agreement between ranks, Join, and the transport that carries out a program. The only
home of torch.distributed beside ``distributed.py``.
"""
