"""Compares the instructions of the persistent kernels with benchmarks/sass.json. Needs no GPU.

    python benchmarks/sass.py build/cuda/tests_cpp/lltm_nvrtc_tests
    python benchmarks/sass.py build/cuda/tests_cpp/lltm_nvrtc_tests --write  a new baseline

`make check-cuda-build` runs the first line. The program compiles kernels for sm_90, and nvdisasm
(pip: nvidia-cuda-nvdisasm) disassembles them. Counted are the instructions of a warp in a step: all
in the loop over steps, including branches that are not taken, the loop over weights in shared
memory as often as it runs, and no other loops in it, which rarely run: repeated polls, and the
exact GEMM for infinities.

Exits with 1 if a count is more than 3 % above the file or if registers spill, and with 77 if the
file was made with other versions of NVRTC or nvdisasm.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import instructions
from instructions import Counts, Run

BASELINE = Path(__file__).with_suffix(".json")
NVDISASM = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "nvdisasm"
Blocks = set[int]  # their first instructions


class Code:
    """A kernel's instructions, basic blocks and loops."""

    def __init__(self, disassembly: str) -> None:
        self.instructions: list[str] = []
        labels: dict[str, int] = {}
        for line in disassembly.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                labels[label[1]] = len(self.instructions)
            elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
                self.instructions.append(instruction[1])
        count = len(self.instructions)
        last = [k for k in range(count) if self.count_in([k], "BRA|EXIT|RET")]
        starts = sorted({0, *labels.values(), *(k + 1 for k in last)} - {count})
        self.blocks = {a: range(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True)}
        self.following = {
            start: self.follow(block[-1], labels) for start, block in self.blocks.items()
        }
        self.loops = self.find_loops()

    def count_in(self, indices: list[int] | range, operation: str) -> int:
        pattern = re.compile(rf"(@\S+ +)?({operation})")
        return sum(pattern.match(self.instructions[k]) is not None for k in indices)

    def count(self, blocks: Blocks, operation: str) -> int:
        return sum(self.count_in(self.blocks[start], operation) for start in blocks)

    def follow(self, last: int, labels: dict[str, int]) -> Blocks:
        text = self.instructions[last]
        target = re.search(r"BRA.*\((\.L_x_\d+)\)", text)
        ends = re.match(r"(BRA|EXIT|RET)(?!\.DIV)", text) and not re.match(r"BRA !?U?P", text)
        following = {labels[target[1]]} if target else set()
        return (following if ends else following | {last + 1}) & self.blocks.keys()

    def find_loops(self) -> list[Blocks]:
        """Natural loops, from dominators."""
        reached = [0]
        for block in reached:
            reached += [n for n in sorted(self.following[block]) if n not in reached]
        before = {n: {b for b in reached if n in self.following[b]} for n in reached}
        dominators = {n: set(reached) for n in reached} | {0: {0}}
        changed = True
        while changed:
            changed = False
            for n in reached[1:]:
                common = {n} | set.intersection(*(dominators[b] for b in before[n]))
                changed |= common != dominators[n]
                dominators[n] = common
        loops: dict[int, Blocks] = {}
        for end in reached:
            for head in self.following[end] & dominators[end]:
                loop = loops.setdefault(head, {head})
                to_add = [end]
                while to_add:
                    block = to_add.pop()
                    if block not in loop:
                        loop.add(block)
                        to_add += before[block]
        return list(loops.values())

    def step(self, mma: int) -> Counts:
        """Of a step with so many mma instructions."""
        steps = min((loop for loop in self.loops if self.count(loop, "BAR")), key=len)
        inner = [loop for loop in self.loops if loop < steps]
        rare = set().union(*(loop for loop in inner if not self.count(loop, "HMMA")))
        chunks = set().union(*(loop for loop in inner if self.count(loop, "HMMA"))) - rare
        once = steps - rare
        more = mma - self.count(once, "HMMA")
        rounds = more / self.count(chunks, "HMMA") if chunks else 0

        def total(operation: str) -> int:
            return round(self.count(once, operation) + rounds * self.count(chunks, operation))

        return {"instructions": total(""), "HMMA": total("HMMA"), "barriers": total("BAR")}


def output_of(*command: object, **environment: str) -> str:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def count(program: Path) -> Run:
    tools = {"nvdisasm": output_of(NVDISASM, "--version").split(" V")[-1].split()[0]}
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        filter_ = "--gtest_filter=Nvrtc.WritesKernels"
        printed = output_of(program.resolve(), filter_, LLTM_WRITE_KERNELS=folder)
        for text in printed.split("\nkernel ")[1:]:
            name, _, tools["NVRTC"], _, mma = text.split()[:5]
            (registers,) = re.findall(r"Used (\d+) registers", text)
            if " 0 bytes spill stores, 0 bytes spill loads" not in text:
                sys.exit(f"lltm: {name} spills registers:\n{text}")
            disassembly = output_of(NVDISASM, "-c", f"{folder}/{name}.cubin")
            counts[name] = Code(disassembly).step(int(mma))
            print(f"{name}: {registers} registers; per warp and step:", counts[name])
    return Run(tools, counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("program", type=Path, help="lltm_nvrtc_tests")
    parser.add_argument("--write", action="store_true", help="write the file, compare nothing")
    options = parser.parse_args()
    now = count(options.program)
    if options.write:
        BASELINE.write_text(instructions.as_json(now), encoding="utf-8")
        return 0
    status, lines = instructions.compare(instructions.read(BASELINE), now, BASELINE.name)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
