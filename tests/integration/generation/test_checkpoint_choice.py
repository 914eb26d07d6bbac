"""Where the checkpoint of ``megakernel qwen`` comes from: flag, variables, ``.env``, file."""

import pytest

PLACES = ("flag", "variable", "dotenv", "general variable", "file")
"""Strongest first. A folder that does not exist makes the error say which place was believed."""


def arrange(folder, places):
    """Names another missing folder in each place; the arguments and variables of the command."""
    arguments, variables, lines = ["qwen"], {}, []
    if "flag" in places:
        arguments += ["--model", "./from-flag"]
    if "variable" in places:
        variables["QWEN_CHECKPOINT"] = "./from-variable"
    if "dotenv" in places:
        lines += ["QWEN_CHECKPOINT=./from-dotenv"]
    if "general variable" in places:
        variables["MEGAKERNEL_MODEL"] = "./from-general variable"
    if "file" in places:
        (folder / "megakernel.toml").write_text('model = "./from-file"\n', encoding="utf-8")
    (folder / ".env").write_text("\n".join(lines), encoding="utf-8")
    return arguments, variables


@pytest.mark.parametrize("strongest", range(len(PLACES)), ids=PLACES)
def test_the_strongest_place_is_believed(strongest, megakernel, tmp_path):
    arguments, variables = arrange(tmp_path, PLACES[strongest:])
    done = megakernel(*arguments, code=1, **variables)
    assert f"no checkpoint './from-{PLACES[strongest]}'" in done.stderr


def test_the_checkpoint_of_the_variable_is_talked_to(megakernel, embedded, tmp_path):
    (tmp_path / ".env").write_text(f"QWEN_CHECKPOINT={embedded}\n", encoding="utf-8")
    (tmp_path / "megakernel.toml").write_text("max_tokens = 3\nthinking = false\n")
    done = megakernel("qwen", "--temperature", 0, stdin="hi\n/exit\n")
    assert done.stderr.startswith("embedded. ")
    assert ", 3 tokens in " in done.stderr
    assert done.stdout.strip()


def test_info_says_what_the_embedded_model_is(megakernel, embedded):
    plain, named = (megakernel("info", *extra).stdout for extra in ([], [embedded]))
    assert plain == named
    lines = dict(line.split("  ", 1) for line in plain.splitlines())
    lines = {name: value.strip() for name, value in lines.items()}
    assert lines["family"] == "qwen"
    assert lines["legal ranks"] == "1, 2, 4, 8"
    assert lines["layers"] == "8 of width 128"
    assert lines["end ids"] == "2000, 2002"
