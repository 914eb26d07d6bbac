"""The command line, as a process of its own, with a test family installed."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from bigram import eventually
from megakernel_serve.cli import execute
from megakernel_serve.engine import ContextLengthError

TESTS = Path(__file__).parent
CHECKPOINT = TESTS / "bigram_checkpoint"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A folder that looks like an installed distribution with one model family."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "megakernel_bigram-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megakernel-bigram\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megakernel.models]\nbigram = bigram:package\n")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MEGAKERNEL_", "BIGRAM_", "QWEN_"))
    }
    return kept | {
        "PYTHONPATH": f"{folder}{os.pathsep}{TESTS}",
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }


@pytest.fixture
def run(environment, tmp_path, monkeypatch, capfd):
    """Runs a command in this process: the same code, without waiting for jax each time."""
    for name in set(os.environ) - set(environment):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(environment["PYTHONPATH"].split(os.pathsep)[0])
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)

    def start(*arguments, stdin="", code=0, **variables):
        os.environ.update(variables)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            returned = execute([str(argument) for argument in arguments])
        finally:
            os.environ.clear()
            os.environ.update(before)
        output = capfd.readouterr()
        assert returned == code, output.err
        return Done(output.out, output.err)

    return start


class Done(NamedTuple):
    stdout: str
    stderr: str


def error_line(done):
    """Errors are one line, without a traceback."""
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("megakernel: error: "), done.stderr
    assert "Traceback" not in done.stderr
    return lines[-1]


def test_help_and_usage_errors_are_quick_and_do_not_import_jax(environment, tmp_path):
    code = (
        "import sys; from megakernel_serve.cli import main;"
        "codes = [main(['--help']), main(['serve', '--help']), main(['serve', '--port', 'x']),"
        " main(['generate', '--nope']), main([]), main(['bigram', '--serve', 'x'])];"
        "print(codes); slow = {'jax', 'starlette', 'pydantic', 'tokenizers', 'bigram'};"
        "print(sorted(slow & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["[0, 0, 2, 2, 2, 2]", "[]"]
    assert "bigram" in done.stdout
    assert "--port must be a whole number from 0 to 65535, not 'x'" in done.stderr


def test_generate_prints_the_text_on_stdout_and_figures_on_stderr(run):
    done = run("generate", "tell", "--model", CHECKPOINT)
    assert done.stdout == "tellhello wonderful world, hello again\n"
    assert "tokens/s" in done.stderr
    assert "3 prompt tokens" in done.stderr


def test_generate_reads_a_pipe_and_settings_from_every_place(run, tmp_path):
    (tmp_path / ".env").write_text(f"MEGAKERNEL_MODEL={CHECKPOINT}\nMEGAKERNEL_MAX_TOKENS=1\n")
    (tmp_path / "megakernel.toml").write_text("max_tokens = 5\ntemperature = 0.0\n")
    done = run("generate", stdin="tell")
    assert done.stdout == "tellhello\n"
    assert done.stderr.splitlines()[-1].endswith("ended by length")  # one line at any width
    (tmp_path / "other.toml").write_text("max_tokens = 2\n")
    (tmp_path / ".env").unlink()
    done = run("generate", "tell", "--config", "other.toml", MEGAKERNEL_MODEL=str(CHECKPOINT))
    assert "2 tokens" in done.stderr


def test_more_devices_than_exist_is_an_error(run):
    done = run("info", CHECKPOINT, "--devices", "500", code=1)
    assert "--devices 500 asks for more than the" in error_line(done)
    done = run("info", CHECKPOINT, "--devices", "100000", code=1)
    assert error_line(done).endswith("that exist (a CPU is divided into at most 256)")


def test_flags_that_would_do_nothing_are_refused(run):
    assert "--api-key needs --serve" in error_line(run("bigram", "--api-key", "x", code=2))
    done = run("bigram", "--serve", "localhost:0", "--system", "x", code=2)
    assert "--system does not go with --serve" in error_line(done)
    assert "is not HOST:PORT" in error_line(run("bigram", "--serve", "8000", code=2))


def test_usage_errors_exit_with_2(run, tmp_path):
    assert "there is no prompt" in error_line(run("generate", code=2))
    bad = run("generate", "x", "--rows", "0", code=2)
    assert "--rows must be a whole number >= 1, not '0'" in error_line(bad)
    idle = error_line(run("generate", "x", "--revision", "v1", code=2))
    assert "--revision needs --model" in idle
    idle = error_line(run("info", code=2, MEGAKERNEL_REVISION="v1"))
    assert "MEGAKERNEL_REVISION needs --model" in idle
    assert "give the model once" in error_line(run("info", "a", "--model", "b", code=2))
    assert "--model must be text that is not empty" in error_line(run("info", "", code=2))
    assert "--config must name a" in error_line(run("generate", "x", "--config", "", code=2))
    (tmp_path / "megakernel.toml").write_text("no_such = 1\n")
    assert "unknown key 'no_such'" in error_line(run("generate", "x", code=2))


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (("generate", "\udcff"), "the prompt is not valid UTF-8"),
        (("chat", "--system", "\udcff"), "--system must be text in UTF-8"),
        (("serve", "--api-key", "\udcff"), "--api-key must be a comma-separated list"),
    ],
)
def test_arguments_that_are_not_utf8_are_refused(run, arguments, place):
    assert place in error_line(run(*arguments, code=2))


def test_input_that_is_not_utf8_is_refused(run):
    assert "standard input is not valid" in error_line(run("generate", stdin="\udcff", code=2))
    done = run("chat", "--model", CHECKPOINT, stdin="\udcff\n", code=2)
    assert "standard input is not valid UTF-8" in error_line(done)


def test_output_that_cannot_show_a_letter_is_told(run, monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for command in (["generate", "é"], ["chat"]):
        monkeypatch.setattr(sys, "stdout", narrow)
        done = run(*command, "--model", CHECKPOINT, stdin="/é\n", code=1)
        assert r"standard output cannot show '\xe9': its encoding is ascii" in error_line(done)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", ["generate", "chat", "info"])
def test_output_that_is_full_or_closed_is_told(run, monkeypatch, command):
    prompt = ["tell"] if command == "generate" else []
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        done = run(command, *prompt, "--model", CHECKPOINT, stdin="tell\n", code=1)
    assert "cannot write to standard output: No space left" in error_line(done)
    monkeypatch.setattr(sys, "stdout", None)
    closed = run(command, *prompt, "--model", CHECKPOINT, code=1)
    assert "standard output is closed" in error_line(closed)


def test_a_dotenv_that_no_environment_can_hold_is_refused(run, tmp_path):
    for content in ("HF_HOME=a\0b\n", "'a=b'=c\n"):
        (tmp_path / ".env").write_text(content)
        assert ".env sets '" in error_line(run("info", CHECKPOINT, code=2))


def test_variables_that_only_look_like_settings_are_told(run, tmp_path):
    (tmp_path / ".env").write_text("MEGAKERNEL_ROW=1\n")
    done = run("info", CHECKPOINT, MEGAKERNEL_SURPRISE="1", MEGAKERNEL_ROWS="2")
    assert done.stderr.splitlines() == [
        "megakernel: warning: MEGAKERNEL_ROW in .env is no setting of this program;"
        " did you mean MEGAKERNEL_ROWS?",
        "megakernel: warning: MEGAKERNEL_SURPRISE is no setting of this program",
    ]


def test_failures_exit_with_1_and_one_sentence(run, tmp_path):
    missing = run("generate", "x", "--model", tmp_path, code=1)
    assert "has no config.json" in error_line(missing)
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    unknown = run("generate", "x", "--model", tmp_path, code=1)
    assert "no installed model package loads model_type 'other'" in error_line(unknown)
    nowhere = run("generate", "x", "--model", "no/where", code=1)
    assert "'no/where'" in error_line(nowhere)
    long = run("generate", "x" * 300, "--model", CHECKPOINT, code=1)
    assert "context is 256 tokens" in error_line(long)
    with pytest.raises(ContextLengthError):
        run("generate", "x" * 300, "--model", CHECKPOINT, "--debug")


def test_a_model_without_a_tokenizer_has_info_and_nothing_to_say(run, tmp_path):
    folder = slow_checkpoint(tmp_path, tokenizer=False)
    assert "bigram" in run("info", folder).stdout
    for command in (["generate", "x"], ["chat"]):
        done = run(*command, "--model", folder, code=1)
        assert "mute has no tokenizer" in error_line(done)


def test_devices_become_virtual_ones_on_a_cpu(environment):
    command = [sys.executable, "-m", "megakernel_serve", "info", CHECKPOINT, "--devices", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "3 rank(s)" in done.stdout


def test_info_shows_what_a_model_is(run):
    done = run("info", CHECKPOINT, "--rows", "3", "--context", "99")
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert lines["family"].strip() == "bigram"
    assert "3 row" in lines["state"]
    assert "99 positions" in lines["context"]


def test_chat_answers_forgets_and_leaves(run):
    lines = "tell\n/reset\n/what\ntell\n/exit\nnever\n"
    done = run("chat", "--model", CHECKPOINT, stdin=lines)
    assert done.stdout.count("hello wonderful world, hello again") == 2
    assert "unknown command /what" in done.stdout
    assert "never" not in done.stdout


def test_a_familys_command_takes_its_own_variables(run, tmp_path):
    shown = run("bigram", stdin="tell\n", BIGRAM_CHECKPOINT=str(CHECKPOINT))
    assert "hello wonderful world" in shown.stdout
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"default": "hello from other"}))
    shown = run("bigram", "--model", other, stdin="tell\n", BIGRAM_CHECKPOINT=str(CHECKPOINT))
    assert "hello from other" in shown.stdout
    failed = run("bigram", code=1)
    assert "example/bigram has no config.json" in error_line(failed)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def serve(environment, tmp_path):
    started = []

    def start(*arguments):
        port = free_port()
        where = ["serve", "--rows", "1", "--port", str(port)]
        if arguments and arguments[0] == "bigram":
            where = ["bigram", "--serve", f"127.0.0.1:{port}"]
            arguments = arguments[1:]
        command = [sys.executable, "-m", "megakernel_serve", *where, *map(str, arguments)]
        process = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, f"http://127.0.0.1:{port}"

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def health(url, seconds=60.0):
    """The first answer of /health."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return httpx.get(f"{url}/health")
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def wait_ready(url):
    deadline = time.monotonic() + 60
    while health(url).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_queued(url):
    deadline = time.monotonic() + 60
    while health(url).json()["waiting"] == 0:
        assert time.monotonic() < deadline


def slow_checkpoint(tmp_path, **config):
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bigram"} | config))
    return folder


def test_serve_is_healthy_once_loaded_and_finishes_what_it_has_taken_after_sigterm(serve, tmp_path):
    process, url = serve("--model", slow_checkpoint(tmp_path, load_seconds=1, step_seconds=0.05))
    first = health(url)
    assert (first.status_code, first.json()["status"]) == (503, "loading")
    wait_ready(url)
    body = {"prompt": "hi", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        plain = {"prompt": "hi", "max_tokens": 5, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:  # waits for the only row while the server drains
            later = pool.submit(httpx.post, f"{url}/v1/completions", json=plain, timeout=60)
            wait_queued(url)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
    assert later.result().json()["usage"]["completion_tokens"] == 5
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert process.wait(20) == 0
    assert "Finishing 2 answers for at most 30 s" in process.stderr.read()


def read_health(url):
    response = httpx.get(f"{url}/health")
    return response.status_code, response.json()["status"]


@pytest.mark.parametrize("second_signal", [False, True])
def test_answers_that_outlast_the_drain_end_in_their_own_words(serve, tmp_path, second_signal):
    checkpoint = slow_checkpoint(tmp_path, step_seconds=0.1)
    seconds = "60" if second_signal else "1"
    process, url = serve("--model", checkpoint, "--drain-seconds", seconds)
    wait_ready(url)
    body = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True}
    where = f"{url}/v1/completions"
    with (
        ThreadPoolExecutor() as pool,
        httpx.stream("POST", where, json=body | {"stream": True}, timeout=60) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        plain = pool.submit(httpx.post, where, json=body, timeout=60)
        wait_queued(url)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        eventually(lambda: read_health(url) == (503, "draining"))
        refused = httpx.post(where, json=body)
        if second_signal:
            process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    for answer in (refused, plain.result()):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert answer.json()["error"]["message"] == "the server is shutting down"
    assert "the server is shutting down" in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert process.wait(20) == 0
    assert time.monotonic() - started < 8
    assert "Traceback" not in process.stderr.read()


def test_a_request_that_never_arrives_whole_does_not_hold_up_the_end(serve, tmp_path):
    process, url = serve("--model", slow_checkpoint(tmp_path), "--drain-seconds", "0")
    wait_ready(url)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert client.recv(100).startswith(b"HTTP/1.1 503")
    assert process.wait(20) == 0
    assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_server_is_still_starting_is_not_lost(serve, tmp_path, number, code):
    process, url = serve("--model", slow_checkpoint(tmp_path, load_seconds=60))
    port = int(url.rpartition(":")[2])
    eventually(lambda: accepts(port), 60)  # bound, and uvicorn is yet to start
    process.send_signal(number)
    assert process.wait(20) == code
    assert "Traceback" not in process.stderr.read()


def accepts(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_sigint_while_loading_exits_with_130_at_once(serve, tmp_path):
    process, url = serve("bigram", "--model", slow_checkpoint(tmp_path, load_seconds=60))
    assert health(url).status_code == 503
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130


def test_an_interrupted_answer_exits_with_130_and_without_a_traceback(environment, tmp_path):
    checkpoint = slow_checkpoint(tmp_path, step_seconds=0.2)
    command = [sys.executable, "-m", "megakernel_serve", "generate", "hi", "--model", checkpoint]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.read(2) == "hi"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == ""


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("serve", "--port", port, "--model", "no/where", code=1)
    assert f"cannot listen on http://127.0.0.1:{port}" in error_line(done)


def test_a_model_that_cannot_be_loaded_ends_the_server(run, tmp_path):
    folder = slow_checkpoint(tmp_path)
    (folder / "config.json").write_text('{"model_type": "bigram", "load_seconds": "x"}')
    done = run("serve", "--port", "0", "--model", folder, code=1)
    assert "str" in error_line(done)
