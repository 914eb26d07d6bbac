"""Writes ids.json: what the tiktoken package encodes with the rank table of the tests.

Needs tiktoken, which the project does not depend on. Run from the package's folder:

    python tests/golden/tiktoken/make_ids.py        writes the fixture
    python tests/golden/tiktoken/make_ids.py 20000  also compares this many random texts
"""

import hashlib
import importlib.util
import json
import random
import sys
from pathlib import Path

import tiktoken

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("tables", HERE.parent.parent / "conftest.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)

from megakernel_kimi.tokenizer import KimiTokenizer  # noqa: E402
from megakernel_kimi.tokenizer.convert import SPLIT  # noqa: E402

RANGES = [
    (0x20, 0x7F), (0xA0, 0x180), (0x300, 0x330), (0x370, 0x400), (0x400, 0x460), (0x5D0, 0x5EB),
    (0x620, 0x660), (0x900, 0x970), (0xE00, 0xE40), (0x1100, 0x1120), (0x2000, 0x2070),
    (0x2150, 0x2190), (0x3000, 0x3100), (0x4E00, 0x4F00), (0xAC00, 0xAC80), (0xFF00, 0xFF60),
    (0x1F300, 0x1F3FF), (0x1F600, 0x1F64F), (0x20000, 0x20020), (0x1D400, 0x1D440), (0xE000, 0xE004),
]
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\n\n  ", "\u00a0", "\u3000", "\u2028", "\x0b", "\x1c", "\x85"]


def random_text(rng):
    parts = []
    words = tables.CORPUS.split()
    for _ in range(rng.randrange(1, 25)):
        kind = rng.randrange(6)
        if kind == 0:
            parts.append(rng.choice(SPACES) * rng.randrange(1, 4))
        elif kind == 1:
            parts.append(str(rng.randrange(10 ** rng.randrange(1, 9))))
        elif kind == 2:
            parts.append(rng.choice(["'s", "'T", "'Re", "'ll", "'D", "'x", "_", "--", "...", "\""]))
        elif kind == 3:
            low, high = rng.choice(RANGES)
            parts.append("".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 6))))
        elif kind == 4:
            parts.append(rng.choice(words))
        else:
            word = rng.choice(words)
            parts.append(rng.choice([str.upper, str.title, str.swapcase])(word))
        if rng.random() < 0.4:
            parts.append(" ")
    return "".join(parts)


def main():
    ranks = tables.train_ranks()
    encoding = tiktoken.Encoding("table", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
    fixed = ["", " ", "zqxj", " zqxj", "zqxjz", "<|open|>", "[EOS]", tables.CORPUS, "a" * 300, " " * 300]
    rng = random.Random(0)
    texts = fixed + [random_text(rng) for _ in range(150)]
    digest = hashlib.sha256(json.dumps([[k.hex(), v] for k, v in ranks.items()]).encode())
    fixture = {
        "origin": f"tiktoken {tiktoken.__version__}, Encoding.encode_ordinary; see make_ids.py",
        "ranks_sha256": digest.hexdigest(),
        "cases": [[text, encoding.encode_ordinary(text)] for text in texts],
    }
    lines = ",\n".join(json.dumps(case) for case in fixture.pop("cases"))
    head = json.dumps(fixture, indent=1)[:-2]
    (HERE / "ids.json").write_text(f'{head},\n "cases": [\n{lines}\n]}}\n')
    ours = KimiTokenizer(ranks, {})
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 0):
        text = random_text(rng)
        assert ours.encode_text(text) == encoding.encode_ordinary(text), (number, text)
    print("equal")


if __name__ == "__main__":
    main()
