"""The whole way of a model: compared, trained beside nn.LSTM, saved, and run from C++.

    python examples/char_lm/demo.py

Every claim is checked; the first that does not hold ends the run with an error.
"""

from __future__ import annotations

import copy
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from char_lm import RATES, CharLM, Corpus, read_text
from torch import nn
from tqdm import tqdm
from train import (
    BATCH,
    STEPS,
    UPDATES,
    Trainer,
    arguments,
    bits_per_character,
    plot,
    save_checkpoint,
    train,
)

import lltm

ROUNDS = 6  # of the comparison, two updates of each implementation in each
TRAINING_SECONDS = 60  # of both models together
LENGTH, SEED, TEMPERATURE = 300, 20, 0.8  # of the text drawn at random
# Training amplifies rounding: two runs in float32 part slowly, from 1e-7 in the first loss to some
# 1e-5 after the updates of the comparison (each as far from a run in float64 as from the other).
LOSS_TOLERANCE = 1e-3


def heading(number: int, text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}[{number}/5] {text}{plain}", flush=True)


def check(holds: bool, claim: str) -> None:
    if not holds:
        sys.exit(f"demo: this should hold and does not: {claim}")


def wrap(text: str, indent: str = "  ", end: str = "") -> str:
    """Lines of at most 100 columns, all but the last with `end`."""
    lines = textwrap.wrap(text, 98 - len(indent), break_long_words=False, break_on_hyphens=False)
    return indent + f"{end}\n{indent}".join(lines)


def quote(text: str) -> str:
    """Sample text; a line that goes on is indented."""
    lines = (textwrap.wrap(line, 94, subsequent_indent="    ") for line in text.split("\n"))
    return "\n".join(f"    | {line}" for wrapped in lines for line in wrapped or [""])


def seconds_per_update(trainer: Trainer) -> float:
    return statistics.median(trainer.history.seconds[2:])  # the first two warm up


def compare(models: Sequence[CharLM], corpus: Corpus) -> list[Trainer]:
    """Makes the same first updates of every model, in turn."""
    trainers = [Trainer("", model, corpus, UPDATES) for model in models]
    for _ in tqdm(range(ROUNDS), unit="round", dynamic_ncols=True, disable=None):
        for trainer in trainers:
            trainer.update()
            trainer.update()
    return trainers


def verdict(model: Trainer, other: Trainer) -> str:
    """What the table of both says, in a sentence."""
    time = sum(model.history.seconds) / sum(other.history.seconds)
    bits = model.history.held_out[-1][1] - other.history.held_out[-1][1]
    text = (
        f"{model.name} needs {time:.2f} of the time of {other.name} for as many updates, and ends "
    )
    if bits < 0:
        return f"{text}{-bits:.2f} bits a character better."
    return f"{text}{bits:.2f} bits a character worse: to predict text, take {other.name}."


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "    "
        + row[0].ljust(widths[0])
        + "".join(
            "   " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
        )
        for row in rows
    )


def build_program(folder: Path) -> Path:
    """Builds generate.cpp with CMake against the installed package."""
    configure = ["cmake", "-S", os.path.relpath(Path(__file__).parent), "-B", str(folder)]
    configure.append(f"-DCMAKE_PREFIX_PATH={lltm.cmake_prefix_path}")
    if shutil.which("ninja") and not (folder / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    for command in (configure, ["cmake", "--build", str(folder)]):
        print(wrap(f"$ {shlex.join(command)}", end=" \\"), flush=True)
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        check(result.returncode == 0, f"the command above succeeds\n{result.stdout}")
    return folder / "generate"


def run_program(program: Path, *arguments: str) -> tuple[str, str]:
    """Returns what it wrote to standard output and to standard error."""
    result = subprocess.run([str(program), *arguments], capture_output=True, encoding="utf-8")
    check(result.returncode == 0, f"generate runs\n{result.stderr}")
    return result.stdout, result.stderr.strip()


def prompt_of(corpus: Corpus) -> str:
    """The beginning of a line of the held-out text, a wordy one."""
    lines = corpus.decode(corpus.held_out).split("\n")
    line = max(
        lines[1:100], key=lambda line: (line[:1].isalpha(), len(line.split())), default=lines[0]
    )
    return line[: min(len(line) // 2 + 1, 60)]


def main() -> None:
    options = arguments("Shows what lltm does.", Path("build/demo"))
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint, curves = options.out / "char_lm.safetensors", options.out / "curves.png"

    name, text = read_text(options.text)
    heading(1, f"The text: {name}")
    corpus = Corpus.from_text(text)
    guessing = math.log2(len(corpus.vocabulary))
    print(
        f"  {len(text):,} characters, {len(corpus.vocabulary)} different ones;"
        f" the last {len(corpus.held_out):,} are held out."
    )

    heading(2, "The same first updates with lltm.LLTM and with plain PyTorch operations, in turn")
    models = []
    for layer in (lltm.LLTM, lltm.reference.LLTM):
        torch.manual_seed(options.seed)
        models.append(CharLM(corpus.vocabulary, hidden_size=options.hidden_size, layer=layer))
    lstm = CharLM.with_parameters_of(models[0], nn.LSTM)
    fused, plain, other = compare([*models, lstm], corpus)
    difference = max(
        abs(a - b) / b for a, b in zip(fused.history.training, plain.history.training, strict=True)
    )
    ours, theirs = seconds_per_update(fused), seconds_per_update(plain)
    print(
        f"  One update (T={STEPS}, B={BATCH}, H={options.hidden_size}), median,"
        f" {torch.get_num_threads()} threads:"
    )
    print(f"    lltm.LLTM            {ours * 1e3:7.1f} ms")
    print(f"    lltm.reference.LLTM  {theirs * 1e3:7.1f} ms   {theirs / ours:.1f} times as long")
    print(f"  Their losses differ by at most {difference:.1e} of their value.")
    check(difference < LOSS_TOLERANCE, f"the losses agree within {LOSS_TOLERANCE}")

    heading(3, "Two language models, lltm.LLTM and nn.LSTM, that predict the next character")
    torch.manual_seed(options.seed)
    model = CharLM(corpus.vocabulary, hidden_size=options.hidden_size)
    lstm = CharLM.with_parameters_of(model, nn.LSTM)
    # Fewer updates on a machine so slow, or so busy, that all of them would take much longer.
    affordable = int(TRAINING_SECONDS / (ours + seconds_per_update(other)))
    updates = options.updates or max(50, min(UPDATES, affordable))
    print(
        f"  The same text, {updates} updates each, in turn; Adam at the rate that suits each.\n"
        f"  Fewer bits per character are better; guessing costs {guessing:.2f}."
    )
    trainers = [
        Trainer("lltm.LLTM", model, corpus, updates),
        Trainer("nn.LSTM", lstm, corpus, updates),
    ]
    train(trainers, updates)
    rows = [("", "hidden size", "parameters", "rate", "ms an update", "seconds", "bits held out")]
    for trainer in trainers:
        history = trainer.history
        rows.append(
            (
                trainer.name,
                f"{trainer.model.rnn.hidden_size}",
                f"{trainer.model.parameter_count():,}",
                f"{RATES[type(trainer.model.rnn)]}",
                f"{seconds_per_update(trainer) * 1e3:.1f}",
                f"{sum(history.seconds):.1f}",
                f"{history.held_out[-1][1]:.3f}",
            )
        )
        check(
            history.held_out[-1][1] < history.training[0],
            f"training improves how {trainer.name} predicts the held-out text",
        )
    results = table(rows)
    conclusion = verdict(*trainers)
    print(f"{results}\n{wrap(conclusion)}")
    plot(trainers, f"Character models of {name}, {updates} updates", curves)
    save_checkpoint(model, checkpoint)
    quantised = copy.deepcopy(model)
    quantised.rnn = model.rnn.prepack(torch.qint8)
    bits = bits_per_character(quantised, corpus.held_out)
    lost = bits - bits_per_character(model, corpus.held_out)
    print(f"  With its weights in int8, lltm.LLTM costs {bits:.3f} bits: {lost:+.4f}.")
    check(abs(lost) <= 0.01, "int8 weights cost at most 0.01 bits a character")
    print(f"  Curves: {curves}   Checkpoint: {checkpoint}")

    heading(4, "A C++ program, built against the installed package with find_package(lltm)")
    start = time.perf_counter()
    program = build_program(options.out / "cpp")
    print(f"  Built in {time.perf_counter() - start:.0f} s: {program}")

    heading(5, f"Text drawn at random, temperature {TEMPERATURE}: in C++, in Python, by nn.LSTM")
    prompt = prompt_of(corpus)
    for seed in (None, SEED):  # the likeliest characters, and drawn at random
        in_python = model.generate(prompt, LENGTH, seed, TEMPERATURE)
        random = () if seed is None else (str(seed), str(TEMPERATURE))
        in_cpp, report = run_program(program, str(checkpoint), prompt, str(LENGTH), *random)
        check(in_cpp == in_python, f"C++ writes what Python writes:\n{quote(prompt + in_python)}")
        check("Python: none" in report, f"no Python in the C++ process: {report}")
    print(f"  lltm.LLTM, by the C++ program:\n{quote(prompt + in_cpp)}")
    print(wrap(f"The same {LENGTH} characters from Python. {report}"))
    print(f"  nn.LSTM:\n{quote(prompt + lstm.generate(prompt, LENGTH, SEED, TEMPERATURE))}")

    print(
        "\nSummary, as measured in this run:\n"
        f"  lltm.LLTM   {ours / theirs:.2f} of the time of plain PyTorch operations for a training"
        " update,\n"
        f"              and losses that differ by {difference:.0e} of their value\n"
        f"  nn.LSTM     beside it, with as many parameters:\n{results}\n"
        f"{wrap(conclusion, ' ' * 14)}\n"
        "  C++         the same text as Python, greedily and at random, with no Python loaded\n"
        f"  look at     {curves}"
    )


if __name__ == "__main__":
    main()
