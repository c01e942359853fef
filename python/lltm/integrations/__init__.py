"""What PyTorch's other parts know of the operators and modules: compilers, exporters, tracers,
DTensor and the FLOP counter."""
