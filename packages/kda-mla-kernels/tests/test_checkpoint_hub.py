"""Finding checkpoints: folders, the shared cache, and downloads from a hub on this machine."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from kda_mla_kernels.checkpoint import fetch_file, fetch_json, open_checkpoint
from kda_mla_kernels.errors import CheckpointError
from safetensors.numpy import save, save_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "model.safetensors": save({"w": np.arange(3, dtype=np.float32)}),
    "tokenizer.json": b"{}",
    "tiktoken.model": b"IQ== 0\n",
    "chat_template.jinja": b"{{ messages }}",
    "modeling_tiny.py": b"raise SystemExit",
    "tokenizer_tiny.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "README.md": b"# tiny",
}
WANTED = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tiktoken.model",
    "chat_template.jinja",
}


def run_open(*arguments: str, **environment: str) -> list[str]:
    """Opens checkpoints in a process of their own: the cache's place is read at import."""
    calls = [f"open_checkpoint({each})" for each in arguments]
    return run_hub(calls, "found.name, found.folder, found.read('w').tolist()", **environment)


def run_fetch(*arguments: str, **environment: str) -> list[str]:
    """Fetches single files in a process of their own."""
    return run_hub([f"fetch_file({each})" for each in arguments], "found", **environment)


def run_hub(calls: list[str], shown: str, **environment: str) -> list[str]:
    """What is shown of each call's result, or its error."""
    script = f"""
        import json
        from kda_mla_kernels.checkpoint import fetch_file, open_checkpoint
        for call in [{", ".join(f"lambda: {call}" for call in calls)}]:
            try:
                found = call()
            except ValueError as error:
                seen = type(error).__name__, error
            else:
                seen = [{shown}]
            print(json.dumps(" ".join(map(str, seen))))
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        clean.pop(name, None)
        clean.pop(name.lower(), None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**clean, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def cache(tmp_path) -> Path:
    """A cache that holds org/tiny, whose branch main is at COMMIT."""
    repo = tmp_path / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_bytes(FILES["config.json"])
    (snapshot / "model.safetensors").write_bytes(FILES["model.safetensors"])
    return tmp_path


def test_an_offline_machine_reads_a_cached_repository(cache):
    names = (
        "'org/tiny'",
        "'org/tiny', 'main'",
        f"'org/tiny', revision='{COMMIT}'",
        "'org/tiny@main'",
    )
    for shown in run_open(*names, HF_HOME=str(cache), HF_HUB_OFFLINE="1"):
        assert shown.startswith("org/tiny ")
        assert shown.endswith(f"snapshots/{COMMIT} [0.0, 1.0, 2.0]")


def test_the_offline_argument_needs_no_environment(cache):
    (shown,) = run_open("'org/tiny', offline=True", HF_HOME=str(cache))
    assert shown.startswith("org/tiny ")


def test_an_offline_machine_says_what_is_not_cached_and_where_it_looked(cache):
    names = "'org/other'", "'org/tiny', 'v2'", f"'org/tiny@{'0' * 40}'"
    for shown in run_open(*names, HF_HOME=str(cache), HF_HUB_OFFLINE="1"):
        assert shown.startswith("CheckpointError no folder 'org/")
        assert f"in the cache '{cache / 'hub'}'" in shown
        assert shown.endswith("offline mode is on")
        assert "\n" not in shown


def test_a_machine_without_connection_says_so(tmp_path):
    (shown,) = run_open("'org/tiny'", HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9")
    assert shown.startswith("CheckpointError no folder 'org/tiny' exists here")
    assert "no connection" in shown


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as a download needs: one repository, one gated, one unknown."""

    requested: list[str]

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        path = self.path.split("?")[0]
        self.requested.append(path)
        if "/org/gated" in path:
            self.reply(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        elif "/org/tiny" not in path:
            self.reply(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
        elif path.endswith("/revision/v9"):
            self.reply(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/org/tiny/tree/"):
            self.reply(200, json.dumps([self.entry(name) for name in FILES]).encode(), body)
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(info).encode(), body)
        else:
            self.file(path, body)

    def file(self, path, body):
        _, _, _, _, revision, name = path.split("/")
        if revision == "v9":
            self.reply(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
        elif name not in FILES:
            self.reply(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})
        else:
            self.reply(200, FILES[name], body, {"ETag": f'"{self.blob(FILES[name])}"'})

    @staticmethod
    def blob(content):
        return hashlib.sha1(content).hexdigest()

    def entry(self, name):
        size, oid = len(FILES[name]), self.blob(FILES[name])
        return {"type": "file", "path": name, "size": size, "oid": oid}

    def reply(self, status, content, body, headers=None):
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    handler = type("RecordingHub", (Hub,), {"requested": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.requested
    server.shutdown()
    server.server_close()


def test_a_download_takes_weights_and_tokenizer_but_no_code(tmp_path, hub):
    endpoint, requested = hub
    (shown,) = run_open("'org/tiny', progress=False", HF_HOME=str(tmp_path), HF_ENDPOINT=endpoint)
    assert shown.endswith("[0.0, 1.0, 2.0]")
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert {file.name for file in snapshot.iterdir()} == WANTED
    assert not [path for path in requested if path.endswith((".py", ".bin", ".md"))]
    (again,) = run_open("'org/tiny', offline=True", HF_HOME=str(tmp_path), HF_ENDPOINT=endpoint)
    assert again == shown


def assert_refused(shown, messages):
    """Each in one clear sentence."""
    for one, message in zip(shown, messages, strict=True):
        assert one.startswith("CheckpointError no folder 'org/")
        assert message in one
        assert "\n" not in one


def test_what_the_hub_refuses_is_one_clear_sentence(tmp_path, hub):
    refused = {
        "'org/unknown'": "repository 'org/unknown' does not exist or is private",
        "'org/tiny', 'v9'": "repository 'org/tiny@v9' has no such revision",
        "'org/gated'": "repository 'org/gated' needs access rights",
    }
    shown = run_open(*refused, HF_HOME=str(tmp_path), HF_ENDPOINT=hub[0])
    assert_refused(shown, refused.values())


# Single files


def test_a_single_file_is_fetched_alone(tmp_path, hub):
    endpoint, requested = hub
    places = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint}
    (shown,) = run_fetch("'org/tiny@main', 'config.json'", **places)
    assert Path(shown).read_bytes() == FILES["config.json"]
    assert {path.rsplit("/", 1)[1] for path in requested} == {"config.json"}
    assert run_fetch("'org/tiny', 'absent.json', 'main'", **places) == ["None"]


def test_without_a_network_a_cached_snapshot_says_which_files_exist(cache):
    places = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    files = "'org/tiny@main', 'config.json'", "'org/tiny', 'chat_template.jinja'"
    there, absent = run_fetch(*files, **places)
    assert there.endswith(f"{COMMIT}/config.json")
    assert absent == "None"
    assert run_fetch("'org/tiny', 'absent.json', offline=True", HF_HOME=str(cache)) == ["None"]


def test_a_single_file_fails_in_the_same_words_as_a_checkpoint(tmp_path, hub):
    refused = {
        "'org/tiny', 'config.json', 'v9'": "repository 'org/tiny@v9' has no such revision",
        "'org/gated', 'config.json'": "repository 'org/gated' needs access rights",
    }
    shown = run_fetch(*refused, HF_HOME=str(tmp_path), HF_ENDPOINT=hub[0])
    assert_refused(shown, refused.values())


def test_a_single_file_that_is_not_cached_says_so(tmp_path):
    (shown,) = run_fetch("'org/tiny', 'config.json'", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert "is not (completely) in the cache" in shown
    assert shown.endswith("offline mode is on")


def test_a_single_file_of_a_folder_may_be_named_from_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "list.json").write_text("[]")
    assert fetch_file("~/tiny", "config.json") == folder / "config.json"
    assert fetch_json("~/tiny", "config.json") == {"a": 1}
    assert fetch_json(folder, "absent.json") is None
    with pytest.raises(CheckpointError, match=r"list\.json must hold a JSON object, not list"):
        fetch_json(folder, "list.json")
    with pytest.raises(CheckpointError, match="revision 'v1' cannot be chosen"):
        fetch_file(folder, "config.json", "v1")
    with pytest.raises(CheckpointError, match="the name is no Hugging Face repository"):
        fetch_file("nowhere", "config.json")


# Folders


def test_a_folder_comes_before_a_repository_of_the_same_name(tmp_path, monkeypatch):
    folder = tmp_path / "org" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"w": np.zeros(1, np.float32)}, folder / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/tiny").folder == Path("org/tiny")
    monkeypatch.chdir(folder)
    assert open_checkpoint(".").name == "tiny"
    with pytest.raises(CheckpointError, match="name is empty; give a folder, or a repository"):
        open_checkpoint("")
    with pytest.raises(CheckpointError, match="local folder, so revision 'v1' cannot be chosen"):
        open_checkpoint(".", revision="v1")


@pytest.mark.parametrize(
    "name",
    [
        "tiny",
        "./org/tiny",
        "/org/tiny",
        "a/b/c",
        "~/tiny",
        "..",
        "org/../tiny",
        "org/",
        "a b/c",
    ],
)
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if name == "..":
        with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
            open_checkpoint(name)
        return
    with pytest.raises(CheckpointError, match=r"folder .* does not exist, and the name is no Hugg"):
        open_checkpoint(name)


def test_a_path_object_is_never_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(Path("org/tiny"))


def test_a_file_is_not_a_checkpoint(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        open_checkpoint(file)


def test_a_revision_given_twice_is_a_contradiction():
    with pytest.raises(CheckpointError, match="already names a revision"):
        open_checkpoint("org/tiny@v1", revision="v2", offline=True)


def test_importing_the_module_loads_neither_jax_nor_the_hub():
    heavy = "{'jax', 'huggingface_hub'}"
    script = f"import kda_mla_kernels.checkpoint, sys; print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
