"""Megatron-style tensor parallelism: collectives, linear layers, vocabulary layers, random streams.

Activations are `[seq, batch, hidden]`. With sequence parallelism the part of a block outside the matrices is
`[seq / tp, batch, hidden]` (Korthikanti et al. 2022).
"""
