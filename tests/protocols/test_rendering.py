"""The process that renders chat templates: its bounds, what is left after one was reached, and its end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from r3lite.core.errors import R3LiteError
from r3lite.models.weights import resolve_folder
from r3lite.protocols import rendering
from r3lite.protocols.rendering import Renderer
from r3lite.protocols.tokenizer import Tokenizer

TINY = resolve_folder("tiny")

LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
# By what a template needs too much of: harmless ones of our own, and what the error says.
TOO_MUCH = {
    "time in a loop": (LOOP, "it takes more than 3 seconds"),
    "time for a number": ("{{ 7 ** 99999999 % 10 }}", "it takes more than 3 seconds"),
    "memory of a text": ("{{ 'a' * 10 ** 10 }}", "it needs more than 1024 MiB of memory"),
    "memory of a text that doubles": (DOUBLING, "more than"),
    "memory of a list": ("{{ [0] * 10 ** 10 }}", "it needs more than 1024 MiB of memory"),
    "memory of a width": ("{{ '%999999999d' % 1 }}", "more than"),
    "memory of a filter": ("{{ 'a' | center(10 ** 10) }}", "it needs more than 1024 MiB of memory"),
    "text": ("{% for i in range(60000) %}{{ 'x' * 1000 }}{% endfor %}", "it writes more than 50,000,000 characters"),
}


@pytest.fixture
def renderer():
    renderer = Renderer()
    yield renderer
    renderer._stop()


@pytest.fixture
def model(tmp_path):
    """Writes a model folder with a template of its own."""

    def write(template: str) -> Path:
        shutil.copytree(TINY, tmp_path / "model", dirs_exist_ok=True)
        (tmp_path / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
        return tmp_path / "model"

    return write


@pytest.mark.parametrize("need", TOO_MUCH)
def test_a_template_that_needs_too_much_is_refused_by_the_name_of_its_file(need, model, monkeypatch):
    monkeypatch.setattr(rendering, "SECONDS", 3.0)
    template, words = TOO_MUCH[need]
    folder = model(template)
    start = time.monotonic()
    with pytest.raises(R3LiteError, match=words) as caught:
        Tokenizer.load(folder)
    assert caught.value.code == "template-limit"
    assert caught.value.cause.startswith(f"{folder / 'chat_template.jinja'}: the chat template ")
    assert time.monotonic() - start < 60  # on a busy machine
    assert Tokenizer.load(TINY).open_chat("Who?")  # by the same process, or a new one


def test_a_template_in_the_configuration_is_named_by_that_file(model):
    folder = model("")
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = "{{ 'a' * 10 ** 10 }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(R3LiteError, match="1024 MiB") as caught:
        Tokenizer.load(folder)
    assert caught.value.cause.startswith(f"{folder / 'tokenizer_config.json'}: ")


def test_where_a_process_has_no_limits_of_its_own_time_is_limited(tmp_path, monkeypatch, renderer):
    """Windows has no module `resource`."""
    (tmp_path / "resource.py").write_text("open(__file__ + '.tried', 'w')\nraise ImportError", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert renderer.render("{{ 'a' * 3 }}", {}) == "aaa"
    assert (tmp_path / "resource.py.tried").exists()
    monkeypatch.setattr(rendering, "SECONDS", 2.0)
    with pytest.raises(rendering.LimitExceeded, match="more than 2 seconds"):
        renderer.render(LOOP, {})


def test_one_process_serves_all_templates_and_threads(renderer):
    texts = {}

    def render(number: int) -> None:
        texts[number] = [renderer.render(f"{number}: {{{{ x }}}}", {"x": f"\u6771 {i}"}) for i in range(20)]

    renderer.render("", {})
    process = renderer._process
    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: [f"{number}: \u6771 {i}" for i in range(20)] for number in range(8)}
    assert renderer._process is process


def test_an_interrupted_request_leaves_no_reply_to_the_next(renderer, monkeypatch):
    renderer.render("", {})
    wait = renderer._line

    def interrupted(seconds: float) -> str:
        monkeypatch.setattr(renderer, "_line", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(renderer, "_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        renderer.render("old", {})
    assert renderer.render("new", {}) == "new"


def test_a_process_that_was_killed_is_started_again(renderer):
    renderer.render("", {})
    renderer._process.kill()
    renderer._process.wait()
    assert renderer.render("a", {}) == "a"


def test_a_template_at_which_the_process_ends_is_told(renderer, monkeypatch):
    renderer.render("", {})
    monkeypatch.setattr(renderer, "_send", lambda line: renderer._process.kill())
    with pytest.raises(rendering.LimitExceeded, match="has ended"):
        renderer.render("a", {})
    monkeypatch.undo()
    assert renderer.render("a", {}) == "a"


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_the_process_ends_with_its_command_however_that_ends():
    script = "from r3lite.protocols.rendering import RENDERER as r; r.render('', {}); print(r._process.pid, flush=True)"
    for end in ("", "; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"):
        done = subprocess.run([sys.executable, "-c", script + end], capture_output=True, text=True)
        assert done.returncode == (-signal.SIGKILL if end else 0)
        assert _ends(int(done.stdout))


def _ends(pid: int) -> bool:
    """Returns whether a process ends within some seconds; one that nobody has waited for has ended, too."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if stat.exists() and stat.read_text().rpartition(") ")[2].startswith("Z"):
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False
