"""Trains a model of an amplifier or an effect from a recording of its input and its output.

    python train.py dry.wav wet.wav amplifier    two mono files of 16 bits
    python train.py --demo amplifier             a synthetic distortion of a synthetic guitar

Writes amplifier.rt, which lltm/realtime.h loads, amplifier.head with the output layer's weights,
and with --demo amplifier.wav, the dry sound. filter.cpp plays them.
"""

from __future__ import annotations

import argparse
import time
import wave
from pathlib import Path

import torch
from torch import Tensor, nn

import lltm

RATE = 48_000
SEGMENT, WARM_UP, BATCH = 2048, 256, 32  # samples, samples without a loss, segments


class Amplifier(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.lstm = lltm.LSTM(1, hidden_size)
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.head(self.lstm(x)[0])  # type: ignore[no-any-return]


def read(path: Path) -> Tensor:
    """Returns samples within [-1, 1]."""
    with wave.open(str(path), "rb") as file:
        if (file.getnchannels(), file.getsampwidth()) != (1, 2):
            raise SystemExit(f"{path}: expected one channel of 16 bits")
        data = file.readframes(file.getnframes())
    return torch.frombuffer(bytearray(data), dtype=torch.int16) / 32768


def write(path: Path, samples: Tensor) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((32767 * samples.clamp(-1, 1)).to(torch.int16).numpy().tobytes())


def demo(seconds: float) -> tuple[Tensor, Tensor]:
    """Plucked strings, and what a valve with a small loudspeaker makes of them."""
    t = torch.arange(int(seconds * RATE)) / RATE
    dry = torch.zeros_like(t)
    for start in torch.arange(0, seconds, 0.25).tolist():
        pitch = 82.4 * 2 ** (float(torch.randint(0, 36, ())) / 12)
        since = (t - start).clamp(min=0)
        envelope = torch.exp(-4 * since) * (t >= start)
        dry += 0.3 * envelope * sum(torch.sin(k * 6.2832 * pitch * since) / k for k in (1, 2, 3))
    driven = torch.tanh(6 * dry + 0.3) - 0.29
    spectrum = torch.fft.rfft(driven)
    frequency = torch.fft.rfftfreq(len(t), 1 / RATE)
    wet = torch.fft.irfft(spectrum / (1 + 1j * frequency / 5000), len(t))
    return dry.clamp(-1, 1), 0.5 * wet


def train(model: Amplifier, dry: Tensor, wet: Tensor, seconds: float) -> float:
    """Returns the error-to-signal ratio of the last steps."""
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    end, step, error = time.monotonic() + seconds, 0, 1.0
    while time.monotonic() < end:
        starts = torch.randint(0, len(dry) - SEGMENT, (BATCH,))
        x, y = (torch.stack([s[k : k + SEGMENT] for k in starts], 1)[..., None] for s in (dry, wet))
        difference = (model(x) - y)[WARM_UP:]
        loss = difference.square().mean() / (y[WARM_UP:].square().mean() + 1e-4)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        error += 0.05 * (loss.item() - error)
        if step % 20 == 0:
            print(f"step {step}, error {error:.4f} of the signal's energy", flush=True)
        step += 1
    return error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="dry.wav wet.wav NAME, or NAME")
    parser.add_argument("--demo", action="store_true", help="needs no recordings")
    parser.add_argument("--hidden-size", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    options = parser.parse_args()
    *recordings, name = options.files
    if len(recordings) != (0 if options.demo else 2):
        parser.error("expected dry.wav wet.wav NAME, or --demo NAME")
    dry, wet = demo(20.0) if options.demo else (read(recordings[0]), read(recordings[1]))
    if options.demo:
        write(name.with_suffix(".wav"), dry[: 5 * RATE])
    if len(dry) != len(wet) or len(dry) <= SEGMENT:
        parser.error(f"expected two files of the same length, got {len(dry)} and {len(wet)}")
    model = Amplifier(options.hidden_size)
    error = train(model, dry, wet, options.seconds)
    print(f"trained: error {error:.4f} of the signal's energy")
    lltm.realtime.save(model.lstm, name.with_suffix(".rt"))
    head = torch.cat([model.head.weight.detach().flatten(), model.head.bias.detach()])
    name.with_suffix(".head").write_bytes(head.numpy().tobytes())


if __name__ == "__main__":
    main()
