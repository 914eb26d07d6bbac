"""Checkpoints by repository name, from a cache that was filled before, without a network."""

import shutil

import pytest

FIRST, SECOND = "1" * 40, "2" * 40


@pytest.fixture(scope="module")
def cache(tmp_path_factory, embedded):
    """A cache home with two revisions of one repository; ``main`` is the second.

    As the hub's library keeps it: files are stored once by content and linked into snapshots.
    """
    home = tmp_path_factory.mktemp("home")
    repository = home / "hub" / "models--someone--small-qwen"
    (repository / "blobs").mkdir(parents=True)
    for commit, name in ((FIRST, "v1"), (SECOND, "main")):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in embedded.glob("*.*"):
            if file.suffix in (".json", ".safetensors"):
                blob = repository / "blobs" / f"{commit[0]}-{file.name}"
                shutil.copy(file, blob)
                (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit, encoding="utf-8")
    first = repository / "snapshots" / FIRST / "generation_config.json"
    first.write_text('{"do_sample": true, "temperature": 0.5}', encoding="utf-8")
    return str(home)


@pytest.mark.parametrize(
    ("arguments", "temperature"),
    [
        (["someone/small-qwen"], 1.0),
        (["someone/small-qwen", "--revision", "v1"], 0.5),
        (["someone/small-qwen", "--revision", FIRST], 0.5),
    ],
    ids=["main", "tag", "commit"],
)
def test_a_repository_is_loaded_at_its_revision(arguments, temperature, megakernel, cache):
    shown = megakernel("info", *arguments, HF_HOME=cache).stdout
    assert "someone/small-qwen" in shown
    assert f"temperature {temperature}," in shown


def test_a_pinned_revision_of_the_family_comes_from_its_variable(megakernel, cache, tmp_path):
    lines = f"HF_HOME={cache}\nQWEN_CHECKPOINT=someone/small-qwen\nQWEN_CHECKPOINT_REVISION=v2\n"
    (tmp_path / ".env").write_text(lines, encoding="utf-8")
    done = megakernel("qwen", code=1)
    assert "'someone/small-qwen@v2'" in done.stderr


def test_what_is_not_cached_is_an_error_that_says_so(megakernel, cache):
    done = megakernel("info", "someone/other", code=1, HF_HOME=cache)
    assert "someone/other" in done.stderr
    assert done.stderr.count("\n") == 1
