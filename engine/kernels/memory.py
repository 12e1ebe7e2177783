"""Advice to the operating system about memory that kernels read at random.

Invariant: advice only: where it is not taken, everything works as before, slower.
"""

import ctypes
import mmap

import torch


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Asks for huge pages below `tensor`, which only memory not touched before gets. Blocks of a
    KV cache lie scattered, and with pages of 4 KiB nearly each costs a walk of the page table,
    which takes as long as reading it."""
    if tensor.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if end > begin:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
