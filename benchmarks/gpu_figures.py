"""What `make first-contact` measured, for docs/cuda.md, and whether it speaks for the default.

    python benchmarks/gpu_figures.py --print benchmarks/results/DAY-GPU    of one run
    python benchmarks/gpu_figures.py --write                               docs/cuda.md, of all

--print also says what speaks against the persistent engine as the default: a fault of the smoke
test, a test of it that did not pass, a direction and dtype in which it is slower.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "cuda.md"
BEGIN, END = "<!-- Made by benchmarks/gpu_figures.py. -->\n", "<!-- Until here. -->\n"
UNIT = ", us a step"
WHATS = ("forward", "forward of training", "backward")


def known(run: Path, name: str) -> dict[str, Any]:
    """A file of a run; nothing where the run was cut short before it."""
    path = run / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def table(run: Path) -> Iterator[str]:
    day, gpu = run.name[:10], known(run, "device").get("GPU", {}).get("name", run.name[11:])
    yield f"{gpu}, {day}: microseconds a step, T = 1024, B = 16, H = I = 768, medians of nine."
    yield ""
    yield f"| engine, dtype | {' | '.join(WHATS)} |"
    yield f"|---{'|---' * len(WHATS)}|"
    for name, figures in known(run, "times").items():
        values = [figures.get(f"{what}{UNIT}") for what in WHATS]
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def runs() -> list[Path]:
    return sorted(path.parent for path in RESULTS.glob("*/times.json"))


def page(text: str, of: Sequence[Path]) -> str:
    """The page with the figures of these runs."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE}: expected a line {BEGIN.strip()} and a line {END.strip()}")
    lines = [line for run in of for line in table(run)] or ["No GPU has been measured yet.", ""]
    return "".join([before, begin, "\n", *(f"{line}\n" for line in lines), end, after])


def against(run: Path) -> Iterator[str]:
    """What speaks against the persistent engine as the default, where there is a GPU like this."""
    smoke, times = known(run, "smoke"), known(run, "times")
    tests = known(run, "native-persistent")
    for name in ("persistent, float16", "persistent, bfloat16"):
        if name not in smoke:
            yield f"{name}: no smoke test"
        elif "fault" in smoke[name]:
            yield f"{name}: {smoke[name]['fault']}"
        elif smoke[name].get("engine that ran") != "persistent":
            yield f"{name}: nothing shows that it ran"
        for what in WHATS:
            ours = times.get(name, {}).get(what + UNIT)
            others = times.get(name.replace("persistent", "stepwise"), {}).get(what + UNIT)
            if ours is None or others is None:
                yield f"{name}: {what} was not measured"
            elif ours > others:
                yield f"{name}: {what} takes {ours:.2f} us a step, stepwise {others:.2f}"
    if not tests:
        yield "its tests did not run"
    for step in known(run, "stage-2").get("steps", []):
        if step["name"] == "native-persistent" and step["state"] != "done":
            yield f"its tests: {step['state']}: {step['reason']}"
    for name, result in tests.items():
        if result not in ("passed", "skipped"):
            yield f"{name}: {result}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--print", type=Path, metavar="FOLDER", help="show what a run says")
    action.add_argument("--write", action="store_true", help="the figures in docs/cuda.md")
    options = parser.parse_args(arguments)
    if options.write:
        PAGE.write_text(page(PAGE.read_text(), runs()))
        return
    if not options.print.is_dir():
        raise SystemExit(f"{options.print}: no results")
    print("\n".join(table(options.print)))
    reasons = list(against(options.print))
    print("\n".join(f"against the persistent engine as the default: {why}" for why in reasons))
    if not reasons:
        print(
            "The persistent engine may be the default: kCudaPersistent of cpp/src/common/backends.cpp"
        )


if __name__ == "__main__":
    main()
