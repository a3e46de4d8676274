"""Chooses the functions that hash keys: compiled by numba where it is installed and works, else NumPy's. Both give the
same results bit for bit."""

from importlib import import_module
from types import ModuleType

kernels: ModuleType
try:
    kernels = import_module("shardyard.placement.numba_kernels")
except ImportError:  # not installed, or not for this version of Python or NumPy
    kernels = import_module("shardyard.placement.numpy_kernels")
