"""Custom cells: `lltm.cell`, the modules of a cell, its serialized form and its explanation."""
