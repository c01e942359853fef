"""Cells that a user has written: `lltm.cell`, the modules of a cell, its text, what it explains."""
