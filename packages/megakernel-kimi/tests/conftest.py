"""The golden checkpoint and models loaded from it; a small rank table, trained here, and the real
control tokens."""

import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from kda_mla_kernels.checkpoint import open_checkpoint
from kda_mla_kernels.testing import recompiled
from megakernel_kimi import package
from megakernel_kimi.checkpoint import read_tensors
from megakernel_kimi.config import KimiConfig
from megakernel_kimi.tokenizer import KimiTokenizer
from megakernel_kimi.tokenizer.convert import SPLIT
from megakernel_kimi.xla.programs import Programs
from tokenizers import Regex, pre_tokenizers
from tpu_collectives.testing import quick_options, virtual_devices

jax.config.update("jax_platforms", "cpu")
virtual_devices(8)

# Programs are compiled in a hurry: each runs a few times.
Programs.compiler_options = {**Programs.compiler_options, **quick_options(same_bits=True)}

TINY = Path(__file__).parent / "golden" / "k3_tiny"

CORPUS = """
The quick brown fox jumps over the lazy dog. It's what they'll do; we've seen that, haven't we?
A message, a response and a thought: think, message, response, role, user, assistant, system, tools.
Messages and responses are thought of as calls, with an argument of type string and an index.
THE WEATHER IN PARIS ISN'T GOOD. I'D SAY THEY'RE RIGHT. camelCase, PascalCase, snake_case, HTTP
def weather(city: str, days: int = 3) -> dict:\n    return {"city": city, "days": days}\n\n
    for i in range(10):\n        print(i, i * 2, 1234567, 3.14159)\n\n\n
Der schnelle Fuchs springt über den faulen Hund. Grüße aus München und Zürich, größer als größte.
Le renard rapide saute par-dessus le chien paresseux. L'été, c'était déjà très agréable à Orléans.
Быстрая лиса прыгает через ленивую собаку. Погода в Париже сегодня хорошая, а завтра плохая.
敏捷的棕色狐狸跳过了懒狗。今天巴黎的天气很好,明天的天气不好。中文和English混合。
素早い茶色の狐はのろまな犬を飛び越える。今日のパリの天気はとても良いです。カタカナとひらがな。
الثعلب البني السريع يقفز فوق الكلب الكسول. الطقس في باريس جيد اليوم.
तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है। आज पेरिस में मौसम अच्छा है।
빠른 갈색 여우가 게으른 개를 뛰어넘습니다. 오늘 파리의 날씨는 좋습니다.
😀😃😄 🎉🎉 👩‍👩‍👧‍👦 🇫🇷🇩🇪 <|open|> <|close|> </think> ="value" &amp; &quot;
2024 2025 2026 123 1234 12345 123456 100 1000 10000 2024 2025 2026 123 1234 12345
a="<x" b="<y" c="<z" d="<x" e="<y" f="<z"
{"a": [1, 2, 3], "b": null}
"""

SPECIALS = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")


def train_ranks(merges=700):
    """Ranks of a byte-pair encoding: 256 bytes, then one token per merge, then two oddities."""
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    words = Counter(piece for piece, _ in split.pre_tokenize_str(CORPUS))
    pieces = {word: [bytes([byte]) for byte in word.encode()] for word in words}
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < 256 + merges:
        pairs = Counter()
        for word, parts in pieces.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks[left + right] = len(ranks)
        for parts in pieces.values():
            at = 0
            # Leftmost first, as encoding does, or a token such as three line breaks would be
            # built from another pair than the one that encoding meets.
            while at < len(parts) - 1:
                if parts[at : at + 2] == [left, right]:
                    parts[at : at + 2] = [left + right]
                at += 1
    # A hole of three ids, and a token that no merge reaches.
    ranks[b"zqxj"] = len(ranks) + 3
    return ranks


@pytest.fixture(scope="session")
def ranks():
    return train_ranks()


@pytest.fixture(scope="session")
def few_ranks():
    """As many as the golden checkpoint's vocabulary has room for."""
    return train_ranks(merges=200)


@pytest.fixture(scope="session")
def specials(ranks):
    first = max(ranks.values()) + 1
    return {first + i: name for i, name in enumerate(SPECIALS)} | {first + 254: "[UNK]"}


@pytest.fixture(scope="session")
def tokenizer(ranks, specials):
    return KimiTokenizer(ranks, specials)


@pytest.fixture(scope="session")
def golden():
    with np.load(TINY / "golden.npz") as data:
        return dict(data)


@pytest.fixture(scope="session")
def tiny_checkpoint():
    return open_checkpoint(TINY)


@pytest.fixture(scope="session")
def tiny_config(tiny_checkpoint):
    return KimiConfig.from_dict(tiny_checkpoint.config)


@pytest.fixture(scope="session")
def tiny_tensors(tiny_checkpoint, tiny_config):
    return read_tensors(tiny_checkpoint, tiny_config)


@pytest.fixture(scope="session")
def short_folder(tmp_path_factory):
    """The first four layers of the golden checkpoint: one of each form, in two blocks."""
    folder = tmp_path_factory.mktemp("short")
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 4
    attention = config["text_config"]["linear_attn_config"]
    attention |= {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    for file in TINY.glob("model*"):
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="session")
def load_tiny(short_folder):
    """Loads the golden checkpoint; equal arguments give the same model. Its first layers, which
    compile faster, are enough for what does not need golden numbers; a rough compilation is for
    what holds to a tolerance."""

    @cache
    def load(ranks=1, short=False, rough=False, **options):
        options = {"numerics": "f32", "max_context": 256, **options}
        folder = short_folder if short else TINY
        model = package.load(folder, devices=jax.devices()[:ranks], **options)
        return recompiled(model, quick_options()) if rough else model

    return load


def row_state(state, row, positions):
    """One row's recurrent state and the first positions of what it caches, as numpy."""
    caches = state.caches
    # Cut to the positions by numpy: jax compiles a program for each shape.
    tail, delta, latents, shared = (
        np.asarray(part[:, :, row])
        for part in (caches.tail, caches.delta, caches.latents, caches.shared)
    )
    return {
        "tail": tail[:, :, :3],
        "delta": delta,
        "latents": latents[:, :, :positions],
        "shared": shared[..., :positions],
    }


@pytest.fixture(scope="session")
def state_of_row():
    return row_state
