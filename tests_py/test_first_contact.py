"""`make first-contact` and `make gpu-kit` on made-up machines: limits, failures, what is left.

The tools and the programs of the build are scripts here, which print what the real ones print.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import first_contact
import gpu_check
import gpu_kit
import pytest
import results_file
from first_contact import Stage, Step
from support import ROOT

SH = ("sh", "-c")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_contact, "KILL_SECONDS", 0.5)


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
    stage = Stage("made up", [Step("slow", (*SH, "sleep 1"), limit=0.1)])
    assert not first_contact.run_stage(1, stage, tmp_path, seconds=1)
    assert first_contact.run_stage(1, stage, tmp_path, seconds=1, patience=200)


def test_a_stage_ends_in_its_time(tmp_path: Path) -> None:
    steps = [Step(name, (*SH, "sleep 1000"), limit=50) for name in ("first", "second", "third")]
    assert not first_contact.run_stage(1, Stage("made up", steps), tmp_path, seconds=2.0)
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
        ("75% tests passed, 2 tests failed out of 8", {"tests": 8, "failed": 2}),
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
        (0, "\t 20 - cuda.0 (Skipped)", "20 - cuda.0 (Skipped)"),
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
    "ctest": "echo '100% tests passed, 0 tests failed out of 9'",
}
PROGRAMS = {
    "build/gpu/tests_cpp/lltm_cuda_tests": "echo '60 tests'",
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
    measuring = ("benchmarks/gpu_check.py", "benchmarks/bench_cuda.py", "pytest/__main__.py")
    for name in measuring:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(MEASURES)
    (root / "benchmarks/tuning_table.py").touch()
    (root / "pytest/__init__.py").touch()
    monkeypatch.setattr(first_contact, "ROOT", root)
    monkeypatch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.delenv("FAKE_GPU", raising=False)
    return root


def test_all_stages_leave_their_results(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_GPU", "1")
    first_contact.main([])
    (results,) = (machine / "benchmarks" / "results").glob("20??-??-??-made-up-gpu-9")
    assert {path.name for path in results.iterdir()} == {
        *(f"stage-{number}.{kind}" for number in (1, 2, 3, 4) for kind in ("json", "txt")),
        *("machine.json", "cuda.json", "cuda-compiled.json", "sweep.jsonl"),
    }
    for number in (1, 2, 3, 4):
        assert {*states(results, number).values()} == {"done"}
    figures = {step["name"]: step["figures"] for step in read(results, 3)["steps"]}
    assert figures["memcheck"] == {"passed": 60, "sanitizer errors": 0}
    profiles = [name for name in figures if name.startswith("ncu-")]
    assert len(profiles) == 6
    for name in profiles:
        assert figures[name]["gpu__time_duration.sum"] == 123456
        assert ("reads of a state" in figures[name]) == ("persistent" in name)
    assert (results / "sweep.jsonl").read_text() == '{"H": 768}\n'
    assert "swept" in (results / "stage-4.txt").read_text()
    assert "--only-compile" in json.loads((results / "cuda-compiled.json").read_text())
    assert str(results) in capsys.readouterr().out
    # Nothing of this machine's folders is in what is stored.
    assert not any(str(machine) in path.read_text() for path in results.iterdir())


def test_without_a_gpu_every_step_says_so(machine: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not everything was done"):
        first_contact.main(["--results", str(tmp_path / "results")])
    for number in (1, 2, 3, 4):
        for step in read(tmp_path / "results", number)["steps"]:
            of_files = step["name"] in ("build", "table")
            assert step["reason"] == (None if of_files else "no GPU here"), step
    assert not (machine / "benchmarks" / "results").exists()


def test_a_dry_run_does_what_needs_no_gpu(machine: Path, tmp_path: Path) -> None:
    """The programs of the build list what they would do."""
    for name in PROGRAMS:
        (machine / name).write_text('#!/bin/sh\necho "$@" | grep -e list\n')
    first_contact.main(["--dry-run", "--results", str(tmp_path / "results")])
    assert states(tmp_path / "results", 1) == {
        "machine": "needs a GPU",
        "build": "done",
        "ctest": "done",
        "pytest": "needs a GPU",
    }
    assert states(tmp_path / "results", 3) == {
        "build": "done",
        "memcheck": "done",
        "racecheck": "done",
        "bench-compiled": "done",
    }
    assert states(tmp_path / "results", 4) == {
        "build": "done",
        "sweep": "done",
        "table": "done",
    }


def test_one_step_of_one_stage(machine: Path, tmp_path: Path) -> None:
    first_contact.main(["--stage=1", "--step=build", "--results", str(tmp_path / "results")])
    assert states(tmp_path / "results") == {"build": "done"}
    with pytest.raises(SystemExit):
        first_contact.main(["--stage=2", "--step=pytest"])


# ---- the stages themselves --------------------------------------------------------


MEASURING = {
    "bench": "bench_cuda.py",
    "bench-compiled": "bench_cuda.py",
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
    kernels = (ROOT / "cpp/src/cuda/kernel/persistent.cu").read_text()
    kernels += (ROOT / "cpp/src/cuda/kernel/elementwise.cu").read_text()
    for stage in first_contact.stages(Path("results")).values():
        for step in stage.steps:
            if "--kernel-name" in step.command and step.command[0] == "ncu":
                kernel = step.command[step.command.index("--kernel-name") + 1]
                assert re.search(rf"\b{kernel}\(", kernels), kernel


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


# ---- the kit ----------------------------------------------------------------------


@pytest.fixture
def indexes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What the package indexes hold, of so many bytes each."""

    def hold(size: int) -> None:
        def fetch(folder: Path, *_: object) -> None:
            folder.mkdir(parents=True)
            (folder / "source").write_bytes(bytes(size))

        monkeypatch.setattr(gpu_kit, "fetch_googletest", fetch)
        monkeypatch.setattr(gpu_kit, "fetch_packages", fetch)

    return hold


def test_the_kit_is_made_as_a_whole(
    indexes: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "build" / "kit"
    indexes(1 << 20)
    gpu_kit.main([str(folder)])
    assert {path.name for path in folder.iterdir()} == {"googletest", "site-packages"}
    assert "2.0 MiB, for Python 3.12" in capsys.readouterr().out
    indexes(16 << 20)
    with pytest.raises(SystemExit, match=r"^32.0 MiB: the kit may have 30 MiB$"):
        gpu_kit.main([str(folder)])
    assert gpu_kit.mebibytes(folder) == 2, "the one before is left as it was"
    indexes(2 << 20)
    gpu_kit.main([str(folder)])
    assert gpu_kit.mebibytes(folder) == 4
    assert [path.name for path in folder.parent.iterdir()] == ["kit"]


def test_the_kit_replaces_no_other_folder(indexes: Callable[[int], None], tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    indexes(1)
    with pytest.raises(SystemExit, match="expected a folder that this script made"):
        gpu_kit.main([str(tmp_path)])
    assert (tmp_path / "precious").exists()


def test_the_makefile_takes_the_kit_by_itself(tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    (kit / "googletest").mkdir(parents=True)
    (kit / "site-packages" / "nlohmann_json").mkdir(parents=True)
    make = shutil.which("make")
    assert make is not None
    for folder, count in ((kit, 3), (tmp_path / "none", 0)):
        run = subprocess.run(
            (make, "--dry-run", "build-gpu", f"GPU_KIT={folder}", f"PYTHON={sys.executable}"),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.count(str(folder)) == count, run.stdout


def test_the_scripts_run_as_programs() -> None:
    for name in ("first_contact", "gpu_check", "gpu_kit", "tuning_table"):
        script = str(ROOT / "benchmarks" / f"{name}.py")
        run = subprocess.run(
            (sys.executable, script, "--help"), capture_output=True, text=True, check=True
        )
        assert textwrap.dedent(run.stdout).startswith("usage:")
