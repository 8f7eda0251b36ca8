"""Memory that the process keeps. glibc hands large blocks back to the system when they are freed, and takes them again page by
page: in training, where every step makes the same tensors, that is about a seventh of the time."""

from __future__ import annotations

import ctypes

# From <malloc.h>: blocks that are mapped on their own, and the free bytes at the end of the heap that are kept.
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1


def keep() -> None:
    """Lets freed memory stay with the process, where the C library has `mallopt`."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # another C library
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)  # never
