"""Uploads to a hub on this machine, which answers as the Hugging Face hub does and keeps what it was sent."""

import base64
import hashlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

SECRET = "hf_secretsecret"


class FakeHub(ThreadingHTTPServer):
    """Repositories are names with whether they are private; `files` are what commits and the large-file store got."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.private: dict[str, bool] = {}
        self.requests, self.files, self.store, self.pull_request = [], {}, {}, False
        self.refuses = False


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def begin(self) -> bytes:
        hub = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append((self.command, self.path.partition("?")[0], self.headers.get("Authorization")))
        return body

    def do_GET(self):
        self.begin()
        name = "/".join(self.path.split("/")[3:5])
        if name not in self.server.private:  # the client's own questions among them
            return self.answer({"error": "not found"}, 404)
        self.answer({"id": name, "private": self.server.private[name], "sha": "0" * 40, "siblings": []})

    def do_PUT(self):
        self.server.store[self.path.rpartition("/")[2]] = self.begin()
        self.answer({})

    def do_POST(self):
        body, hub = self.begin(), self.server
        path, _, query = self.path.partition("?")
        if hub.refuses:
            return self.answer({"error": "Forbidden"}, 403)
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request['organization']}/{request['name']}"
            if name in hub.private:
                return self.answer({"error": "exists", "url": f"{hub.url}/{name}"}, 409)
            hub.private[name] = request.get("private") or request.get("visibility") == "private"
            self.answer({"url": f"{hub.url}/{name}", "id": name})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            kinds = {
                f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in json.loads(body)["files"]
            }
            files = [{"path": p, "uploadMode": k, "shouldIgnore": False} for p, k in kinds.items()]
            self.answer({"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                o | {"actions": {"upload": {"href": f"{hub.url}/store/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            hub.pull_request = "create_pr=1" in query
            for line in map(json.loads, body.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.store[value["oid"]]
                    assert hashlib.sha256(hub.files[value["path"]]).hexdigest() == value["oid"]
            name = "/".join(path.split("/")[3:5])
            url = {"pullRequestUrl": f"{hub.url}/{name}/discussions/1"} if hub.pull_request else {}
            self.answer({"commitUrl": f"{hub.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40, **url})


@pytest.fixture
def hub():
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    """What an export leaves, and files that are none of it."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "README.md").write_text("---\nlicense: mit\n---\n# A model\n", encoding="utf-8")
    (output / "config.json").write_text("{}", encoding="utf-8")
    (output / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (output / ".hidden").write_text("no", encoding="utf-8")
    (output / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    (tmp_path / "elsewhere.txt").write_text("private", encoding="utf-8")
    return output


UPLOADED = ["README.md", "config.json", "model.safetensors"]


def export(hub, folder, *flags, token=SECRET):
    import os

    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder.parent / "home")}
    env |= {"HF_TOKEN": token, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    run = folder.parent / "run"  # an upload reads nothing of it, but it must be there, with an adapter
    run.mkdir(exist_ok=True)
    (run / "adapter_config.json").touch()
    call = [sys.executable, "-m", "r3lite.export", "--preset", "tiny", "--model", "tiny", "--adapter", str(run)]
    done = subprocess.run(
        [*call, "--output", str(folder), *flags], env=env, capture_output=True, text=True, timeout=120
    )
    assert SECRET not in done.stdout + done.stderr and "Traceback" not in done.stderr
    return done


def test_nothing_is_sent_before_a_summary_and_yes(hub, folder):
    done = export(hub, folder, "--push", "me/model")
    assert done.returncode == 0, done.stderr
    assert "the private repository me/model: 3 files" in done.stdout and "nothing was uploaded" in done.stdout
    assert all(name in done.stdout for name in UPLOADED) and "hidden" not in done.stdout and "link" not in done.stdout
    assert hub.requests == []


def test_a_private_repository_gets_the_files_as_they_are(hub, folder):
    done = export(hub, folder, "--push", "me/model", "--yes")
    assert done.returncode == 0, done.stderr
    assert hub.private == {"me/model": True} and not hub.pull_request
    assert hub.files == {name: (folder / name).read_bytes() for name in UPLOADED}
    assert f"uploaded    {hub.url}/me/model\n" in done.stdout
    about_us = {token for _, path, token in hub.requests if path.startswith(("/api/repos/", "/api/models/", "/me/"))}
    assert about_us == {f"Bearer {SECRET}"}
    assert export(hub, folder, "--push", "me/model", "--yes").returncode == 0  # it is there now


def test_a_public_repository_takes_a_pull_request_only(hub, folder):
    hub.private["them/model"] = False
    done = export(hub, folder, "--push", "them/model", "--yes")
    assert done.returncode == 1 and "them/model is public; nothing was uploaded" in done.stderr and not hub.files
    done = export(hub, folder, "--push", "them/model", "--yes", "--push-as", "pull-request")
    assert done.returncode == 0 and hub.pull_request and hub.private["them/model"] is False
    assert f"uploaded    {hub.url}/them/model/discussions/1\n" in done.stdout and sorted(hub.files) == UPLOADED


def test_refusals_have_a_remedy(hub, folder):
    done = export(hub, folder, "--push", "me/model", "--yes", token="")
    assert done.returncode == 1 and "HF_TOKEN is not set" in done.stderr and hub.requests == []
    hub.refuses = True
    done = export(hub, folder, "--push", "me/model", "--yes")
    assert done.returncode == 1 and "the upload to me/model failed" in done.stderr and not hub.files
    for flags, reason in ((["--yes"], "it needs --push"), (["--push", "model"], "model is not a repository name")):
        done = export(hub, folder, *flags)
        assert done.returncode == 2 and reason in done.stderr


def test_a_folder_that_is_no_export_is_not_uploaded(hub, folder):
    """A project folder has a README.md too."""
    (folder / "model.safetensors").rename(folder / "notes.txt")
    done = export(hub, folder, "--push", "me/model", "--yes")
    assert done.returncode == 1 and "already exists" in done.stderr and hub.requests == []
