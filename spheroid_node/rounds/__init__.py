"""The round as a pure state machine: who aggregates, what is accepted, what becomes of it.

Nothing here reads a clock, a socket or a file: times, peers and bytes come as arguments. The node and the
simulator run the same code.
"""
