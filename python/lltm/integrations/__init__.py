"""Support for PyTorch's compilers, exporters, tracers, DTensor and FLOP counter."""
