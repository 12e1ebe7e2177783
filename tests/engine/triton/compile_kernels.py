"""Compiles every kernel for the architectures named on the command line, on any machine.

Run as a program, without ``TRITON_INTERPRET``. The kernels' own launchers run over tensors on the
CPU, with a driver that compiles, checks shared memory against the card's, and launches nothing.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.kernels.batch import Angles
from engine.kernels.reference import AttentionOptions
from engine.kernels.triton import sample, tuning
from engine.kernels.triton.ops import TritonOps
from tests.engine.triton.rig import Step, randn

# Bytes of shared memory that a program may have (CUDA C++ programming guide, technical
# specifications).
SHARED_MEMORY = {"sm80": 163 << 10, "sm86": 99 << 10, "sm90": 227 << 10, "sm100": 227 << 10}


class Compiler:
    """What Triton asks of a driver."""

    def __init__(self, architecture):
        self.architecture = architecture
        self.compiled = []
        self.utils = self

    def get_current_target(self):
        return GPUTarget("cuda", int(self.architecture.removeprefix("sm")), 32)

    def get_current_device(self):
        return self.architecture

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED_MEMORY[self.architecture]}

    def load_binary(self, name, binary, shared, device):
        assert len(binary) > 0
        self.compiled.append(name)
        registers, spills, threads = 32, 0, 1024
        return 1, 1, registers, spills, threads

    def launcher_cls(self, src, metadata):
        return lambda *args, **kwargs: None


def compile_all(ops):
    for dtype, cache_dtype, dim in (
        (torch.float16, None, 80),
        (torch.bfloat16, torch.float8_e4m3fn, 256),
        (torch.float32, None, 256),
    ):
        merged = randn(30, 12, dim, dtype=dtype)
        query, key, value = merged.split([8, 2, 2], dim=1)
        for parts in ([(20, 29), (3, 1)], [(5000, 1)] * 2, [(40, 1)] * 300):
            step = Step(parts, 8, 2, dim, 16, dtype, cache_dtype)
            options = AttentionOptions(0.1, 100, 30.0, randn(8))
            ops.paged_attention(step.query, *step.caches, step.batch, options)
        step = Step([(0, 30)], 8, 2, dim, 16, dtype, cache_dtype)
        turns = Angles(randn(30, dim // 4), randn(30, dim // 4))
        ops.rope_and_write_kv(query, key, value, turns, tuple(step.caches), step.batch)
        ops.write_kv(key, value, *step.caches, step.batch)
        ops.rms_norm(query, randn(dim), 1e-5, torch.float32)
        ops.add_rms_norm(randn(9, 4096), randn(9, 4096, dtype=dtype), randn(4096), 1e-5, dtype)
        for kind in ("silu", "gelu", "gelu_tanh"):
            ops.gated_activation(randn(9, 2000, dtype=dtype), kind)
        ops.copy_blocks(torch.zeros(2, 2, 3, 2, 16, dim, dtype=cache_dtype or dtype), [(0, 1, 9)])
    # Without the launch there are no ids to look up, so not through `row_max`.
    sample._best(randn(3, 150_000), None)
    ops.gumbel_argmax(randn(3, 150_000).double(), [1, 2, 3])


def main(architectures):
    for architecture in architectures:
        compiler = Compiler(architecture)
        driver.set_active(compiler)
        rows = tuning._BY_ARCHITECTURE
        compile_all(TritonOps(torch.device("cpu"), rows.get(architecture, rows["default"])))
        names = sorted(set(compiler.compiled))
        sys.stdout.write(f"{architecture} {len(compiler.compiled)} {' '.join(names)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
