"""Kernels that read weights where they lie: in device memory, in registered host memory, or in both."""
