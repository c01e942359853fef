"""lltm beside other implementations, measured on this machine: `python -m lltm.benchmark --help`.

cases        what is measured
contenders   what is compared
runtimes     nn.LSTM in ONNX Runtime and OpenVINO
timing       measuring in interleaved rounds
report       rows of figures, a picture, a comparison with an earlier run
"""
