"""Compares models with torch.nn's, trains them, saves one and runs it from C++.

    python examples/char_lm/demo.py
    python examples/char_lm/demo.py --text FILE --updates 600 --out FOLDER

Every printed claim is checked; the first wrong claim ends the run with an error.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from char_lm import RATES, CharLM, Corpus, read_text
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm
from train import BATCH, STEPS, Trainer, bits_per_character, plot, train

import lltm

ROUNDS = 6  # of the comparison; each has two updates per implementation
MOST_UPDATES = 300
TRAINING_SECONDS = 22  # of all models together
LENGTH, SEED, TEMPERATURE = 300, 20, 0.8  # of the sampled text
# The baseline of each layer.
PAIRS = {"lltm.LLTM": "lltm.reference.LLTM", "lltm.LSTM": "nn.LSTM", "lltm.GRU": "nn.GRU"}
# Training amplifies rounding: the losses of two float32 runs differ by 1e-7 at first and by some
# 1e-5 after the comparison's updates. Both differ as much from a float64 run.
LOSS_TOLERANCE = 1e-3


def heading(number: int, text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}[{number}/5] {text}{plain}", flush=True)


def check(holds: bool, claim: str) -> None:
    if not holds:
        sys.exit(f"demo: this should hold and does not: {claim}")


def wrap(text: str, indent: str = "  ", end: str = "") -> str:
    """All lines except the last end with `end`."""
    lines = textwrap.wrap(text, 98 - len(indent), break_long_words=False, break_on_hyphens=False)
    return indent + f"{end}\n{indent}".join(lines)


def quote(text: str) -> str:
    """Indents continued lines."""
    lines = (textwrap.wrap(line, 94, subsequent_indent="    ") for line in text.split("\n"))
    return "\n".join(f"    | {line}" for wrapped in lines for line in wrapped or [""])


def seconds_per_update(trainer: Trainer) -> float:
    return statistics.median(trainer.history.seconds[2:])  # the first two warm up


def compare(models: Mapping[str, CharLM], corpus: Corpus) -> dict[str, Trainer]:
    """Trains every model with the same first updates, in turn."""
    trainers = {
        name: Trainer(name, model, corpus, 2 * MOST_UPDATES) for name, model in models.items()
    }
    for _ in tqdm(range(ROUNDS), unit="round", dynamic_ncols=True, disable=None):
        for trainer in trainers.values():
            trainer.update()
            trainer.update()
    return trainers


def difference(ours: Trainer, theirs: Trainer) -> float:
    """The largest relative difference between losses of the same updates."""
    both = zip(ours.history.training, theirs.history.training, strict=True)
    return max(abs(a - b) / b for a, b in both)


def bits(trainer: Trainer) -> float:
    return trainer.history.held_out[-1][1]


def replaced(model: CharLM) -> CharLM:
    ours = copy.deepcopy(model)
    check(lltm.replace_(ours).replaced == ["rnn"], "lltm.replace_ replaces the layer")
    return ours


def verdict(trainers: Mapping[str, Trainer]) -> str:
    best = min((trainers[name] for name in PAIRS if name in trainers), key=bits)
    fastest = min(trainers.values(), key=seconds_per_update)
    cell = best.model.rnn.mode
    text = (
        f"Best: the {cell}, {bits(best):.2f} bits a character. Fastest: {fastest.name},"
        f" {seconds_per_update(fastest) * 1e3:.0f} ms an update."
    )
    for name, baseline in PAIRS.items():
        if baseline in trainers:
            ours, theirs = trainers[name], trainers[baseline]
            share = seconds_per_update(ours) / seconds_per_update(theirs)
            text += (
                f" {name} needs {share:.2f} of the time of {baseline} for an update, and ends"
                f" {bits(ours) - bits(theirs):+.3f} bits from it."
            )
    if cell != "LLTM":
        worse = bits(trainers["lltm.LLTM"]) - bits(best)
        text += f" lltm.LLTM ends {worse:.2f} bits worse: to predict text, take lltm.{cell}."
    return text


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Aligns the first column to the left, the others to the right."""
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
    """Builds with CMake against the installed package."""
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
    """Returns standard output and standard error."""
    result = subprocess.run([str(program), *arguments], capture_output=True, encoding="utf-8")
    check(result.returncode == 0, f"generate runs\n{result.stderr}")
    return result.stdout, result.stderr.strip()


def prompt_of(corpus: Corpus) -> str:
    """A held-out line with many words."""
    lines = corpus.decode(corpus.held_out).split("\n")
    line = max(
        lines[1:100], key=lambda line: (line[:1].isalpha(), len(line.split())), default=lines[0]
    )
    return line[: min(len(line) // 2 + 1, 60)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Shows what lltm does.")
    parser.add_argument("--text", type=Path, help="a UTF-8 file instead of Python's documentation")
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="folder for what is written"
    )
    parser.add_argument("--updates", type=int, help="of the parameters")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the LLTM")
    parser.add_argument("--seed", type=int, default=0, help="of the initial parameters")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint, curves = options.out / "char_lm.safetensors", options.out / "curves.png"

    source, text = read_text(options.text)
    heading(1, f"The text: {source}")
    corpus = Corpus.from_text(text)
    guessing = math.log2(len(corpus.vocabulary))
    print(
        f"  {len(text):,} characters, {len(corpus.vocabulary)} different ones;"
        f" the last {len(corpus.held_out):,} are held out."
    )

    heading(2, "The first updates of lltm's layers and of the baselines, in turn")

    def built(*names: str) -> dict[str, CharLM]:
        """Returns models of about equal size; lltm's LSTM and GRU are created by lltm.replace_."""
        torch.manual_seed(options.seed)
        model = CharLM(corpus.vocabulary, hidden_size=options.hidden_size)
        made = {"lltm.LLTM": model}
        for cell in ("LSTM", "GRU"):
            torch.manual_seed(options.seed)
            made[f"nn.{cell}"] = CharLM.with_parameters_of(model, getattr(nn, cell))
            made[f"lltm.{cell}"] = replaced(made[f"nn.{cell}"])
        torch.manual_seed(options.seed)
        made["lltm.reference.LLTM"] = CharLM(
            corpus.vocabulary, hidden_size=options.hidden_size, layer=lltm.reference.LLTM
        )
        return {name: made[name] for name in names}

    first = compare(built(*PAIRS, *PAIRS.values()), corpus)
    per_update = {name: seconds_per_update(trainer) for name, trainer in first.items()}
    rows = [("", "ms an update", "", "ms an update", "times as long", "losses differ by")]
    for name, baseline in PAIRS.items():
        apart = difference(first[name], first[baseline])
        ours, theirs = per_update[name], per_update[baseline]
        longer = f"{theirs / ours:.1f}"
        rows.append(
            (name, f"{ours * 1e3:.1f}", baseline, f"{theirs * 1e3:.1f}", longer, f"{apart:.0e}")
        )
        check(apart < LOSS_TOLERANCE, f"the losses of {name} agree within {LOSS_TOLERANCE}")
    updates_compared = table(rows)
    print(
        f"  {2 * ROUNDS} updates (T={STEPS}, B={BATCH}), medians,"
        f" {torch.get_num_threads()} threads; the losses in units of their value:\n"
        f"{updates_compared}"
    )

    heading(3, "Language models that predict the next character")
    models = built("lltm.LLTM", "lltm.LSTM", "nn.LSTM", "lltm.GRU", "nn.GRU")
    # Fewer updates on a slow or busy machine.
    affordable = int(TRAINING_SECONDS / sum(per_update[name] for name in models))
    updates = options.updates or max(50, min(MOST_UPDATES, affordable))
    print(
        f"  The same text, {updates} updates each, in turn; Adam at the rate that suits each.\n"
        f"  Fewer bits per character are better; guessing costs {guessing:.2f}."
    )
    by_name = {name: Trainer(name, model, corpus, updates) for name, model in models.items()}
    trainers = list(by_name.values())
    train(trainers, updates)
    rows = [("", "hidden size", "parameters", "rate", "ms an update", "seconds", "bits held out")]
    for trainer in trainers:
        history = trainer.history
        rows.append(
            (
                trainer.name,
                f"{trainer.model.rnn.hidden_size}",
                f"{trainer.model.parameter_count():,}",
                f"{RATES[trainer.model.rnn.mode]}",
                f"{seconds_per_update(trainer) * 1e3:.1f}",
                f"{sum(history.seconds):.1f}",
                f"{bits(trainer):.3f}",
            )
        )
        before, after = history.training[0], bits(trainer)
        check(
            after < before,
            f"training improves how {trainer.name} predicts the held-out text;"
            f" bits per character: {before:.2f} before, {after:.2f} after",
        )
    results = table(rows)
    conclusion = verdict(by_name)
    model = models["lltm.LLTM"]
    print(f"{results}\n{wrap(conclusion)}")
    plot(trainers, f"Character models of {source}, {updates} updates", curves)
    save_file(model.state_dict(), checkpoint)
    quantized = copy.deepcopy(model)
    quantized.rnn = model.rnn.prepack(torch.qint8)
    in_int8 = bits_per_character(quantized, corpus.held_out)
    in_float32 = bits_per_character(model, corpus.held_out)
    lost = in_int8 - in_float32
    print(f"  With its weights in int8, lltm.LLTM costs {in_int8:.3f} bits: {lost:+.4f}.")
    # Usually 0.02 %. After few updates, on a busy machine, rounding costs more.
    check(abs(lost) <= 0.01 * in_float32, "int8 weights cost at most 1 % of the bits")
    print(f"  Curves: {curves}   Checkpoint: {checkpoint}")

    heading(4, "A C++ program, built against the installed package with find_package(lltm)")
    start = time.perf_counter()
    program = build_program(options.out / "cpp")
    print(f"  Built in {time.perf_counter() - start:.0f} s: {program}")

    heading(5, f"Text drawn at random, temperature {TEMPERATURE}: in C++, in Python, by the GRU")
    prompt = prompt_of(corpus)
    for seed in (None, SEED):  # greedy, and sampled
        in_python = model.generate(prompt, LENGTH, seed, TEMPERATURE)
        random = () if seed is None else (str(seed), str(TEMPERATURE))
        in_cpp, report = run_program(program, str(checkpoint), prompt, str(LENGTH), *random)
        check(in_cpp == in_python, f"C++ writes what Python writes:\n{quote(prompt + in_python)}")
        check("Python: none" in report, f"no Python in the C++ process: {report}")
    print(f"  lltm.LLTM, by the C++ program:\n{quote(prompt + in_cpp)}")
    print(wrap(f"The same {LENGTH} characters from Python. {report}"))
    by_gru = models["lltm.GRU"].generate(prompt, LENGTH, SEED, TEMPERATURE)
    print(f"  lltm.GRU:\n{quote(prompt + by_gru)}")

    print(
        "\nSummary, as measured in this run:\n"
        f"  A training update, with torch.nn and the PyTorch reference:\n{updates_compared}\n"
        f"  {updates} updates of models with as many parameters:\n{results}\n"
        f"{wrap(conclusion)}\n"
        "  In C++ the same text as in Python, greedily and at random, with no Python loaded.\n"
        f"  Look at {curves}"
    )


if __name__ == "__main__":
    main()
