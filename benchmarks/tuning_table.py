"""Makes the tuning table in the sources, cpp/src/cuda/tuning_table.h, of the sweeps' results.

    python benchmarks/tuning_table.py --print results/sweep.jsonl     what one sweep says
    python benchmarks/tuning_table.py --write                         the table, of all in results/

For each GPU, cell, direction and size of an element, and each number of hidden units and rows that
was measured, the table has the fastest way to run: a number of tiles to a group and of nanoseconds
between two polls, or the stepwise engine. Of ways that are within two percent of the fastest it has
the plainest. Of two sweeps of the same kind of GPU the later one counts, by the name of its folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HEADER = ROOT / "cpp" / "src" / "cuda" / "tuning_table.h"
NEGLIGIBLE = 1.02

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


class Tuning(NamedTuple):
    """As in tuning.h. The plainest is the smallest: stepwise, then without sleeping."""

    poll_nanoseconds: int
    tiles: int


STEPWISE = Tuning(0, 0)


class Gpu(NamedTuple):
    capability: int
    multiprocessors: int
    name: str


class Kind(NamedTuple):
    """What problems of different sizes have in common."""

    gpu: Gpu
    cell: str
    direction: str
    bytes: int

    def text(self) -> str:
        return f"{self.gpu.name}, {self.cell}, {self.direction}, {self.bytes} bytes"


class Entry(NamedTuple):
    hidden: int
    batch: int
    tuning: Tuning


@dataclass(frozen=True)
class Row:
    """A line of a sweep."""

    kind: Kind
    hidden: int
    batch: int
    tuning: Tuning | None  # None: the engine's choice
    engine: str
    steps: int
    workspace_bytes: int
    same: bool
    seconds: float  # the median


def read(path: Path) -> list[Row]:
    """The lines of a sweep; the last one may be half written."""
    rows = []
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            rows.append(row_of(json.loads(line)))
        except json.JSONDecodeError as error:
            if number != len(lines):
                raise SystemExit(f"{path}, line {number}: {error}") from None
    return rows


def row_of(line: Mapping[str, Any]) -> Row:
    gpu = Gpu(line["gpu"]["capability"], line["gpu"]["multiprocessors"], line["gpu"]["name"])
    tuning = STEPWISE if line["engine"] == "stepwise" else None
    if "tiles" in line:
        tuning = Tuning(line["poll_nanoseconds"], line["tiles"])
    return Row(
        kind=Kind(gpu, line["cell"], line["direction"], BYTES[line["dtype"]]),
        hidden=line["H"],
        batch=line["B"],
        tuning=tuning,
        engine=line["engine"],
        steps=line["T"],
        workspace_bytes=line["workspace_bytes"],
        same=line["same"],
        seconds=statistics.median(line["seconds"]),
    )


# ---- the choice --------------------------------------------------------------


def choose(seconds: Mapping[Tuning, float]) -> Tuning:
    best = min(seconds.values())
    return min(tuning for tuning, value in seconds.items() if value <= NEGLIGIBLE * best)


def measured(rows: Iterable[Row]) -> dict[Kind, dict[tuple[int, int], dict[Tuning, float]]]:
    """Of each problem the seconds of the ways to run it; those with other results are left out.

    Problems that say something about the workspace alone, and those that the persistent engine does
    not take, are left out too.
    """
    groups: dict[tuple[Kind, int, int, int], dict[Tuning, float]] = defaultdict(dict)
    swept = set()
    for row in rows:
        problem = (row.kind, row.hidden, row.batch, row.steps)
        if row.tuning is not None and row.same:
            groups[problem].setdefault(row.tuning, row.seconds)
        if row.tuning not in (None, STEPWISE):
            swept.add(problem)
    found: dict[Kind, dict[tuple[int, int], dict[Tuning, float]]] = defaultdict(dict)
    for problem in sorted(swept):
        kind, hidden, batch, _ = problem
        found[kind][hidden, batch] = groups[problem]
    return found


def entries(problems: Mapping[tuple[int, int], Mapping[Tuning, float]]) -> list[Entry]:
    """In the order of hidden units, then of rows; of equal neighbours the last."""
    table: list[Entry] = []
    for (hidden, batch), seconds in sorted(problems.items()):
        entry = Entry(hidden, batch, choose(seconds))
        if table and table[-1].hidden == hidden and table[-1].tuning == entry.tuning:
            table.pop()
        table.append(entry)
    return table


def table_of(sweeps: Sequence[Sequence[Row]]) -> dict[Kind, list[Entry]]:
    """Of all sweeps, the later ones last.

    Of GPUs that the library takes for the same, whatever their names, the later one counts.
    """
    by_gpu: dict[tuple[int, int], dict[Kind, list[Entry]]] = {}
    for rows in sweeps:
        tables: dict[tuple[int, int], dict[Kind, list[Entry]]] = defaultdict(dict)
        for kind, problems in measured(rows).items():
            tables[kind.gpu[:2]][kind] = entries(problems)
        by_gpu.update(tables)
    return {kind: table for gpu in sorted(by_gpu) for kind, table in sorted(by_gpu[gpu].items())}


# ---- the header --------------------------------------------------------------


def header(table: Mapping[Kind, Sequence[Entry]]) -> str:
    lines = [
        "// Measured: benchmarks/tuning_table.py makes this of benchmarks/results/*/sweep.jsonl.",
        "#pragma once",
        "",
        '#include "cuda/tuning.h"',
        "",
        "#include <array>",
        "",
        "namespace lltm::cuda {",
        "",
    ]
    count = sum(len(found) for found in table.values())
    name = f"inline constexpr std::array<TuningEntry, {count}> kTuningTable ="
    if count == 0:
        lines.append(f"{name} {{}};")
    else:
        lines += ["// clang-format off", f"{name} {{{{"]
        for (gpu, cell, direction, size), found in table.items():
            lines.append(f"    // {gpu.name}")
            of_gpu = f"{{{gpu.capability}, {gpu.multiprocessors}}}"
            kind = f'{of_gpu}, "{cell}", Direction::{direction}, {size}'
            for hidden, batch, (poll, tiles) in found:
                lines.append(f"    {{{kind}, {hidden}, {batch}, {{{tiles}, {poll}}}}},")
        lines += ["}};", "// clang-format on"]
    return "\n".join([*lines, "", "}  // namespace lltm::cuda", ""])


def stored() -> str:
    """The header of all results in the repository."""
    return header(table_of([read(path) for path in sorted(RESULTS.glob("*/sweep.jsonl"))]))


# ---- for reading -------------------------------------------------------------


def text(tuning: Tuning) -> str:
    if tuning == STEPWISE:
        return "stepwise"
    sleeping = f", {tuning.poll_nanoseconds} ns" if tuning.poll_nanoseconds else ""
    return f"{tuning.tiles} tile{'s' if tuning.tiles > 1 else ''}{sleeping}"


def lines_of(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if not row.same:
            yield f"NOT THE SAME RESULTS: {row}"
    for kind, problems in measured(rows).items():
        yield f"{kind.text()}: choice; microseconds of all"
        for (hidden, batch), seconds in sorted(problems.items()):
            ways = "; ".join(f"{text(t)} {1e6 * s:.1f}" for t, s in sorted(seconds.items()))
            yield f"  H={hidden} B={batch}: {text(choose(seconds))}  ({ways})"
    workspaces: dict[tuple[Kind, int, int, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        by_engine = row.tuning is None or row.engine == "stepwise"
        if by_engine:
            problem = (row.kind, row.hidden, row.batch, f"T={row.steps}, {row.engine}")
            workspaces[problem][row.workspace_bytes >> 20] = row.seconds
    for (kind, hidden, batch, what), by_size in workspaces.items():
        if len(by_size) > 1:
            ways = "; ".join(f"{size} MiB {1e6 * s:.1f}" for size, s in sorted(by_size.items()))
            yield f"workspace, {kind.cell}, H={hidden} B={batch} {what}: {ways}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--print", type=Path, metavar="FILE", help="show what a sweep says")
    action.add_argument("--write", action="store_true", help="the table in the sources")
    options = parser.parse_args(arguments)
    if options.write:
        HEADER.write_text(stored())
        return
    if not options.print.is_file() or not (rows := read(options.print)):
        raise SystemExit(f"{options.print}: no sweep")
    print("\n".join(lines_of(rows)))


if __name__ == "__main__":
    main()
