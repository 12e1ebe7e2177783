"""The op set in Triton, for CUDA.

Invariant: nothing outside this package imports Triton, and nothing imports this package but
`engine.kernels.ops.select_ops`, so an engine on a CPU never loads it. A launch depends on shapes
and numbers of the host alone and waits for nothing, so each can be captured in a CUDA graph.

With ``TRITON_INTERPRET=1`` in the environment before Triton is first imported, every kernel runs on
a CPU under Triton's interpreter.
"""
