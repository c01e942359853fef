"""Measures lltm and other implementations on this CPU: `python -m lltm.benchmark --help`.

cases             the measured shapes, cells, dtypes and directions
implementations   the implementations that are compared
timing            measurements in interleaved rounds
concurrent        calls by several processes or threads
memory            memory of training
report            printed results, a picture, a comparison with an earlier run
options           the command line that all benchmarks share
user_model        a user's model before and after `lltm.replace_`
"""
