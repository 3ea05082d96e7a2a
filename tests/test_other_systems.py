"""What differs on Windows and macOS, put in place here: paths, line ends, consoles, locked files, absent modules."""

import ast
import functools
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from r3lite.core import command, files
from r3lite.core.command_names import COMMANDS
from r3lite.core.errors import R3LiteError
from r3lite.core.files import load_toml, move, shipped, write_jsonl, write_text
from r3lite.core.invocation import resolve, to_toml
from r3lite.datasets.hub import files_of, hub_string
from r3lite.datasets.qa import read_questions
from r3lite.models.tensor_files import read_tensors, write_tensors
from r3lite.models.weights import resolve_folder
from r3lite.protocols.registry import build_protocol
from r3lite.protocols.templates import read_prompt
from r3lite.retrieval import documents
from r3lite.retrieval.building import ids_of
from r3lite.retrieval.corpus import read_corpus
from r3lite.retrieval.procedures import read_procedures
from r3lite.settings import ProtocolSettings, RetrievalSettings, SftConfig
from r3lite.training import checkpoint
from tests.errors import raises

ROOT = Path(__file__).parent.parent
WORLD = shipped("data", "world")


@functools.cache
def package_nodes() -> list[tuple[str, ast.AST]]:
    """The imports, attributes and calls of the package, each with the name of its file."""
    return [
        (path.name, node)
        for path in sorted((ROOT / "r3lite").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call))
    ]


# Modules and functions that Windows lacks


def test_what_windows_lacks_is_asked_for_only_where_there_is_another_way():
    lacking = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog"}
    of_os = {"fork", "forkpty", "getuid", "geteuid", "killpg", "setsid", "mkfifo", "statvfs", "uname", "nice", "chown"}
    of_signal = {"SIGKILL", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGHUP", "alarm", "setitimer", "pthread_sigmask"}
    imported, used = set(), set()
    for file, node in package_nodes():
        if isinstance(node, ast.Import):
            imported |= {(file, alias.name) for alias in node.names if alias.name in lacking}
        if isinstance(node, ast.ImportFrom):
            names = {"os": of_os, "signal": of_signal}.get(node.module, set())
            imported |= {(file, node.module)} if node.module in lacking else set()
            used |= {(file, alias.name) for alias in node.names if alias.name in names}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = {"os": of_os, "signal": of_signal}.get(node.value.id, set())
            used |= {(file, node.attr)} if node.attr in names else set()
    assert imported == {("metrics.py", "resource"), ("render_process.py", "resource")}  # which may be absent there
    assert not used


def test_every_text_file_is_opened_with_its_encoding():
    """Windows takes that of the country if none is named."""
    bare = []
    encoding_count = 0
    for file, node in package_nodes():
        encoding_count += isinstance(node, ast.Call) and any(keyword.arg == "encoding" for keyword in node.keywords)
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        mode = next((a.value for a in node.args[1:2] if isinstance(a, ast.Constant)), "r")
        opens = name == "open" and isinstance(node.func, ast.Name) and "b" not in str(mode)
        modes = [a.value if isinstance(a, ast.Constant) else "b" for a in node.args]  # else it opens no path
        opens |= name == "open" and isinstance(node.func, ast.Attribute) and not any("b" in str(mode) for mode in modes)
        reads = name in ("read_text", "write_text") and isinstance(node.func, ast.Attribute)
        bare += [f"{file}:{node.lineno}"] * (opens or reads)
    assert bare == [] and encoding_count > 10


HELP = f"""
import contextlib, importlib, io, os, signal, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "getuid", "getloadavg", "sysconf", "sysconf_names"):
    vars(os).pop(name, None)
for name in ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1"):
    vars(signal).pop(name, None)
for name in {COMMANDS}:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        importlib.import_module("r3lite." + name).main(["--help"])
    assert "--output" in output.getvalue() or "--preset" in output.getvalue(), name
print("all of them")
"""


def test_each_command_helps_without_the_modules_that_windows_lacks():
    run = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout == "all of them\n", run.stderr


# Consoles


def test_a_console_of_256_letters_is_printed_to(monkeypatch, tmp_path):
    """A title that it has no letters for ended the command with a traceback, after its work was done."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="cp1252"))
    sft_command = command.Command("sft", SftConfig(), lambda config: print("Gr\u00f6\u00dfe \u6570 \U0001f600"))
    data = tmp_path / "data.jsonl"
    data.touch()
    assert sft_command(["--data", str(data)]) == 0
    assert printed.getvalue() == b"Gr\xf6\xdfe \\u6570 \\U0001f600" + os.linesep.encode()


# Locked files: a virus scanner or an indexer has each new file open for a moment


@pytest.fixture
def locked(monkeypatch):
    """Has so many renames fail as they do on Windows while a file is open; `waited` are the pauses between tries."""
    rename = os.replace
    waited = []
    failures_left = [0]

    def replace(source, target):
        if failures_left[0]:
            failures_left[0] -= 1
            raise PermissionError(13, "The process cannot access the file", str(target))
        rename(source, target)

    def lock(times: int) -> list[float]:
        failures_left[0] = times
        waited.clear()
        return waited

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(files, "ON_WINDOWS", True)
    monkeypatch.setattr(files.time, "sleep", waited.append)
    return lock


WRITERS = {
    "a text": (write_text, lambda path: path.read_text(encoding="utf-8")),
    "tensors": (
        lambda path, name: write_tensors(path, {name: torch.ones(2)}),
        lambda path: "".join(read_tensors(path)),
    ),
    "a folder": (
        lambda path, name: checkpoint.replace_folder(path, lambda folder: write_text(folder / name, "")),
        lambda path: "".join(os.listdir(path)),
    ),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_locked_for_a_moment_is_written_all_the_same(tmp_path, locked, kind):
    write, read = WRITERS[kind]
    write(tmp_path / "x", "old")
    waited = locked(3)
    write(tmp_path / "x", "new")
    assert read(tmp_path / "x") == "new" and len(waited) == 3 and os.listdir(tmp_path) == ["x"]


def test_what_stays_locked_is_an_error_after_seconds_and_the_old_file_stays(tmp_path, locked):
    write_text(tmp_path / "x", "old")
    waited = locked(100)
    with pytest.raises(PermissionError, match="x"):
        write_text(tmp_path / "x", "new")
    assert 1 < sum(waited) < 5 and os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").read_text(encoding="utf-8") == "old"
    waited = locked(0)
    with pytest.raises(FileNotFoundError):  # which no time mends
        move(tmp_path / "nowhere", tmp_path / "y")
    assert waited == []


def test_elsewhere_a_rename_that_is_refused_is_final(tmp_path, locked, monkeypatch):
    """On Linux it means that the folder may not be written to: three seconds of tries only kept the user waiting."""
    monkeypatch.setattr(files, "ON_WINDOWS", False)
    waited = locked(1)
    with pytest.raises(PermissionError, match="x"):
        write_text(tmp_path / "x", "new")
    assert waited == [] and os.listdir(tmp_path) == []


# Paths


def test_a_drive_is_not_taken_for_something_else(tmp_path, monkeypatch):
    """`C:` is no scheme, no module and no name; backslashes are no escapes. Here such a name is that of a file."""
    monkeypatch.chdir(tmp_path)
    for path in ("C:\\data\\a b.jsonl", "D:/data,x/q,train.jsonl", "\\\\server\\share\\q.jsonl"):
        folder = path.rpartition("/")[0]
        if folder:
            Path(folder).mkdir(parents=True)
        write_jsonl(path, [{"id": "1", "question": "Who?", "answer": "Ann"}])
        assert files_of(path) == [Path(path)] and read_questions(path)[0].answers == ("Ann",)
        if "," not in path:
            assert hub_string(path) is None
    with raises(R3LiteError, "data-absent", "C:\\none.jsonl"):
        files_of("C:\\none.jsonl")
    Path("C:\\models").mkdir()
    assert resolve_folder("C:\\models") == Path("C:\\models")
    with raises(R3LiteError, "model-absent", "D:\\models"):
        resolve_folder("D:\\models")
    settings = RetrievalSettings(source_index=("News=C:\\news-index",))
    settings.check()
    assert settings.by_kind["News"].index == "C:\\news-index" and not settings.is_remote
    arguments = ["--data", "C:\\data\\new\\t.jsonl", "--output", "C:\\runs\\a b", "--adapter", "\\\\server\\x"]
    config = resolve("sft", SftConfig(), arguments)
    write_text("config.toml", to_toml(config, "sft"))
    assert load_toml(Path("config.toml"))["sft"]["data"] == "C:\\data\\new\\t.jsonl"
    restored = resolve("sft", SftConfig(), ["--config", "config.toml"])
    assert restored.common.output == "C:\\runs\\a b" and restored.data == config.data


# Line ends and byte order marks, as editors on Windows write them

FORMAT = (
    'kind = "headings"\nprompt = """\nGo on.\nQuestion: {question}"""\ndocuments_prompt = """\nX:\n{documents}"""\n'
)
CSV = 'title;text\nA;Oil is dear\nB;"two\nlines"\n'
HTML = "<h1>A</h1>\n<p>one\ntwo</p>\n<pre>x\ny</pre>"
PROCEDURES = {"name": "n", "description": "d", "trigger": "t", "category": "c", "steps": [{"action": "a"}]}
READERS = {
    "prompt.txt": ("Answer.\n\n{question}\n", read_prompt),
    "format.toml": (FORMAT, lambda path: build_protocol(ProtocolSettings(format=path))),
    "config.toml": ('seed = 3\n[sft]\nmax_steps = 2\n', lambda path: load_toml(Path(path))),
    "questions.jsonl": ('{"id": "1", "question": "Who?", "answer": "A"}\n\n', read_questions),
    "questions.json": ('[\n{"id": "1",\n"question": "Who?", "answer": "A"}\n]\n', read_questions),
    "corpus.jsonl": ('{"id": "1", "title": "T", "text": "x"}\n', lambda path: list(read_corpus(path))),
    "procedures.json": (json.dumps(PROCEDURES, indent=1), read_procedures),
    "ids.txt": ("one\ntwo\n\n", lambda path: list(ids_of((f"@{path}",)))),
    "a.md": ("---\ntitle: T\n---\n# A\n\none\ntwo\n\nB\n===\n```\n# x\n```\n", None),
    "a.txt": ("one\ntwo\n\nthree\n", None),
    "a.csv": (CSV, None),
    "a.html": (HTML, None),
    "a.py": ('def f():\n    """Doc."""\n    return 1\n', None),
    "a.jsonl": ('{"title": "T", "text": "x"}\n', None),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_line_ends_and_marks_of_windows_change_nothing(tmp_path, monkeypatch, name):
    """A mark at the beginning of a prompt file was given to the model as its first token."""
    text, read = READERS[name]
    monkeypatch.chdir(tmp_path)
    parsed = []
    for ends, mark in (("\n", b""), ("\r\n", b""), ("\r\n", b"\xef\xbb\xbf")):
        content = mark + text.replace("\n", ends).encode()
        if read is None:  # a document, of which spaces do not count
            sections = documents.READERS[Path(name).suffix](content.decode("utf-8-sig"), name)
            parsed.append([(s.title, s.head, s.text.split()) for s in sections])
            continue
        Path(name).write_bytes(content)
        parsed.append(read(name))
    assert parsed[0] == parsed[1] == parsed[2] and parsed[0]


# A whole way in a folder of blanks and foreign letters, on such a console, with ids that no file can be named by

WAY = """
import importlib, sys, warnings
warnings.filterwarnings("error", category=EncodingWarning, module=r"r3lite(\\.|$)")

def run(name, *arguments):
    status = importlib.import_module("r3lite." + name).main([*arguments])
    assert status == 0, (name, status)

tiny, run_folder = ["--preset", "tiny"], "l\\u00e4ufe \\u6570/s f t"
less = ["--max-steps", "1", "--batch-size", "1", "--validation-rows", "0"]
run("index", *tiny, "--corpus", "c.jsonl", "--output", "i dx")
run("index", "--encoder", "hashing", "--documents", "d\\u00f6 cs", "--output", "d\\u00f6 x")
run("collect", *tiny, "--data", "t.jsonl", "--output", "z \\u00fc.jsonl")
run("sft", *tiny, "--data", "z \\u00fc.jsonl", *less, "--output", run_folder)
answer = ["--index", "i dx", "--adapter", run_folder, "--max-new-tokens", "16", "--max-hops", "1"]
run("evaluate", *tiny, "--data", "t.jsonl", "--limit", "6", *answer, "--output", "l\\u00e4ufe \\u6570/e")
run("report", "l\\u00e4ufe \\u6570", "--output", "bericht \\u6570.html")
run("export", *tiny, "--adapter", run_folder, "--prompts", "1", "--output", "exp \\u6570")
run("ask", *tiny, *answer, "Wo liegt \\u6570\\u636e?")
run("retrieve", "--encoder", "hashing", "--index", "d\\u00f6 x", "--data", "t.jsonl", "--output", "ret \\u6570")
"""
IDS = ["con", "NUL", "aux.txt", "..\\x", "a/b", "A", "a", "x:y", "q?*", "trailing. "]


def test_a_way_through_the_commands_in_a_folder_of_other_letters(tmp_path):
    here = tmp_path / "Gr\u00f6\u00dfe \u6570\u636e" / "a b"
    (here / "d\u00f6 cs").mkdir(parents=True)
    (here / "d\u00f6 cs" / "\u6570 \u636e.md").write_bytes("# Gr\u00f6\u00dfe\r\n\r\n\u6570\u636e ist 5.\r\n".encode())
    (here / "d\u00f6 cs" / "t.csv").write_bytes("title;text\r\n\u00c4;\u00d6l ist teuer\r\n".encode())

    def lines(name: str, limit: int) -> list[str]:
        return (WORLD / name).read_text(encoding="utf-8").splitlines()[:limit]

    (here / "c.jsonl").write_bytes("\r\n".join(lines("corpus.jsonl", 60)).encode())
    rows = [json.loads(line) | {"id": id} for line, id in zip(lines("train.jsonl", len(IDS)), IDS, strict=True)]
    (here / "t.jsonl").write_bytes("\r\n".join(map(json.dumps, rows)).encode())
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "0"}
    arguments = [sys.executable, "-X", "warn_default_encoding", "-c", WAY]
    run = subprocess.run(arguments, cwd=here, env=environment, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr.decode("cp1252", "replace")[-2000:]
    paths = [path.relative_to(here) for path in here.rglob("*")]
    names = [str(path).casefold() for path in paths]
    assert len(set(names)) == len(names)  # no two that a folder of Windows would take for one
    parts = {part for path in paths for part in path.parts}
    assert not parts & set(IDS) and not any(set(part) & set('<>:"|?*\\') or part[-1] in ". " for part in parts)
    assert b"\\u6570" in run.stdout and max(len(str(path)) for path in paths) < 100
