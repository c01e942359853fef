# Written by the build (python/_built_with.py.in).

TORCH: str
