"""The whole way of a model: compared with plain PyTorch, trained, saved, and run from C++.

    python examples/char_lm/demo.py

Every claim is checked; the first that does not hold ends the run with an error.
"""

from __future__ import annotations

import math
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from char_lm import CharLM, Corpus, read_text
from tqdm import tqdm
from train import BATCH, STEPS, UPDATES, Trainer, arguments, plot, save_checkpoint, train

import lltm

ROUNDS = 10  # of the comparison, two updates of each implementation in each
TRAINING_SECONDS = 120
SEED, TEMPERATURE = 20, 0.7  # of the text drawn at random
# Training amplifies rounding: two runs in float32 part slowly, from 1e-7 in the first loss to some
# 1e-5 after the updates of the comparison (each as far from a run in float64 as from the other).
LOSS_TOLERANCE = 1e-3


def heading(number: int, text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}[{number}/5] {text}{plain}", flush=True)


def check(holds: bool, claim: str) -> None:
    if not holds:
        sys.exit(f"demo: this should hold and does not: {claim}")


def quote(text: str) -> str:
    return "\n".join(f"    | {line}" for line in text.split("\n"))


def compare(corpus: Corpus, hidden_size: int, seed: int) -> tuple[float, float, float]:
    """Trains lltm.LLTM and lltm.reference.LLTM alike, in turn, from the same parameters.

    Returns the median seconds of an update of each, and the largest relative difference of their
    losses.
    """
    trainers = []
    for layer in (lltm.LLTM, lltm.reference.LLTM):
        torch.manual_seed(seed)
        model = CharLM(corpus.vocabulary, hidden_size=hidden_size, layer=layer)
        trainers.append(Trainer(model, corpus, UPDATES))
    times: tuple[list[float], list[float]] = ([], [])
    losses: tuple[list[float], list[float]] = ([], [])
    for round_number in tqdm(range(ROUNDS + 1), unit="round", dynamic_ncols=True):
        for trainer, seconds, bits in zip(trainers, times, losses, strict=True):
            for _ in range(2):
                start = time.perf_counter()
                bits.append(trainer.step())
                if round_number > 0:  # the first round warms up
                    seconds.append(time.perf_counter() - start)
    difference = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    return statistics.median(times[0]), statistics.median(times[1]), difference


def build_program(folder: Path) -> Path:
    """Builds generate.cpp with CMake against the installed package."""
    prefixes = f"{lltm.cmake_prefix_path};{torch.utils.cmake_prefix_path}"
    configure = ["cmake", "-S", str(Path(__file__).parent), "-B", str(folder)]
    configure.append(f"-DCMAKE_PREFIX_PATH={prefixes}")
    if shutil.which("ninja") and not (folder / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    for command in (configure, ["cmake", "--build", str(folder)]):
        print(f"  $ {shlex.join(command)}", flush=True)
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
    checkpoint, curve = options.out / "char_lm.safetensors", options.out / "loss.png"

    name, text = read_text(options.text)
    heading(1, f"The text: {name}")
    corpus = Corpus.from_text(text)
    print(
        f"  {len(text):,} characters, {len(corpus.vocabulary)} different ones;"
        f" the last {len(corpus.held_out):,} are held out."
    )

    heading(2, "The same first updates with lltm.LLTM and with plain PyTorch operations, in turn")
    ours, plain, difference = compare(corpus, options.hidden_size, options.seed)
    threads = torch.get_num_threads()
    print(
        f"  One update (T={STEPS}, B={BATCH}, H={options.hidden_size}), median, {threads} threads:"
    )
    print(f"    lltm.LLTM            {ours * 1e3:7.1f} ms")
    print(f"    lltm.reference.LLTM  {plain * 1e3:7.1f} ms   {plain / ours:.1f} times as long")
    print(f"  Their losses differ by at most {difference:.1e} of their value.")
    check(difference < LOSS_TOLERANCE, f"the losses agree within {LOSS_TOLERANCE}")

    heading(3, "Training a language model, which reads a character and predicts the next")
    torch.manual_seed(options.seed)
    model = CharLM(corpus.vocabulary, hidden_size=options.hidden_size)
    # Fewer updates on a machine so slow, or so busy, that all of them would take much longer.
    updates = options.updates or max(50, min(UPDATES, int(TRAINING_SECONDS / ours)))
    parameters = sum(p.numel() for p in model.parameters())
    ignorance = math.log2(len(corpus.vocabulary))
    print(f"  {parameters:,} parameters, {updates} updates. Fewer bits per character are better;")
    print(f"  guessing costs {ignorance:.2f}.")
    history = train(model, corpus, updates)
    bits = history.held_out[-1][1]
    check(bits < history.training[0], "training improves the held-out text's prediction")
    plot(history, f"lltm.LLTM on {name}", curve)
    save_checkpoint(model, checkpoint)
    print(f"  {bits:.3f} bits per held-out character, after {history.seconds:.0f} s.")
    print(f"  Loss curve: {curve}   Checkpoint: {checkpoint}")

    heading(4, "A C++ program, built against the installed package with find_package(lltm)")
    start = time.perf_counter()
    program = build_program(options.out / "cpp")
    print(f"  Built in {time.perf_counter() - start:.0f} s: {program}")

    heading(5, "The checkpoint in Python and in C++: both continue the same prompt")
    prompt = prompt_of(corpus)
    length = 400
    for title, seed in (
        ("The likeliest characters", None),
        (f"Drawn at random, seed {SEED}", SEED),
    ):
        in_python = model.generate(prompt, length, seed, TEMPERATURE)
        random = () if seed is None else (str(seed), str(TEMPERATURE))
        in_cpp, report = run_program(program, str(checkpoint), prompt, str(length), *random)
        print(f"  {title}:\n{quote(prompt + in_cpp)}")
        check(in_cpp == in_python, f"C++ writes what Python writes:\n{quote(prompt + in_python)}")
        check("Python: none" in report, f"no Python in the C++ process: {report}")
        print(f"  The same {length} characters from Python and from C++.\n  C++: {report}")

    print(
        "\nSummary, as measured in this run:\n"
        f"  speed     a training update takes {ours / plain:.2f} of plain PyTorch's time\n"
        f"  accuracy  the losses of both differ by at most {difference:.1e} of their value\n"
        f"  learning  {bits:.3f} bits per character of held-out text,"
        f" from {history.training[0]:.3f} at first\n"
        "  C++       the same text as Python, greedily and at random, with no Python loaded\n"
        f"  look at   {curve}"
    )


if __name__ == "__main__":
    main()
