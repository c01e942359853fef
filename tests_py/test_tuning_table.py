"""The tuning table in the sources: that a script makes it of what was measured, and how."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tuning_table
from support import ROOT

H200 = {"name": "NVIDIA H200", "capability": 90, "multiprocessors": 132}
A100 = {"name": "NVIDIA A100", "capability": 80, "multiprocessors": 108}


def line(
    hidden: int,
    batch: int,
    milliseconds: float,
    tiles: int | None = None,
    poll: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """Without tiles, of the stepwise engine."""
    engine: dict[str, Any] = {"engine": "stepwise"}
    if tiles is not None:
        engine = {"engine": "persistent", "tiles": tiles, "poll_nanoseconds": poll}
    return {
        "gpu": H200,
        "cell": "lstm",
        "direction": "forward",
        "dtype": "bfloat16",
        "T": 256,
        "B": batch,
        "I": hidden,
        "H": hidden,
        **engine,
        "workspace_bytes": 32 << 20,
        "same": True,
        "seconds": [1e-3 * milliseconds * factor for factor in (0.5, 1, 30)],
        **more,
    }


def sweep(path: Path, lines: Iterable[dict[str, Any]]) -> list[tuning_table.Row]:
    path.write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    return tuning_table.read(path)


def chosen(path: Path, *lines: dict[str, Any]) -> dict[tuple[int, int], tuning_table.Tuning]:
    """By hidden units and rows."""
    (table,) = tuning_table.table_of([sweep(path / "sweep.jsonl", lines)]).values()
    return {(hidden, batch): tuning for hidden, batch, tuning in table}


def test_of_gpus_that_the_library_takes_for_the_same_the_later_one_counts(tmp_path: Path) -> None:
    """An H100 and an H200: two entries of one kind would be in no order."""
    h100 = {**H200, "name": "NVIDIA H100"}
    first, second = (
        sweep(tmp_path / name, [line(768, 16, 2, gpu=gpu), line(768, 16, 1, tiles, gpu=gpu)])
        for name, gpu, tiles in (("a", H200, 1), ("b", h100, 2))
    )
    ((kind, table),) = tuning_table.table_of([first, second]).items()
    assert kind.gpu.name == "NVIDIA H100"
    assert [entry.tuning.tiles for entry in table] == [2]


def test_the_table_in_the_sources_is_that_of_the_stored_results() -> None:
    """If not: python benchmarks/tuning_table.py --write."""
    assert tuning_table.HEADER.read_text() == tuning_table.stored()


def test_the_fastest_way_is_chosen_by_its_median(tmp_path: Path) -> None:
    lines = [line(768, 16, 2.0), line(768, 16, 1.0, tiles=1), line(768, 16, 1.1, tiles=2)]
    assert chosen(tmp_path, *lines) == {(768, 16): (0, 1)}
    lines.append(line(768, 16, 0.9, tiles=2, poll=20))
    assert chosen(tmp_path, *lines) == {(768, 16): (20, 2)}
    lines = [line(768, 16, 1.0), line(768, 16, 2.0, tiles=1)]
    assert chosen(tmp_path, *lines) == {(768, 16): tuning_table.STEPWISE}


def test_of_ways_that_take_the_same_time_the_plainest_is_chosen(tmp_path: Path) -> None:
    lines = [line(768, 16, 1.01, tiles=1), line(768, 16, 1.0, tiles=1, poll=40)]
    assert chosen(tmp_path, line(768, 16, 2.0), *lines) == {(768, 16): (0, 1)}
    assert chosen(tmp_path, line(768, 16, 1.015), *lines) == {(768, 16): tuning_table.STEPWISE}
    assert chosen(tmp_path, line(768, 16, 1.03), *lines) == {(768, 16): (0, 1)}


def test_ways_with_other_results_are_left_out(tmp_path: Path) -> None:
    lines = [line(768, 16, 1.0, tiles=1), line(768, 16, 0.5, tiles=2, same=False)]
    assert chosen(tmp_path, *lines) == {(768, 16): (0, 1)}
    rows = sweep(tmp_path / "sweep.jsonl", lines)
    assert sum("NOT THE SAME" in text for text in tuning_table.lines_of(rows)) == 1


def test_what_says_nothing_of_the_way_is_left_out(tmp_path: Path) -> None:
    """The workspace's measurements, and what the persistent engine does not take."""
    workspace = {"gpu": H200, **line(512, 64, 0.1), "engine": "persistent", "T": 1024}
    lines = [workspace, line(1536, 8, 1.0), line(768, 16, 1.0, tiles=4)]
    assert chosen(tmp_path, *lines) == {(768, 16): (0, 4)}


def test_of_equal_neighbours_the_one_with_most_rows_stays(tmp_path: Path) -> None:
    found = chosen(
        tmp_path,
        *(line(768, batch, 1.0, tiles=1) for batch in (1, 8, 16)),
        line(768, 32, 1.0, tiles=2),
        line(768, 64, 1.0, tiles=1),
        line(1024, 64, 1.0, tiles=1),
    )
    assert found == {(768, 16): (0, 1), (768, 32): (0, 2), (768, 64): (0, 1), (1024, 64): (0, 1)}


def test_the_later_sweep_of_a_gpu_counts(tmp_path: Path) -> None:
    sweeps = [
        sweep(tmp_path / "a", [line(768, 16, 1, tiles=1), line(512, 16, 1, tiles=1)]),
        sweep(tmp_path / "b", [line(768, 16, 1, tiles=4, gpu=A100)]),
        sweep(tmp_path / "c", [line(768, 16, 1, tiles=2)]),
    ]
    table = tuning_table.table_of(sweeps)
    assert [(kind.gpu.name, entries) for kind, entries in table.items()] == [
        ("NVIDIA A100", [(768, 16, (0, 4))]),
        ("NVIDIA H200", [(768, 16, (0, 2))]),
    ]


def test_a_line_that_is_half_written_may_only_be_the_last(tmp_path: Path) -> None:
    whole = json.dumps(line(768, 16, 1.0, tiles=1))
    path = tmp_path / "sweep.jsonl"
    path.write_text(f"{whole}\n{whole[:50]}")
    assert len(tuning_table.read(path)) == 1
    path.write_text(f"{whole}\n{whole[:50]}\n{whole}\n")
    with pytest.raises(SystemExit, match=r"sweep.jsonl, line 2: "):
        tuning_table.read(path)


USES_THE_TABLE = """
#include "table.h"
using namespace lltm::cuda;
constexpr auto forward = [](GpuKind gpu, int hidden, int batch) {
  return find_tuning(kTuningTable, gpu, "lstm", Direction::forward, 2, hidden, batch);
};
static_assert(kTuningTable.size() == 5);
static_assert(forward({90, 132}, 768, 16) == Tuning{1, 20});
static_assert(forward({90, 132}, 700, 17) == Tuning{0, 0});
static_assert(forward({90, 132}, 768, 65) == std::nullopt);
static_assert(forward({80, 108}, 768, 1) == Tuning{4, 0});
static_assert(
    find_tuning(kTuningTable, {90, 132}, "lstm", Direction::backward, 2, 512, 1) == Tuning{2, 0});
static_assert(
    find_tuning(kTuningTable, {90, 132}, "gru", Direction::forward, 2, 768, 1) == Tuning{4, 40});
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_header_is_what_the_engine_reads(tmp_path: Path) -> None:
    lines = [
        line(768, 16, 1.0, tiles=1, poll=20),
        line(768, 64, 1.0),
        line(768, 64, 2.0, tiles=4),
        line(768, 16, 1.0, tiles=4, gpu=A100),
        line(512, 8, 1.0, tiles=2, direction="backward"),
        line(768, 16, 1.0, tiles=4, poll=40, cell="gru"),
    ]
    table = tuning_table.table_of([sweep(tmp_path / "sweep.jsonl", lines)])
    (tmp_path / "table.h").write_text(tuning_table.header(table))
    (tmp_path / "uses.cpp").write_text(USES_THE_TABLE)
    subprocess.run(
        ("c++", "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'cpp/src'}", "uses.cpp"),
        cwd=tmp_path,
        check=True,
    )


def test_what_a_sweep_says_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.jsonl"
    sizes = [{"workspace_bytes": size << 20, "T": 1024} for size in (8, 32)]
    sweep(
        path,
        [
            line(768, 16, 2.0),
            line(768, 16, 1.0, tiles=1, poll=20),
            *(line(512, 64, 3.0, **size) for size in sizes),
        ],
    )
    tuning_table.main(["--print", str(path)])
    text = capsys.readouterr().out
    assert "NVIDIA H200, lstm, forward, 2 bytes: choice; microseconds of all" in text
    assert "H=768 B=16: 1 tile, 20 ns  (stepwise 2000.0; 1 tile, 20 ns 1000.0)" in text
    assert "workspace, lstm, H=512 B=64 T=1024, stepwise: 8 MiB 3000.0; 32 MiB 3000.0" in text
    with pytest.raises(SystemExit, match="no sweep"):
        tuning_table.main(["--print", str(tmp_path / "none.jsonl")])
