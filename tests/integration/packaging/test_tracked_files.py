"""Files of the repository speak of no particular machine."""

import re

from .workspace import ROOT, repository_files

HOMES = ("root", "work", "tmp", "opt", r"home/\w+", r"Users/\w+", r"mnt/\w+", r"private/\w+")
MACHINE_PATH = re.compile(
    rf"(?<![\w.~/}}\])-])/(?:{'|'.join(HOMES)})(?=[/\s\"'`,;:)]|$)|\b[A-Z]:\\Users\\", re.MULTILINE
)


def machine_paths(text: str) -> list[str]:
    return [match[0] for match in MACHINE_PATH.finditer(text)]


def test_no_text_file_contains_a_path_of_some_machine():
    wrong = []
    for file in repository_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        lines = text.splitlines() if machine_paths(text) else []
        wrong += [
            f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(lines, 1)
            if machine_paths(line)
        ]
    assert not wrong, wrong


def test_the_search_finds_paths_and_leaves_addresses_alone():
    slash = "/"
    for path in ("root/x", "home/me/x", "Users/me", "tmp/x", "work/x"):
        assert machine_paths(f"see {slash}{path}, please"), path
        assert machine_paths(f'"{slash}{path}"'), path
    for text in (
        f"https://example.com{slash}work{slash}x",
        f"either{slash}work or",
        f"~{slash}tmp{slash}x",
        f"a{slash}root{slash}b",
        "workers",
    ):
        assert not machine_paths(text), text
