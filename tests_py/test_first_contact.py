"""`make first-contact` on made-up machines: limits, failures, what is left.

The tools and the programs of the build are scripts here, which print what the real ones print.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import first_contact
import gpu_check
import gpu_kit
import gpu_tests
import processes
import pytest
import results_file
import smoke
import torch
from first_contact import Stage, Step
from support import ROOT, run_forked, run_python

SH = ("sh", "-c")
STAGES = (1, 2, 3, 4, 5)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KILL_SECONDS", 0.5)
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.02)


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: once it is there an hour has passed, so that nobody waits for what hangs."""
    path = tmp_path / "hanging"
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * path.exists())
    monkeypatch.setattr(processes, "time", clock)
    monkeypatch.setenv("HANGING", str(path))
    return path


def read(results: Path, number: int = 1) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((results / f"stage-{number}.json").read_text())
    return report


def states(results: Path, number: int = 1) -> dict[str, str]:
    return {step["name"]: step["state"] for step in read(results, number)["steps"]}


# ---- one stage ----------------------------------------------------------------


def test_what_fails_keeps_nothing_else_from_running(tmp_path: Path) -> None:
    stage = Stage(
        "made up",
        [
            Step("first", (*SH, "echo one"), limit=20),
            Step("fails", (*SH, "echo two; echo why >&2; exit 3"), limit=20),
            Step("is not there", ("no-such-program",), limit=20),
            Step("has no GPU", (*SH, "echo sorry, no GPU here"), limit=20),
            Step("takes long", (*SH, "echo three; sleep 1000"), limit=1),
            Step("last", (*SH, "echo $NAME"), limit=20, environment={"NAME": "four"}),
        ],
    )
    assert not first_contact.run_stage(1, stage, tmp_path)
    assert states(tmp_path) == {
        "first": "done",
        "fails": "failed",
        "is not there": "failed",
        "has no GPU": "failed",
        "takes long": "timed out",
        "last": "done",
    }
    reasons = [step["reason"] for step in read(tmp_path)["steps"]]
    assert reasons == [
        None,
        "exit status 3: why",
        "No such file or directory: no-such-program",
        "sorry, no GPU here",
        "more than 1 seconds",
        None,
    ]
    log = (tmp_path / "stage-1.txt").read_text()
    said = re.findall(r"^(one|two|three|four)$", log, re.MULTILINE)
    assert said == ["one", "two", "three", "four"]


def test_what_is_of_no_use_without_another_step_does_not_begin(tmp_path: Path) -> None:
    def stage(probe: str) -> Stage:
        steps = [
            Step("works", (probe,), limit=20),
            Step("long", ("true",), limit=20, needs="works"),
            Step("last", ("true",), limit=20),
        ]
        return Stage("made up", steps)

    assert first_contact.run_stage(1, stage("true"), tmp_path)
    assert not first_contact.run_stage(1, stage("false"), tmp_path)
    assert states(tmp_path) == {"works": "failed", "long": "not begun", "last": "done"}
    assert read(tmp_path)["steps"][1]["reason"] == "works: failed"
    assert first_contact.run_stage(1, stage("false"), tmp_path, chosen=["long"]), "it was asked for"


def test_a_stage_that_does_all_of_its_work_says_so(tmp_path: Path) -> None:
    stage = Stage(
        "made up",
        [Step("first", (*SH, "echo 1"), limit=20), Step("second", ("true",), limit=20)],
    )
    assert first_contact.run_stage(1, stage, tmp_path)
    report = read(tmp_path)
    assert report["ended"] is not None
    assert [step["state"] for step in report["steps"]] == ["done", "done"]


def test_a_step_that_is_run_again_replaces_what_was_said_of_it(tmp_path: Path) -> None:
    steps = [
        Step("first", ("false",), limit=20),
        Step("second", (*SH, f"test -e {tmp_path}/there"), limit=20),
    ]
    assert not first_contact.run_stage(1, Stage("made up", steps), tmp_path)
    (tmp_path / "there").touch()
    assert first_contact.run_stage(1, Stage("made up", steps), tmp_path, chosen=["second"])
    assert states(tmp_path) == {"first": "failed", "second": "done"}


def test_patience_makes_all_times_longer(tmp_path: Path) -> None:
    stage = Stage("made up", [Step("slow", (*SH, "sleep 0.3"), limit=0.1)])
    assert not first_contact.run_stage(1, stage, tmp_path, seconds=1)
    assert first_contact.run_stage(1, stage, tmp_path, seconds=1, patience=200)


def test_a_stage_ends_in_its_time(tmp_path: Path) -> None:
    steps = [Step(name, (*SH, "sleep 1000"), limit=50) for name in ("first", "second", "third")]
    assert not first_contact.run_stage(1, Stage("made up", steps), tmp_path, seconds=1.0)
    assert states(tmp_path) == {
        "first": "timed out",
        "second": "not begun",
        "third": "not begun",
    }


@pytest.mark.parametrize(
    ("limit", "stage_seconds", "least", "most"),
    [(900, 10_000, 400, 400), (9000, 1000, 1, 500), (900, 300, 0, 0)],
    ids=["its own limit", "what the stage has left", "nothing left"],
)
def test_a_program_that_measures_is_told_how_long(
    limit: float, stage_seconds: float, least: int, most: int, tmp_path: Path
) -> None:
    stage = Stage("made up", [Step("measures", (*SH, "echo $@", "sh"), limit=limit, spare=500)])
    assert first_contact.run_stage(1, stage, tmp_path, seconds=stage_seconds)
    (told,) = re.findall(r"^--seconds (\d+)$", (tmp_path / "stage-1.txt").read_text(), re.MULTILINE)
    assert least <= int(told) <= most
    assert read(tmp_path)["steps"][0]["command"][-2:] == ["--seconds", told]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, "waited for five minutes"
        time.sleep(0.02)


def test_what_a_step_has_started_ends_with_it(tmp_path: Path) -> None:
    """Also what does not listen to the request to end."""
    command = (
        f"trap '' TERM; (trap '' TERM; sleep 1000) & echo $! > {tmp_path}/pid; wait; sleep 1000"
    )
    stage = Stage("made up", [Step("stubborn", (*SH, command), limit=1)])
    assert not first_contact.run_stage(1, stage, tmp_path)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_alive(pid))


RUNS = """
import sys
from pathlib import Path
import first_contact
from first_contact import Stage, Step

steps = [
    Step("first", ("echo", "done with it"), limit=20),
    Step("second", ("sh", "-c", "echo $$; sleep 1000"), limit=50),
    Step("third", ("echo", "never"), limit=20),
]
with first_contact.signals_raise():
    first_contact.run_stage(1, Stage("made up", steps), Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_results_are_whole_where_it_is_ended_in_the_middle(
    number: signal.Signals, tmp_path: Path
) -> None:
    log = tmp_path / "stage-1.txt"
    with subprocess.Popen(
        (sys.executable, "-c", RUNS, str(tmp_path)),
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
        stderr=subprocess.PIPE,
    ) as process:
        wait_for(lambda: log.exists() and bool(re.search(r"^\d+$", log.read_text(), re.MULTILINE)))
        os.kill(process.pid, number)
        process.communicate(timeout=300)
    assert process.returncode != 0
    running = "running" if number == signal.SIGKILL else "cut off"
    assert states(tmp_path) == {"first": "done", "second": running}
    assert "done with it" in log.read_text()
    found = re.search(r"^(\d+)$", log.read_text(), re.MULTILINE)
    assert found is not None
    child = int(found[1])
    if number == signal.SIGKILL:
        os.killpg(child, signal.SIGKILL)  # nobody was left to do it
    wait_for(lambda: not is_alive(child))


def test_a_file_that_is_half_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    results_file.write_json(path, {"rows": 1})
    write_text = Path.write_text

    def half(path: Path, text: str) -> int:
        write_text(path, text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        results_file.write_json(path, {"rows": 2})
    assert json.loads(path.read_text()) == {"rows": 1}


# ---- what the output says ------------------------------------------------------

NCU = """\
==PROF== Connected to process 7
"ID","Kernel Name","Block Size","gpu__time_duration.sum","launch__grid_size",\
"lts__t_sectors_srcunit_tex_op_read.sum"
"","","","ns","","sector"
"0","lltm_persistent_forward","(256, 1, 1)","123,456","96","9,437,184"
"""


def test_figures_of_the_profiler() -> None:
    figures = first_contact.persistent_figures(steps=128, bytes_of_state=12288)(NCU)
    assert figures == {
        "Kernel Name": "lltm_persistent_forward",
        "gpu__time_duration.sum": 123456.0,
        "launch__grid_size": 96.0,
        "lts__t_sectors_srcunit_tex_op_read.sum": 9437184.0,
        "L2 read sectors a step": 73728.0,
        "reads of a state": 2.0,  # 96 thread blocks of 384 sectors each, twice
    }
    assert first_contact.profile_figures("==ERROR== no permission") == {}


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("[  PASSED  ] 60 tests.", {"passed": 60}),
        ("[  PASSED  ] 1 test.\n[  FAILED  ] 2 tests, listed below:", {"passed": 1, "failed": 2}),
        ("1 hung, 3 left out, 7 passed: A.b hung", {"hung": 1, "not begun": 3, "passed": 7}),
        (
            "==== 3 failed, 245 passed, 2 skipped in 9s ===",
            {"failed": 3, "passed": 245, "skipped": 2},
        ),
        (
            "[  PASSED  ] 60 tests.\n========= ERROR SUMMARY: 0 errors",
            {"passed": 60, "sanitizer errors": 0},
        ),
    ],
)
def test_figures_of_tests(text: str, figures: dict[str, int]) -> None:
    assert first_contact.test_figures(text) == figures


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (0, "an error: not serious", None),
        (0, "  skipped: no GPU here\n1 test", "skipped: no GPU here"),
        (1, "one\ntwo\n\n", "exit status 1: two"),
        (1, "", "exit status 1: it said nothing"),
        (2, "a.cpp:3:1: error: what\nstopped", "exit status 2: a.cpp:3:1: error: what"),
        (1, "CMake Error at a.cmake:7\nlater", "exit status 1: CMake Error at a.cmake:7"),
    ],
)
def test_why_a_step_failed(status: int, text: str, reason: str | None) -> None:
    assert first_contact.fault(status, text) == reason


# ---- all stages on a made-up machine ---------------------------------------------

# Each looks for the GPU as the real ones do, and is otherwise content.
SCRIPT = "#!/bin/sh\n[ -n \"$FAKE_GPU\" ] || {{ echo 'no GPU here' >&2; exit 1; }}\n{}\n"
TOOLS = {
    "nvidia-smi": "echo 'Made Up GPU 9'",
    "compute-sanitizer": "echo '[  PASSED  ] 60 tests.'; echo '==== ERROR SUMMARY: 0 errors'",
    "ncu": f"cat <<'END'\n{NCU}END",
}
PROGRAMS = {
    "build/gpu/tests_cpp/lltm_cuda_tests": "echo '60 tests'",
    "build/gpu/benchmarks/lltm_cuda_bench": "echo '[]'",
    "build/gpu/benchmarks/lltm_cuda_sweep": "echo '{\"H\": 768}'; echo swept >&2",
}
# Of the benchmarks' scripts, the ones that measure; what they are asked is in their JSON files.
MEASURES = """
import json, os, sys
if "--help" in sys.argv:
    sys.exit()
if not os.environ.get("FAKE_GPU"):
    sys.exit("no GPU here")
if "--json" in sys.argv:
    with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
        json.dump(sys.argv[1:], file)
print("3 passed")
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder whose programs are made up, as is what the PATH has."""
    root = tmp_path / "root"
    scripts = {f"bin/{name}": text for name, text in TOOLS.items()} | PROGRAMS
    for name, text in scripts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SCRIPT.format(text))
        path.chmod(0o755)
    (root / "bin/make").write_text("#!/bin/sh\necho '[9/9] Linking'\n")
    (root / "bin/make").chmod(0o755)
    measuring = [
        f"benchmarks/{name}.py" for name in ("gpu_check", "bench_cuda", "smoke", "gpu_tests")
    ]
    for name in measuring:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(MEASURES)
    (root / "benchmarks/tuning_table.py").touch()
    (root / "torch.py").write_text("raise ImportError('not for the name of the GPU')")
    monkeypatch.setattr(first_contact, "ROOT", root)
    monkeypatch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.delenv("FAKE_GPU", raising=False)
    return root


def loose(machine: Path) -> Path:
    """The folder of the files that are packed."""
    (folder,) = (machine / "build" / "first-contact").iterdir()
    return folder


def test_all_stages_leave_their_results(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GPU", "1")
    monkeypatch.setattr(first_contact, "LOG_BYTES", 1000)
    first_contact.main(["--results", str(tmp_path / "out")])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "summary.json",
        "results.tar.gz",
    }
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary.keys() == {f"stage-{number}" for number in STAGES}
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as archive:
        gpu_kit.extract(archive, tmp_path)
    (results,) = tmp_path.glob("20??-??-??-made-up-gpu-9")
    assert {path.name for path in results.iterdir()} == {
        *(f"stage-{number}.{kind}" for number in STAGES for kind in ("json", "txt")),
        *("device.json", "smoke.json", "times.json", "machine.json", "cuda.json", "sweep.jsonl"),
        *("native.json", "native-persistent.json", "pytest.json"),
        *("cuda-tutorial.json", "cuda-compiled.json"),
    }
    for number in STAGES:
        assert {*states(results, number).values()} == {"done"}
        assert summary[f"stage-{number}"] == read(results, number)
        assert (results / f"stage-{number}.txt").stat().st_size <= 1000
    figures = {step["name"]: step["figures"] for step in read(results, 5)["steps"]}
    assert figures["memcheck"] == {"passed": 60, "sanitizer errors": 0}
    profiles = [name for name in figures if name.startswith("ncu-")]
    assert len(profiles) == 6
    for name in profiles:
        assert figures[name]["gpu__time_duration.sum"] == 123456
        assert ("reads of a state" in figures[name]) == ("persistent" in name)
    assert (results / "sweep.jsonl").read_text() == '{"H": 768}\n'
    assert "swept" in (results / "stage-4.txt").read_text()
    assert "compiled" in json.loads((results / "cuda-compiled.json").read_text())
    # Nothing of this machine's folders is in what is stored.
    assert not any(str(machine) in path.read_text() for path in results.iterdir())


def test_each_stage_may_bring_back_its_own(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine that is new each time, to a folder of its own; they are of one run."""
    monkeypatch.setenv("FAKE_GPU", "1")
    for number in (1, 4):
        out = tmp_path / f"out-{number}"
        first_contact.main([f"--stage={number}", "--results", str(out)])
        shutil.rmtree(machine / "build" / "first-contact")
        with tarfile.open(out / "results.tar.gz") as archive:
            gpu_kit.extract(archive, tmp_path)
    (results,) = tmp_path.glob("20??-??-??-made-up-gpu-9")
    assert {path.name for path in results.glob("stage-*.json")} == {"stage-1.json", "stage-4.json"}
    assert (results / "sweep.jsonl").exists()


def test_what_is_known_comes_back_while_a_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a machine that is taken away, or a kill that nothing survives, costs seconds."""
    monkeypatch.setattr(first_contact, "PACK_SECONDS", 0.1)
    package = first_contact.Package(tmp_path / "day-gpu", tmp_path / "out")
    seen: list[str] = []

    def pack() -> None:
        package.pack()
        with tarfile.open(package.folder / "results.tar.gz") as archive:
            member = archive.extractfile("day-gpu/stage-1.txt")
            assert member is not None
            seen.append(member.read().decode())

            if "\nhalf\n" in seen[-1]:
                (tmp_path / "go-on").touch()

    command = f"echo half; until [ -e {tmp_path}/go-on ]; do sleep 0.02; done; echo whole"
    stage = Stage("made up", [Step("talks", (*SH, command), limit=60)])
    assert first_contact.run_stage(1, stage, package.results, pack=pack)
    assert any("\nhalf\n" in text and "\nwhole\n" not in text for text in seen)
    assert "\nwhole\n" in seen[-1]
    assert {path.name for path in package.folder.iterdir()} == {"summary.json", "results.tar.gz"}


def test_without_a_gpu_every_step_says_so(machine: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not everything was done"):
        first_contact.main(["--results", str(tmp_path / "out")])
    for number in STAGES:
        for step in read(loose(machine), number)["steps"]:
            expected = None if step["name"] in ("build", "table") else "no GPU here"
            if step["state"] == "not begun":
                expected = f"{'ncu' if 'ncu' in step['name'] else 'sanitizer'}-works: failed"
            assert step["reason"] == expected, step
    assert loose(machine).name.endswith("-no-gpu")


def test_a_dry_run_does_what_needs_no_gpu(machine: Path, tmp_path: Path) -> None:
    """The programs of the build list what they would do."""
    for name in PROGRAMS:
        (machine / name).write_text('#!/bin/sh\necho "$@" | grep -e list\n')
    first_contact.main(["--dry-run", "--results", str(tmp_path / "out")])
    results = loose(machine)
    assert states(results, 1) == {
        "device": "needs a GPU",
        "build": "done",
        "smoke": "done",
        "times": "done",
    }
    assert states(results, 2) == {
        "build": "done",
        "native": "needs a GPU",
        "native-persistent": "needs a GPU",
        "pytest": "needs a GPU",
    }
    assert states(results, 4) == {"build": "done", "sweep": "done", "table": "done"}
    assert states(results, 5) == {
        "build": "done",
        "sanitizer-works": "done",
        "memcheck": "done",
        "racecheck": "done",
        "bench-tutorial": "done",
        "bench-compiled": "done",
    }


def test_one_step_of_one_stage(machine: Path, tmp_path: Path) -> None:
    first_contact.main(["--stage=1", "--step=build", "--results", str(tmp_path / "out")])
    assert states(loose(machine)) == {"build": "done"}
    with pytest.raises(SystemExit):
        first_contact.main(["--stage=2", "--step=bench"])


# ---- the stages themselves --------------------------------------------------------


MEASURING = {
    **dict.fromkeys(("bench", "bench-tutorial", "bench-compiled"), "bench_cuda.py"),
    **dict.fromkeys(("native", "native-persistent", "pytest"), "gpu_tests.py"),
    "sweep": "sweep_cuda.cpp",
}


def test_the_stages_keep_to_eight_minutes() -> None:
    assert first_contact.STAGE_SECONDS <= 8 * 60
    measuring = set()
    for stage in first_contact.stages(Path("results")).values():
        for step in stage.steps:
            assert step.limit <= first_contact.STAGE_SECONDS
            if step.spare is not None:  # it ends by itself, before it is ended
                measuring.add(step.name)
                assert 0 < step.spare < step.limit
                source = (ROOT / "benchmarks" / MEASURING[step.name]).read_text()
                assert '"--seconds"' in source
    assert measuring == MEASURING.keys()


def test_the_most_important_comes_first() -> None:
    plan = first_contact.stages(Path("results"))
    names = {number: [step.name for step in stage.steps] for number, stage in plan.items()}
    assert names[1] == ["device", "build", "smoke", "times"]
    limits = [step.limit for step in plan[1].steps if step.name != "build"]
    assert sum(limits) <= 270, "five minutes, with half a minute for the kit's binaries"
    assert names[2][1:] == ["native", "native-persistent", "pytest"]
    assert [names[3][-1], names[4][-2]] == ["bench", "sweep"]
    works = {step.name: step.needs for step in plan[5].steps}
    assert works["memcheck"] == works["racecheck"] == "sanitizer-works"
    profiles = [name for name in works if name.startswith("ncu-")]
    assert {works[name] for name in profiles} == {None, "ncu-works"}
    assert names[5][-2:] == ["bench-tutorial", "bench-compiled"], "what compiles for minutes"
    assert not any("compile" in name for number in (1, 2, 3, 4) for name in names[number])


def test_the_commands_of_the_stages_name_what_exists() -> None:
    cmake = "".join(path.read_text() for path in ROOT.glob("*/CMakeLists.txt"))
    metrics = ",".join(first_contact.METRICS)
    for stage in first_contact.stages(Path("results")).values():
        for step in stage.steps:
            for words in (step.command, step.rehearsal or ()):
                for word in words:
                    if word.startswith(("benchmarks/", "tests_py/")):
                        assert (ROOT / word).is_file(), word
                    if word.startswith("build/gpu/"):
                        assert f"add_executable({Path(word).name}" in cmake, word
                if "benchmarks/bench_cuda.py" in words:
                    source = (ROOT / "benchmarks" / "bench_cuda.py").read_text()
                    options = [word for word in words if word.startswith("--") and word != "--help"]
                    assert all(f'"{option}"' in source for option in options)
        # Each may be the first on a machine.
        assert "build" in [step.name for step in stage.steps[:2]]
    assert "lts__t_sectors" in metrics
    assert "launch__registers" in metrics
    kernels = (ROOT / "cpp/src/cuda/kernel/persistent_gpu.h").read_text()
    kernels += (ROOT / "cpp/src/cuda/kernel/elementwise.cu").read_text()
    for stage in first_contact.stages(Path("results")).values():
        for step in stage.steps:
            if "--kernel-name" in step.command and step.command[0] == "ncu":
                kernel = step.command[step.command.index("--kernel-name") + 1]
                assert re.search(rf"\b{kernel}\(", kernels), kernel


# ---- the smoke test ---------------------------------------------------------------

# Stands in for the processes of smoke.py: one hangs, one is wrong, one says something else twice.
SMOKE = """#!/bin/sh
for word; do
  case $last in --engine) engine=$word;; --dtype) dtype=$word;; --results) results=$word;; esac
  last=$word
done
if [ $2 = time ]; then
  echo '{"forward, us a step": 1.5, "forward, all": [1.25, 1.5, 2.0]}'
  [ "$engine, $dtype" = "cuDNN's LSTM, bfloat16" ] || exit 0
  echo 'no such algorithm' >&2
  exit 3
fi
[ $engine-$dtype = persistent-float16 ] && touch $HANGING && sleep 1000
right=right; twice=true
[ $engine-$dtype = persistent-bfloat16 ] && right=wrong
[ $engine-$dtype = stepwise-bfloat16 ] && twice=false
cp $(dirname $0)/$right-$dtype $results
echo "{\\"same bits twice\\": $twice}"
echo "{\\"engine that ran\\": \\"$engine\\"}"
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small problem, on the CPU where the GPU was to compute."""
    monkeypatch.setattr(smoke, "CHECKED", (3, 2, 8))
    monkeypatch.setattr(smoke, "TIMED", (3, 2, 8))
    monkeypatch.setattr(smoke, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)


@pytest.fixture
def processes_of_smoke(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results."""
    for name, dtype in smoke.DTYPES.items():
        right = smoke.results("cpu", dtype, dtype)
        torch.save(right, tmp_path / f"right-{name}")
        torch.save({**right, "h_n": right["h_n"] + 2}, tmp_path / f"wrong-{name}")
    (tmp_path / "python").write_text(SMOKE)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path


def test_an_engine_that_hangs_or_is_wrong_is_named_and_the_rest_runs(
    processes_of_smoke: Path, hanging: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = processes_of_smoke / "smoke.json"
    with pytest.raises(SystemExit) as end:
        smoke.main(["check", "--json", str(path), "--limit=60"])
    faults = str(end.value).split("; ")
    assert faults[0] == "persistent, float16: more than 60 seconds"
    assert faults[1] == "stepwise, bfloat16: other bits in a second run"
    assert [fault.partition(" is off")[0] for fault in faults[2:]] == [
        "persistent, bfloat16: h_n",
        "persistent, bfloat16: h_n",
    ]
    known = json.loads(path.read_text())
    assert known["stepwise, float16"]["error beside the CPU, eps"] < 8
    assert known["stepwise, float16"].keys().isdisjoint({"fault"})
    figures = first_contact.smoke_figures(capsys.readouterr().out)
    assert figures["stepwise, float16: same bits twice"] == "True"
    assert figures["persistent, bfloat16: error beside stepwise, eps"] > 100


def test_times_are_kept_as_they_come(
    processes_of_smoke: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = processes_of_smoke / "times.json"
    with pytest.raises(SystemExit, match=r"^cuDNN's LSTM, bfloat16: exit status 3: no such algo"):
        smoke.main(["time", "--json", str(path)])
    known = json.loads(path.read_text())
    assert len(known) == 6
    assert all(figures["forward, us a step"] == 1.5 for figures in known.values())
    figures = first_contact.smoke_figures(capsys.readouterr().out)
    assert figures["cuDNN's LSTM, float16: forward, us a step"] == 1.5


def test_what_one_process_of_the_smoke_test_does(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results"
    for engine in smoke.ENGINES:
        words = ["--engine", engine, "--dtype", "bfloat16", "--results", str(path)]
        smoke.main(["check", *words])
        expected = smoke.results("cpu", torch.bfloat16, torch.float64)
        error, _ = smoke.worst(torch.load(path), expected)
        assert 0 < error < smoke.MOST_ERROR * torch.finfo(torch.bfloat16).eps
    assert capsys.readouterr().out.count('{"same bits twice": true}') == 2
    for engine in (*smoke.ENGINES, smoke.CUDNN):
        smoke.main(["time", "--engine", engine, "--dtype", "bfloat16"])
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        figures = [name for line in said for name in line if name.endswith("us a step")]
        one = ["forward", "forward of training", "backward"]
        both = [f"{name} of both directions" for name in one]
        assert [name.partition(",")[0] for name in figures] == one + both


def test_the_largest_error_is_that_of_what_is_no_number() -> None:
    right = {name: torch.ones(3) for name in "abc"}
    found = {**right, "b": torch.tensor([1, float("nan"), 1]), "c": torch.zeros(3)}
    error, name = smoke.worst(found, right)
    assert name == "b"
    assert math.isnan(error)


# ---- tests that hang -----------------------------------------------------------------

# Of tests that pass, fail, hang and end their process, as GoogleTest runs them.
NATIVE = """
import os, sys, time
names = ["one", "fails", "two", "hangs", "three", "crashes", "four", "skipped", "five"]
chosen = [w.split("=")[1] for w in sys.argv if w.startswith("--gtest_filter=")][0].split(":")
if "--gtest_list_tests" in sys.argv:
    print("A/Suite.")
    for name in names:
        print(f"  {name}  # GetParam() = 1")
    sys.exit()
assert "--gtest_fail_fast" in sys.argv
failed = []
for name in names:
    name = f"A/Suite.{name}"
    if name not in chosen:
        continue
    if failed:
        print(f"[  SKIPPED ] {name} (0 ms)")
        continue
    print(f"[ RUN      ] {name}", flush=True)
    if name.endswith("hangs"):
        time.sleep(1000)
    if name.endswith("crashes"):
        os.kill(os.getpid(), 11)
    failed = [name] if name.endswith("fails") else []
    result = "  FAILED " if failed else "  SKIPPED" if name.endswith("skipped") else "      OK "
    print(f"[{result} ] {name} (1 ms)".replace("OK  ]", "OK ]"), flush=True)
for name in failed:
    print(f"[  FAILED  ] {name}, where GetParam() = 1")
sys.exit(len(failed))
"""
PYTEST = """
import os, time
import pytest

def test_one(): pass

@pytest.mark.parametrize("shape", [(1, 2), (3, 4)], ids=str)
def test_shapes(shape): assert shape == (1, 2)

def test_warns():
    import warnings
    warnings.warn("not an error")

def test_hangs():
    open(os.environ["HANGING"], "w").close()
    time.sleep(1000)

def test_crashes(): os._exit(7)

@pytest.mark.skip(reason="PASSED over")
def test_skipped(): pass

def test_last(): pass
"""


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_native_test_that_hangs_or_fails_costs_itself_only(
    jobs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "tests"
    program.write_text(f"#!{sys.executable}\n{NATIVE}")
    program.chmod(0o755)
    path = tmp_path / "tests.json"
    words = ["native", str(program), f"--jobs={jobs}", "--timeout=2", "--json", str(path)]
    with pytest.raises(SystemExit, match=r"^1$"):
        gpu_tests.main(words)
    results = json.loads(path.read_text())
    assert {name.removeprefix("A/Suite."): result for name, result in results.items()} == {
        **dict.fromkeys(("one", "two", "three", "four", "five"), "passed"),
        "fails": "failed",
        "hangs": "hung",
        "crashes": "crashed (-11)",
        "skipped": "skipped",
    }
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("1 crashed, 1 failed, 1 hung, 5 passed, 1 skipped: ")
    assert "A/Suite.hangs hung" in last


def test_a_test_of_pytest_that_hangs_or_fails_costs_itself_only(
    tmp_path: Path, hanging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_made_up.py").write_text(PYTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    path = tmp_path / "tests.json"
    with pytest.raises(SystemExit, match=r"^1$"):
        gpu_tests.main(["pytest", "test_made_up.py", "--json", str(path)])
    results = json.loads(path.read_text())
    assert {name.partition("::test_")[2]: result for name, result in results.items()} == {
        **dict.fromkeys(("one", "shapes[(1, 2)]", "warns", "last"), "passed"),
        "shapes[(3, 4)]": "failed",
        "hangs": "hung",
        "crashes": "crashed (7)",
        "skipped": "skipped",
    }


def test_tests_that_do_not_begin_are_not_tried_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "tests"
    listing = "[ $1 = --gtest_list_tests ] && { echo 'Suite.'; echo '  one'; echo '  two'; exit; }"
    program.write_text(f"#!/bin/sh\n{listing}\necho 'skipped: no GPU here'; exit 77\n")
    program.chmod(0o755)
    with pytest.raises(SystemExit, match=r"^1$"):
        gpu_tests.main(["native", str(program)])
    assert "2 not begun: Suite.one not begun: skipped: no GPU here" in capsys.readouterr().out


def test_what_has_no_more_time_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "tests"
    program.write_text(f"#!{sys.executable}\n{NATIVE}")
    program.chmod(0o755)
    with pytest.raises(SystemExit, match=r"^1$"):
        gpu_tests.main(["native", str(program), "--seconds=-1"])
    assert capsys.readouterr().out.splitlines()[-1] == "9 left out"


def test_what_is_watched_ends_with_its_parent(tmp_path: Path) -> None:
    """Also where the parent is killed, which can end nothing."""
    child = f"echo $$ > {tmp_path}/pid; exec sleep 1000"
    watches = f"import processes; processes.watch(['sh', '-c', {child!r}], print, seconds=900)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    with subprocess.Popen((sys.executable, "-c", watches), env=environment) as process:
        wait_for(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
        process.kill()
    wait_for(lambda: not is_alive(int((tmp_path / "pid").read_text())))


# ---- what the machine has ----------------------------------------------------------


class FakeEvent:
    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = FakeEvent.clock

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.time - self.time


def takes(milliseconds: float) -> Any:
    def run(*arguments: object, **options: object) -> None:
        FakeEvent.clock += milliseconds

    return run


def fake_torch(available: bool) -> Any:
    tensor = SimpleNamespace(copy_=takes(0.5))
    tensor.to = lambda dtype: tensor
    cuda = SimpleNamespace(
        Event=FakeEvent,
        is_available=lambda: available,
        get_device_capability=lambda: (9, 0),
        get_device_properties=lambda index: SimpleNamespace(
            name="Made Up", multi_processor_count=132, total_memory=1 << 37, L2_cache_size=1 << 25
        ),
    )
    return SimpleNamespace(
        __version__="2.99",
        version=SimpleNamespace(cuda="13.0"),
        cuda=cuda,
        uint8="torch.uint8",
        bfloat16="torch.bfloat16",
        float16="torch.float16",
        randint=lambda *_, **__: tensor,
        randn=lambda *_, **__: tensor,
        empty_like=lambda _: tensor,
        mm=takes(2.0),
    )


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in (*gpu_check.TOOLS, "nvidia-smi"):
        (folder / tool).write_text(f"#!/bin/sh\necho '{tool}, 2005-2026'\necho 'version 1.2'\n")
        (folder / tool).chmod(0o755)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{', '.join('x' * len(gpu_check.SMI))}'\n")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_the_check_says_what_the_machine_can_do(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "torch", fake_torch(available=True))
    gpu_check.main(["--json", str(tmp_path / "machine.json")])
    known = json.loads((tmp_path / "machine.json").read_text())
    assert known["tools"] == dict.fromkeys(gpu_check.TOOLS, "version 1.2")
    gpu = known["GPU"]
    assert gpu["name"] == "Made Up"
    assert gpu["busy"]["clocks.sm"] == "x"
    rates = {name: rate["per_second"] for name, rate in gpu["rates"].items()}
    assert rates == {
        "copy, B": pytest.approx(2 * 2**30 / 0.5e-3),
        "product, bfloat16, FLOP": pytest.approx(2 * 8192**3 / 2e-3),
        "product, float16, FLOP": pytest.approx(2 * 8192**3 / 2e-3),
    }


def test_the_check_says_what_is_missing(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "torch", fake_torch(available=False))
    monkeypatch.setenv("PATH", str(tools))
    (tools / "ncu").unlink()
    with pytest.raises(SystemExit, match=r"^no ncu here; no GPU here$"):
        gpu_check.main(["--json", str(tmp_path / "machine.json")])
    assert json.loads((tmp_path / "machine.json").read_text())["tools"]["ncu"] is None


def test_the_scripts_run_as_programs(tmp_path: Path) -> None:
    for name in (
        "first_contact",
        "gpu_check",
        "gpu_figures",
        "gpu_kit",
        "gpu_tests",
        "smoke",
        "tuning_table",
    ):
        runs = run_forked if name in ("gpu_check", "smoke") else run_python  # the two with torch
        run = runs(str(ROOT / "benchmarks" / f"{name}.py"), "--help", cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert textwrap.dedent(run.stdout).startswith("usage:")
