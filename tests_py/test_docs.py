"""Documentation: code, commands, links, site."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch.nn.utils.rnn import pack_sequence

import lltm

ROOT = support.ROOT
DOCS = ROOT / "docs"
FORECAST = ROOT / "examples" / "forecast" / "README.md"
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted(DOCS.glob("*.md")),
    FORECAST,
]
# Separate tests run these projects.
PROJECTS = (FORECAST, DOCS / "your-own-library.md")
# Only their links are tested.
OTHER_PAGES = [
    *sorted({*ROOT.glob("*.md")} - {*PAGES}),
    *(ROOT / "benchmarks").rglob("*.md"),
]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name)


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """Path from the first-line comment, if any."""
        match = re.match(r"(?://|#) ([\w./]+\.\w+)$", self.text, re.MULTILINE)
        return match[1] if match else None


FENCED = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@functools.cache
def blocks(page: Path) -> list[Block]:
    return [Block(m[2], textwrap.dedent(m[3])) for m in FENCED.finditer(page.read_text())]


def texts(page: Path, language: str) -> list[str]:
    """Blocks that are no files."""
    return [b.text for b in blocks(page) if b.language == language and b.file is None]


@each_page
def test_every_block_has_a_language_that_is_tested(page: Path) -> None:
    """`text` is not tested; Sphinx directives have braces."""
    for block in blocks(page):
        tested = block.language in ("python", "cpp", "cmake", "sh", "text") or block.file
        assert tested or block.language.startswith("{"), block
    outside = FENCED.sub("", page.read_text())
    assert not re.search(r"\n\n {4,}\S", outside), "an indented block: a fence names its language"


# These pages start compilers.
SLOW = {"compile.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=pytest.mark.slow if page.name in SLOW else ())
        for page in PAGES
        if texts(page, "python") and page != FORECAST
    ],
)
def test_the_python_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """Runs all blocks as one script, in a separate process, with warnings."""
    script = tmp_path / "script.py"
    script.write_text("\n".join(texts(page, "python")))
    run: Any = support.run_python if page.name in SLOW else support.run_forked
    run(str(script), cwd=tmp_path)


PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(app LANGUAGES CXX)
add_executable(app main.cpp)
"""

FIND_PACKAGE = next(t for p in PAGES for t in texts(p, "cmake") if "find_package(lltm" in t)
CONFIGURE = next(t for p in PAGES for t in texts(p, "sh") if "cmake -S app" in t)


def run_commands(commands: str, folder: Path, **environment: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, **environment}
    support.run(["bash", "-euxc", commands], env=env, cwd=folder)  # -x prints the commands


def code(language: str) -> list[Any]:
    return [pytest.param(text, id=name(page)) for page in PAGES for text in texts(page, language)]


@pytest.mark.slow
@pytest.mark.parametrize("program", code("cpp"))
def test_a_cpp_block_is_a_program_that_runs(program: str, tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "CMakeLists.txt").write_text(PROJECT + FIND_PACKAGE)
    (app / "main.cpp").write_text(program)
    run_commands(f"{CONFIGURE}\ncmake --build app/build\napp/build/app", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("text", code("cmake"))
def test_a_cmake_block_configures(text: str, tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "CMakeLists.txt").write_text(PROJECT + text)
    (app / "main.cpp").touch()
    # This source tree replaces the release.
    run_commands(f"{CONFIGURE.rstrip()} -DFETCHCONTENT_SOURCE_DIR_LLTM='{ROOT}'", tmp_path)


@pytest.mark.slow
def test_the_users_own_library_builds_and_passes_its_tests(tmp_path: Path) -> None:
    """The page contains all files and commands."""
    page = DOCS / "your-own-library.md"
    (tmp_path / "lltm").symlink_to(ROOT)
    for block in blocks(page):
        if block.file:
            path = tmp_path / "softcap" / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    site = str(tmp_path / "site")
    run_commands(
        "\n".join(texts(page, "sh")),
        tmp_path / "softcap",
        PIP_TARGET=site,
        PIP_NO_DEPS="1",
        PYTHONPATH=site,
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="compiles with pkg-config")
@pytest.mark.skipif(
    Path(torch.__file__).parents[1] != Path(lltm.cmake_prefix_path).parent,
    reason="lltm.pc of the wheel names the torch beside it, and there is none here",
)
def test_a_program_is_compiled_with_pkg_config(tmp_path: Path) -> None:
    (text,) = (t for t in texts(DOCS / "install.md", "sh") if "pkg-config" in t)
    (tmp_path / "app.cpp").write_text(texts(ROOT / "README.md", "cpp")[0])
    run_commands(f"{text.replace('/path/to/prefix', lltm.cmake_prefix_path)}./app", tmp_path)
    assert (tmp_path / "layer.safetensors").is_file()


def lines(page: Path) -> list[str]:
    """Lines are joined, without comments."""
    text = "".join(texts(page, "sh")).replace("\\\n", " ")
    return [" ".join(re.sub(r"\s#.*", "", line).split()) for line in text.splitlines()]


# Every command line is in one of these three lists.
RUN = [
    r"python -m lltm",
    r"python -m lltm\.benchmark --quick",
    r"python -m lltm\.benchmark --shapes 100,16,32,128 --dtype float32",
    r"python -m lltm\.explain.*",
]
RUN_BY = {
    r"make (test|lint)": ".ci/run",
    r"make (demo|test-accuracy)": ".ci/nightly",
    r"(cmake|cmake --build|ctest) --preset default.*": "make test",
    r"pip install (torch==2\.13\.0 )?scikit-build-core .*": "make test",
    r"pip install --no-build-isolation \.": "make test",
    r"pip install --no-build-isolation '\.\[test\]' && pytest .*": "make test",
    r"pip install --no-build-isolation '\.\[examples\]'": "make test-slow",
    r"pytest --numprocesses 2": "make test",
    r"python tests_py/accuracy\.py .*": "make test-accuracy",
    r"python -m lltm\.benchmark --model \S+": "pytest tests_py/test_benchmark.py",
    r"python -m lltm\.benchmark --tutorial": "make bench",
    r"python -m lltm\.benchmark( --shapes \S+ \d.*)?": "pytest tests_py/test_benchmark.py",
    r"python benchmarks/chart\.py .*": "make bench",
    r"cmake -S app .*": "pytest tests_py/test_docs.py -k a_cpp_block_is_a_program_that_runs",
    r"export PKG_CONFIG_PATH=.*|g\+\+ app\.cpp .*": "pytest tests_py/test_docs.py -k pkg_config",
    r"(cmake .*|cmake --build )build/aoti.*|build/aoti/run .*": "pytest tests_py/test_export.py",
    r"python examples/lightning/digits\.py": "pytest tests_py/test_lightning.py",
    r"python examples/cells/(train|tirex_block)\.py.*": "pytest tests_py/test_gallery.py",
    r"cmake (-S \.|--build|--install) .*build/release.*": "make packages",
}
# Need the network, a GPU, other interpreters or sources, an idle system or hours, or single files.
BY_HAND = [
    r"git clone .*|cd lltm",
    r"make (test|bench)-cuda.*|make (gpu-kit|first-contact) .*",
    r"make bench-(sweep|aarch64)( .*)?",
    r"python benchmarks/(int8|custom_cells|sharing)\.py.*",
    r"python -m lltm\.benchmark --compile .*",
    r"python benchmarks/memory\.py .*",
    r"OMP_NUM_THREADS=1 valgrind .*|callgrind_annotate .*",
    r"ncu .*",
    r"pip install .*cmake\.define\.LLTM_CUDA=ON .*",
    r"make test-torch-versions|\.ci/versions .*",
    r"make wheel WHEEL_.*",
    r"(cmake|cmake --build|ctest) --preset dev .*|cmake --preset dev|build/dev/.*",
    r"pip install --no-build-isolation --editable .*",
]


def is_one_of(line: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, line) for pattern in patterns)


def test_every_command_is_run_by_a_test_or_listed_as_manual() -> None:
    found = [line for page in PAGES if page not in PROJECTS for line in lines(page)]
    patterns = [*RUN, *RUN_BY, *BY_HAND]
    assert [line for line in found if sum(is_one_of(line, [p]) for p in patterns) != 1] == []
    assert [p for p in patterns if not any(is_one_of(line, [p]) for line in found)] == []
    for command in RUN_BY.values():
        (words,) = commands(command)
        check_command(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    dict.fromkeys(line for page in PAGES for line in lines(page) if is_one_of(line, RUN)),
)
def test_a_command_runs(line: str, tmp_path: Path) -> None:
    run_commands(line, tmp_path)


def commands(text: str) -> Iterator[list[str]]:
    """Includes words in $(...)."""
    for line in text.replace("\\\n", " ").splitlines():
        for inner in re.findall(r"\$\(((?:[^()]|\([^()]*\))*)\)", line):
            yield from commands(inner)
        command: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word == "&&":
                if command:
                    yield command
                command = []
            elif command or not re.match(r"[A-Z_]+=", word):  # environment variable
                command.append(word)


@functools.cache
def source(pattern: str) -> str:
    return "\n".join(path.read_text() for path in sorted(ROOT.glob(pattern)))


def cmake_files() -> str:
    return source("CMakeLists.txt") + source("*/CMakeLists.txt") + source("cmake/*.cmake")


@functools.cache
def help_text(*command: str) -> str:
    # In cwd="/", because conftest.py would import PyTorch.
    run = support.run(command, check=False, cwd="/")
    return run.stdout + run.stderr


def check_options(words: list[str], manual: str) -> None:
    for word in words:
        option = re.match(r"--?[a-zA-Z][\w-]*", word)
        if option and not word.startswith("-D"):
            assert re.search(rf"(?<![\w-]){option[0]}(?![\w-])", manual), f"no option {option[0]}"


def after(words: list[str], option: str) -> list[str]:
    """Values up to the next option."""
    if option not in words:
        return []
    values = words[words.index(option) + 1 :]
    return values[: next((k for k, value in enumerate(values) if value.startswith("-")), None)]


def check_make(words: list[str]) -> None:
    makefile = source("Makefile")
    rules = re.findall(r"^([\w -]+):(?![=:])", makefile, re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for word in words:
        name, is_variable, _ = word.partition("=")
        if is_variable:
            assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), f"no variable {name}"
        else:
            assert name in targets, f"no target {name}"


def check_preset(kind: str, words: list[str]) -> None:
    presets = json.loads(source("CMakePresets.json"))[f"{kind}Presets"]
    assert {*after(words, "--preset")} <= {preset["name"] for preset in presets}, kind


def check_cmake(words: list[str]) -> None:
    manual = [help_text("cmake", option) for option in ("--help", "--build", "--install")]
    check_options(words, "".join(manual))
    check_preset("build" if words[0] == "--build" else "configure", words)
    for target in after(words, "--target"):
        assert target == "all" or re.search(rf"\(\s*{target}\b", cmake_files()), target
    for folder in after(words, "-S"):
        # "app" is the reader's application.
        assert folder == "app" or (ROOT / folder / "CMakeLists.txt").is_file(), folder
    for variable in re.findall(r"(?:^|\s)-D(\w+)=", " ".join(words)):
        assert variable.startswith("CMAKE_") or variable in cmake_files(), variable


def check_ctest(words: list[str]) -> None:
    check_options(words, help_text("ctest", "--help"))
    check_preset("test", words)
    definition = r"add_(?:\w+_)?test\((?:NAME )?([\w.]+)"
    names = re.findall(definition, source("tests_cpp/CMakeLists.txt"))
    for pattern in "|".join(after(words, "-R")).split("|"):
        assert any(re.search(pattern, name) for name in names), f"no test {pattern}"


def check_pytest(words: list[str]) -> None:
    check_options(words, help_text(sys.executable, "-m", "pytest", "--help"))
    files = [word for word in words if word.endswith(".py")]
    for word in after(words, "-k"):
        assert any(word in (ROOT / file).read_text() for file in files), f"no test {word}"
    assert {*after(words, "-m")} <= {"slow"}


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    check_options(words, help_text(sys.executable, "-m", "pip", "install", "--help"))
    project = source("pyproject.toml")
    for setting in after(words, "-C") + after(words, "--config-settings"):
        key = setting.partition("=")[0]
        variable = key.removeprefix("cmake.define.")
        assert variable != key, key
        assert variable.startswith("CMAKE_") or variable in cmake_files(), key
    for word in words[1:]:
        extra = re.fullmatch(r"\.\[(\w+)\]", word)
        if extra:
            assert re.search(rf"^{extra[1]} = \[", project, re.MULTILINE), f"no extra {extra[1]}"
        elif re.fullmatch(r"[a-z][\w-]*", word):
            assert re.search(rf'"{word}[">]', project), f"{word} is no requirement of ours"


def check_python(words: list[str]) -> None:
    if words[0] == "-c":
        exec(words[1], {})
        return
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec is not None, f"no module {words[1]}"
        assert spec.origin is not None
        script, arguments = Path(spec.origin), words[2:]
    else:
        script, arguments = ROOT / words[0], words[1:]
    assert script.is_file(), f"no file {script}"
    folders = (script.parent, ROOT / "python" / "lltm" / "benchmark")
    code = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    for option in (word for word in arguments if word.startswith("--")):
        assert f'"{option}"' in code, f"no option {option}"


def check_binary(words: list[str]) -> None:
    program = Path(words[0]).name
    targets = cmake_files() + source("examples/*/CMakeLists.txt")
    assert re.search(rf"add_executable\({program}\b", targets), f"no target {program}"
    for word in words[1:]:
        tests = re.fullmatch(r"--gtest_filter=(\w+)\*", word)
        if tests:
            assert re.search(rf"TEST\w*\(\s*{tests[1]}", source("tests_cpp/*.cpp")), word


def check_git(words: list[str]) -> None:
    assert words == ["clone", re.findall(r'Repository = "(.*)"', source("pyproject.toml"))[0]]


def check_pkg_config(words: list[str]) -> None:
    assert {*words} <= {"--cflags", "--libs", words[-1]}
    assert (ROOT / "cmake" / f"{words[-1]}.pc.in").is_file(), words[-1]


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "cmake": check_cmake,
    "ctest": check_ctest,
    "pytest": check_pytest,
    "pip": check_pip,
    "python": check_python,
    "ncu": lambda words: check_binary(words[-1:]),
    "valgrind": lambda words: check_binary(words[-1:]),
    "tar": lambda words: None,  # a file from another system
    "callgrind_annotate": lambda words: None,  # valgrind's output
    "pkg-config": check_pkg_config,
    "git": check_git,
    "cd": lambda words: None,  # a cloned folder
    "export": lambda words: None,
    "g++": lambda words: None,
}


def check_command(words: list[str]) -> None:
    """Fails for commands without a check, so that none is forgotten."""
    program = words[0].removeprefix(".venv/bin/")
    if program.startswith("build/"):
        check_binary(words)
    elif program.startswith(".ci/"):
        assert (ROOT / program).is_file(), program
    else:
        assert program in CHECKS, f"nothing here checks the command {program}"
        CHECKS[program](words[1:])


@each_page
def test_the_commands_of_a_page_name_existing_files_and_tests(page: Path) -> None:
    if page in PROJECTS:
        pytest.skip("they are run, by a test of their own")
    for text in texts(page, "sh"):
        for command in commands(text):
            try:
                check_command(command)
            except (AssertionError, OSError) as error:
                pytest.fail(f"{shlex.join(command)}: {error}")
    for target in re.findall(r"`make ([\w-]+)", page.read_text()):
        check_make([target])


@pytest.mark.parametrize(
    "command",
    [
        "make tests",
        "make test TORCHES=torch",
        "cmake --preset fast",
        "cmake --build --preset cuda-gpu",
        "cmake --preset dev -DLLTM_CELLS=/path",
        "cmake --build --preset dev --target lltm_test_all",
        "cmake --present dev",
        "cmake -S consumers",
        "ctest --preset dev -R 'lstm|gru'",
        "pytest --jobs 2",
        "pytest tests_py/test_sequence.py -k backwards",
        "pytest tests_py/test_sequences.py -k reverse",
        "pip install '.[tests]'",
        "pip install --no-isolation .",
        "pip install . -C cmake.define.LLTM_GPU=ON",
        "pip install ninja-build",
        "python -m lltm.explain --step 2",
        "python -m lltm.explains",
        "python examples/char_lm/demo.py --file x",
        "python examples/char_lm/demos.py",
        "build/dev/tests_cpp/lltm_test",
        "build/dev/tests_cpp/lltm_tests --gtest_filter='Sequences*'",
        ".ci/daily",
        "ninja test",
        "git clone https://github.com/lltm/llmt",
    ],
)
def test_a_command_with_a_wrong_name_is_found(command: str) -> None:
    (words,) = commands(command)
    with pytest.raises((AssertionError, OSError)):
        check_command(words)


def plain(text: str) -> str:
    """Text without line breaks, quotes and parts that only the source has."""
    return " ".join(re.findall(r"\w+", text))


def is_quoted(message: str, text: str) -> bool:
    """An ellipsis on the page matches variable parts."""
    return all(plain(part) in plain(text) for part in message.split("…"))


class Packing(torch.nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, lengths):  # type: ignore[no-untyped-def]
        return self.layer(torch.nn.utils.rnn.pack_padded_sequence(x, lengths))


def calls_that_raise() -> Iterator[Callable[[], object]]:
    layer, x, h = lltm.LLTM(8, 16), torch.randn(20, 4, 8), torch.zeros(4, 16)
    prepacked, weights, functional = layer.prepack(), torch.randn(48, 24), lltm.functional
    packed = pack_sequence([torch.randn(n, 8) for n in (5, 3, 2)])
    lstm: Any = torch.nn.LSTM(8, 16)
    wrong: Any = h  # rejected by type checkers too

    def double_backward() -> None:
        compiled = torch.compile(layer, backend="aot_eager")
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(compiled(leaf)[0].sum(), leaf, create_graph=True)
        slope.sum().backward()

    yield lambda: layer(torch.randn(4, 20, 7))
    yield lambda: layer(x, (h, h))
    yield lambda: functional.step("lltm", x[0], (h, h), torch.randn(64, 24))
    yield lambda: functional.step("lltm", x[0], (h, h), torch.randn(48, 25))
    yield lambda: functional.step("lltm", x[0], (h, h), weights, bias_ih=torch.randn(1, 48))
    yield lambda: functional.sequence(
        "lltm", packed.data, (h, h), weights, batch_sizes=packed.batch_sizes
    )
    yield lambda: layer(x.double())
    yield lambda: functional.sequence("lltm", x.long(), (h, h), weights)
    yield lambda: layer(x.to("meta"))
    yield lambda: layer.load_state_dict(lstm.state_dict())
    yield lambda: prepacked.load_state_dict(layer.prepack(torch.qint8).state_dict())
    yield lambda: prepacked.double()
    yield lambda: setattr(prepacked, "hidden_size", 8)
    yield lambda: prepacked(x.clone().requires_grad_())[0].sum().backward()
    yield double_backward
    yield lambda: torch.fx.symbolic_trace(layer)
    yield lambda: torch.jit.script(Packing(layer))
    yield lambda: layer(x, mask=wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_explained_messages_are_raised(tmp_path: Path) -> None:
    copy = shutil.copy(Path(lltm.cmake_prefix_path, "lib", "liblltm.so"), tmp_path)
    raised = [
        support.run_python("-c", code, cwd=folder, check=False).stderr
        for code, folder in (
            ("import torch; torch.__version__ = '2.99.1'; import lltm", tmp_path),
            ("import lltm", ROOT / "python"),
            (f"import torch, lltm; torch.ops.load_library({str(copy)!r})", tmp_path),
        )
    ]
    for call in calls_that_raise():
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        raised.append(str(caught.value))

    explained = texts(DOCS / "errors.md", "text")
    assert [r for r in raised if not any(is_quoted(text, r) for text in explained)] == []
    # Build messages are in build files.
    build = "".join(
        source(p) for p in ("CMakeLists.txt", "cmake/*", "python/*.py", "cpp/src/*/*.cpp")
    )
    sources = [*raised, build]
    assert [text for text in explained if not any(is_quoted(text, s) for s in sources)] == []


def prose(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "code", FENCED.sub("", page.read_text()))


@functools.cache
def anchors(page: Path) -> set[str]:
    """Heading anchors as in GitHub and Sphinx."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=name)
def test_the_links_of_a_page_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"no file {target}"
        assert file.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(file), f"no heading {target}"


def test_the_tests_that_pages_name_are_there() -> None:
    tests = source("tests_py/*.py")
    names = {n for page in PAGES for n in re.findall(r"`(test_\w+)`", page.read_text())}
    assert names
    assert {n for n in names if f"def {n}(" not in tests} == set()


def test_the_map_of_architecture_links_every_source_file() -> None:
    """Links a file directly, by its header or implementation, or by a folder without subfolders.

    The link test checks the targets.
    """
    text = (DOCS / "architecture.md").read_text()
    rows = text.partition("\n## Where is ...")[2].partition("\n## ")[0]
    links = [(DOCS / path).resolve() for path in re.findall(r"\]\(([^)#]+)\)", rows)]
    folders = [link for link in links if link.is_dir() and not [*link.glob("[a-z]*/")]]
    linked = {*links, *(path for folder in folders for path in folder.iterdir())}
    files = {*(ROOT / "cpp").rglob("*.*"), *(ROOT / "python/lltm").rglob("*.py")}

    def stem(path: Path) -> Path:
        return path.with_name(path.name.partition(".")[0])

    stems = {stem(path) for path in linked}
    missing = {name(path) for path in files if stem(path) not in stems}
    assert {path for path in missing if not path.endswith("__init__.py")} == set()


def imported(file: Path) -> Iterator[str]:
    """Includes local imports."""
    package = file.relative_to(ROOT / "python").parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from [module] * bool(node.module)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_imports_in_the_package_have_no_cycles() -> None:
    files = {}
    for path in (ROOT / "python/lltm").rglob("*.py"):
        parts = path.relative_to(ROOT / "python").with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    graph = {module: {*imported(path)} & files.keys() for module, path in files.items()}
    assert graph["lltm.reference"] >= {"lltm.modules", "lltm._check"}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.slow
@support.needs_extra(
    "docs", "sphinx", "myst_parser", "furo", "breathe", "sphinx_design", "sphinx-mathjax-offline"
)
@pytest.mark.skipif(shutil.which("doxygen") is None, reason="reads the C++ headers with Doxygen")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    support.run_python(
        *("-m", "sphinx", "-W", "--keep-going", "-n", "-q"), str(DOCS), str(tmp_path / "html")
    )
    pages = [*(tmp_path / "html").glob("*.html")]
    for page in pages:  # only links may be external
        assert not re.search(r'<(?!a )[^>]*(?:src|href)="(?:https?:)?//', page.read_text()), page
    for both in ("index", "cuda", "reinforcement-learning"):
        text = (tmp_path / "html" / f"{both}.html").read_text()
        labels = re.findall(r"sd-tab-label.*?>\s*([^<]+)</label>", text)
        assert labels == ["Python", "C++"], both
    site = {page.stem for page in pages}
    assert site >= {path.stem for path in DOCS.iterdir() if path.suffix in (".md", ".rst")}
    *_, names = (tmp_path / "html" / "objects.inv").read_bytes().split(b"\n", 4)
    documented = re.findall(r"^lltm\.(\S+) py:", zlib.decompress(names).decode(), re.MULTILINE)
    assert {*documented} >= {*lltm.__all__}
