"""Tokenizer folders, byte-exact streaming (cases V2), stop strings (V3), small BPE training."""

import json
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from clover_jax.data.bpe import ADDED_TOKENS, SMALLEST_VOCAB, train_bpe, write_tokenizer
from clover_jax.data.tokenizer import StopStrings, StreamDecoder, Tokenizer
from clover_jax.errors import CloverError

CORPUS = ["the cat sat on the mat, and the dog sat on 12 34", "Příliš žluťoučký kůň", "你好"] * 3
TEXTS = {
    "emoji": "a🙂b🫠👩‍👩‍👧‍👦c",
    "flags": "🇨🇿🇺🇳🏴‍☠️",
    "chinese": "你好，世界。你好",
    "czech": "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "arabic": "مرحبا بالعالم",
    "combining": unicodedata.normalize("NFC", "ẍ́q̣̇"),
    "literal replacement sign": "a\ufffdb\ufffd",
}
ADDED = [text for text, _ in ADDED_TOKENS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    backend = train_bpe(CORPUS, 320)
    write_tokenizer(path, backend, model_max_length=512)
    # 你好 as [lead byte] [rest of 你 and lead byte of 好] [rest of 好]: merges across characters
    spec = json.loads(backend.to_str())
    c = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("你好")[0][0]
    merges = [(c[1], c[2]), (c[1:3], c[3]), (c[4], c[5])]
    spec["model"]["vocab"] = {t: i for t, i in spec["model"]["vocab"].items() if i < SMALLEST_VOCAB}
    spec["model"]["merges"] = [list(pair) for pair in merges]
    for i, (left, right) in enumerate(merges):
        spec["model"]["vocab"][left + right] = SMALLEST_VOCAB + i
    (path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def edited(folder: Path, tmp_path: Path, name: str, content: bytes | None) -> Path:
    """A copy of the folder with one file replaced, or without it."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if content is None:
        (tmp_path / name).unlink(missing_ok=True)
    else:
        (tmp_path / name).write_bytes(content)
    return tmp_path


# --- loading -------------------------------------------------------------------------------------


def test_ids_come_from_the_folder(tokenizer: Tokenizer) -> None:
    assert tokenizer.stop_ids == (2, 0)
    assert tokenizer.end_of_turn_id == 2
    assert tokenizer.pad_id == 0
    assert tokenizer.mask_id == 5
    assert (tokenizer.think_open_id, tokenizer.think_close_id) == (3, 4)
    assert tokenizer.special_ids == {0, 1, 2, 5}
    assert tokenizer.vocab_size == SMALLEST_VOCAB + 3
    assert tokenizer.special_texts["eos_token"] == "<|im_end|>"
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, {"stop_ids": (2,), "pad_id": 0}),
        ({}, {}, {"stop_ids": (2,)}),
        ({"eos_token_id": None}, {}, {"stop_ids": (2,)}),
        ({"eos_token_id": 0}, {}, {"stop_ids": (0,), "end_of_turn_id": 0}),
        ({"eos_token_id": [0, 2, 0]}, {}, {"stop_ids": (0, 2), "end_of_turn_id": 2}),
        ({"eos_token_id": 1}, {"eos_token": None}, {"stop_ids": (1,), "end_of_turn_id": 1}),
        ({"pad_token_id": 1}, {}, {"pad_id": 0}),
        ({"pad_token_id": 1}, {"pad_token": None}, {"pad_id": 1}),
        ({"eos_token_id": 2}, {"pad_token": None}, {"pad_id": 2}),
        ({}, {"eos_token": {"content": "<|endoftext|>", "lstrip": False}}, {"stop_ids": (0,)}),
        ({}, {"mask_token": "<|im_start|>"}, {"mask_id": 1}),
        ({}, {"mask_token": None}, {"mask_id": 5}),
        ({}, {"model_max_length": 10**30}, {"stop_ids": (2,)}),
    ],
)
def test_where_an_id_is_looked_up(folder, tmp_path, generation, config, expected) -> None:
    content = None if generation is None else json.dumps(generation).encode()
    path = edited(folder, tmp_path, "generation_config.json", content)
    base = json.loads((folder / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(base | config))
    loaded = Tokenizer.load(path)
    assert {name: getattr(loaded, name) for name in expected} == expected


def test_absent_tokens_are_none(folder, tmp_path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"] = spec["added_tokens"][:3]
    path = edited(folder, tmp_path, "tokenizer.json", json.dumps(spec).encode())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"mask_token": None}))
    loaded = Tokenizer.load(path)
    assert (loaded.mask_id, loaded.think_open_id, loaded.think_close_id) == (None, None, None)


def test_tokens_of_tokenizer_config_are_added(folder, tmp_path) -> None:
    """Qwen3.6 lists its last seven tokens in tokenizer_config.json only."""
    end = SMALLEST_VOCAB + 3
    declared = {
        str(end + 1): {"content": "<late>", "special": False},
        str(end): {"content": "<|audio|>", "special": True, "normalized": False},
        "3": {"content": "<think>", "special": False, "normalized": False},
    }
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = declared
    path = edited(folder, tmp_path, "tokenizer_config.json", json.dumps(config).encode())
    loaded = Tokenizer.load(path)
    assert loaded.vocab_size == end + 2
    assert loaded.encode("<|audio|><late><think>", special=True) == [end, end + 1, 3]
    assert loaded.special_ids == {0, 1, 2, 5, end}


@pytest.mark.parametrize(
    ("file", "config", "expected"),
    [
        (b"from file", "from config", "from file"),
        (None, "from config", "from config"),
        (None, [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        (None, None, None),
    ],
)
def test_where_the_chat_template_is_looked_up(folder, tmp_path, file, config, expected) -> None:
    path = edited(folder, tmp_path, "chat_template.jinja", file)
    base = json.loads((folder / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(base | {"chat_template": config}))
    assert Tokenizer.load(path).chat_template == expected


def test_stored_limits_do_not_change_prompts(folder, tmp_path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst"}
    spec["truncation"]["stride"] = 0
    spec["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    spec["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    loaded = Tokenizer.load(edited(folder, tmp_path, "tokenizer.json", json.dumps(spec).encode()))
    assert len(loaded.encode("12345", special=True)) == 5


NOT_JSON_OBJECTS = [
    b"",
    b"\xff\xfe\x00",
    b"null",
    b"[]",
    b"3",
    b'"x"',
    b"{",
    b"[" * 100_000,
    b'{"eos_token_id": NaN}',
    '{"eos_token": "<|im_end|>"}'.encode("utf-16"),
    b"\x00" * 4096,
]


def spec_edits(spec: dict) -> list[tuple[str, object]]:
    """(name, bent copy) of a good tokenizer.json."""
    model, added = spec["model"], spec["added_tokens"]
    vocab = model["vocab"]
    bent = {
        "empty object": {},
        "model null": spec | {"model": None},
        "model list": spec | {"model": [1]},
        "model of words": spec
        | {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<|im_end|>"}},
        "affix": spec | {"model": model | {"continuing_subword_prefix": "##" * 9}},
        "dropout": spec | {"model": model | {"dropout": 0.5}},
        "vocab list": spec | {"model": model | {"vocab": list(vocab)}},
        "vocab null": spec | {"model": model | {"vocab": None}},
        "vocab empty": spec | {"model": model | {"vocab": {}, "merges": []}},
        "vocab lacks a byte": spec
        | {"model": model | {"vocab": {t: i for t, i in vocab.items() if t != "a"}}},
        "id negative": spec | {"model": model | {"vocab": vocab | {"a": -1}}},
        "id huge": spec | {"model": model | {"vocab": vocab | {"a": 2**40}}},
        "id text": spec | {"model": model | {"vocab": vocab | {"a": "7"}}},
        "merges number": spec | {"model": model | {"merges": 3}},
        "merges unknown": spec | {"model": model | {"merges": [["a", "zzz"]]}},
        "no pre-tokenizer": spec | {"pre_tokenizer": None},
        "pre-tokenizer with prefix space": spec
        | {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        },
        "pre-tokenizer unknown": spec | {"pre_tokenizer": {"type": "Nope"}},
        "no decoder": spec | {"decoder": None},
        "decoder of another kind": spec | {"decoder": {"type": "Fuse"}},
        "normalizer lowers": spec | {"normalizer": {"type": "Lowercase"}},
        "normalizer strips": spec
        | {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        "added dict": spec | {"added_tokens": {"a": 1}},
        "added without content": spec | {"added_tokens": [{"id": 0}]},
        "added flag text": spec | {"added_tokens": [added[0] | {"special": "yes"}]},
        "version": spec | {"version": "9.0"},
    }
    return list(bent.items())


CONFIG_EDITS = [
    {"eos_token": 5},
    {"eos_token": ["<|im_end|>"]},
    {"eos_token": {"content": 3}},
    {"eos_token": {"text": "<|im_end|>"}},
    {"eos_token": "<|nowhere|>"},
    {"pad_token": []},
    {"pad_token": "<|nowhere|>"},
    {"mask_token": True},
    {"mask_token": "<|nowhere|>"},
    {"added_tokens_decoder": []},
    {"added_tokens_decoder": {"x": {"content": "<a>"}}},
    {"added_tokens_decoder": {"5": "<|mask|>"}},
    {"added_tokens_decoder": {"9": {"content": "<|mask|>"}}},
    {"added_tokens_decoder": {"400": {"content": "<gap>"}}},
    {"added_tokens_decoder": {"-1": {"content": "<a>"}}},
    {"added_tokens_decoder": {"5": {"content": ""}}},
    {"added_tokens_decoder": {"5": {"special": True}}},
    {"added_tokens_decoder": {"5": {"content": "<|mask|>", "special": "yes"}}},
    {"chat_template": 3},
    {"chat_template": {"default": "x"}},
    {"chat_template": ["x"]},
    {"chat_template": [{"name": "default"}]},
    {"chat_template": [{"name": "other", "template": "x"}]},
]
GENERATION_EDITS = [
    {"eos_token_id": "2"},
    {"eos_token_id": []},
    {"eos_token_id": [True]},
    {"eos_token_id": 1.5},
    {"eos_token_id": -1},
    {"eos_token_id": 10**6},
    {"eos_token_id": 2**70},
    {"eos_token_id": [[2]]},
    {"eos_token_id": {"id": 2}},
    {"pad_token_id": "0", "eos_token_id": 2},
    {"pad_token_id": [0], "eos_token_id": 2},
]


def bent_files(folder: Path) -> list[tuple[str, str, bytes | None]]:
    """(name of the case, file, content or None for a missing file)."""
    spec_text = (folder / "tokenizer.json").read_bytes()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    cases: list[tuple[str, str, bytes | None]] = []
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        cases += [(f"{file} {raw[:12]!r}", file, raw) for raw in NOT_JSON_OBJECTS]
    cases.append(("cut", "tokenizer.json", spec_text[: len(spec_text) // 2]))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        cases.append((f"{file} missing", file, None))
    for name, bent in spec_edits(json.loads(spec_text)):
        cases.append((name, "tokenizer.json", json.dumps(bent).encode()))
    for edit in CONFIG_EDITS:
        cases.append((str(edit), "tokenizer_config.json", json.dumps(config | edit).encode()))
    for edit in GENERATION_EDITS:
        cases.append((str(edit), "generation_config.json", json.dumps(edit).encode()))
    cases.append(("template not UTF-8", "chat_template.jinja", b"\xff\xfe"))
    return cases


def test_bent_files_are_named(folder, tmp_path, subtests) -> None:
    for i, (name, file, content) in enumerate(bent_files(folder)):
        directory = tmp_path / str(i)
        directory.mkdir()
        path = edited(folder, directory, file, content)
        config = path / "tokenizer_config.json"
        if file == "chat_template.jinja":
            config.write_text(json.dumps({"eos_token": "<|im_end|>"}))
        elif file == "tokenizer_config.json" and content is not None and b"template" in content:
            (path / "chat_template.jinja").unlink()
        with (
            subtests.test(name),
            pytest.raises(CloverError, match=r"tokenizer|generation|template"),
        ):
            Tokenizer.load(path)


def test_folder_problems(folder, tmp_path) -> None:
    no_stop = edited(folder, tmp_path, "generation_config.json", None)
    (no_stop / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CloverError, match="eos_token"):
        Tokenizer.load(no_stop)
    for bad in (tmp_path / "nowhere", folder / "tokenizer.json", tmp_path / "a\0b"):
        with pytest.raises(CloverError, match=r"tokenizer_config\.json"):
            Tokenizer.load(bad)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").mkdir()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with pytest.raises(CloverError, match=r"chat_template\.jinja"):
        Tokenizer.load(tmp_path)


def test_no_jax_is_imported() -> None:
    code = (
        "import sys, clover_jax.data.tokenizer, clover_jax.data.chat, clover_jax.data.bpe\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- encoding and decoding -----------------------------------------------------------------------


def test_control_tokens_only_on_request(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_end|><think><|mask|>", special=True) == [2, 3, 5]
    plain = tokenizer.encode("<|im_end|><think><|mask|>", special=False)
    assert plain == tokenizer.encode("<", special=False) + plain[1:]
    assert min(plain) >= len(ADDED)
    assert tokenizer.decode(plain, skip_special=True) == "<|im_end|><think><|mask|>"


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.sampled_from([*ADDED, "<|im", "_end|>", " ", "a", "é", "\n"])))
def test_plain_text_never_gives_an_added_token(tokenizer, pieces) -> None:
    ids = tokenizer.encode("".join(pieces), special=False)
    assert all(i >= len(ADDED) for i in ids)
    assert tokenizer.decode(ids, skip_special=True) == "".join(pieces)


def test_tags_stay_in_shown_text(tokenizer: Tokenizer) -> None:
    text = "<|im_start|><think>a</think><tool_call>b</tool_call><|mask|><|im_end|><|endoftext|>"
    ids = tokenizer.encode(text, special=True)
    assert tokenizer.decode(ids, skip_special=False) == text
    shown = "<think>a</think><tool_call>b</tool_call>"
    assert tokenizer.decode(ids, skip_special=True) == shown


@settings(max_examples=300, deadline=None)
@given(text=st.text(), special=st.booleans())
def test_round_trip(tokenizer, text, special) -> None:
    ids = tokenizer.encode(text, special=special)
    assert tokenizer.decode(ids, skip_special=False) == unicodedata.normalize("NFC", text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("2026", special=True)) == 4


def test_what_cannot_be_encoded_or_decoded(tokenizer: Tokenizer) -> None:
    with pytest.raises(CloverError, match="surrogate"):
        tokenizer.encode("a\ud83d", special=True)
    for bad in (-1, tokenizer.vocab_size, 2**40):
        with pytest.raises(CloverError, match=str(bad)):
            tokenizer.decode([bad], skip_special=False)


# --- streaming (V2) ------------------------------------------------------------------------------


def streamed(tokenizer: Tokenizer, chunks: list[list[int]], *, skip_special: bool) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip_special=skip_special)
    return [*(decoder.push(chunk) for chunk in chunks), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_deltas_join_to_the_text(tokenizer, text, size) -> None:
    ids = tokenizer.encode(text, special=True)
    chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
    deltas = streamed(tokenizer, chunks, skip_special=True)
    assert "".join(deltas) == text
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")
    assert deltas[-1] == ""


def test_a_token_across_two_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("你好", special=True)
    assert len(ids) == 3  # lead byte; rest of the first and lead of the second; rest
    assert streamed(tokenizer, [[i] for i in ids], skip_special=True) == ["", "你", "好", ""]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_cut_at_every_token(tokenizer, text) -> None:
    ids = tokenizer.encode(text, special=True)
    for n in range(len(ids) + 1):
        deltas = streamed(tokenizer, [[i] for i in ids[:n]], skip_special=True)
        assert "".join(deltas) == tokenizer.backend.decode(ids[:n])
        assert text.startswith("".join(deltas[:-1]))  # a cut character shows at the flush only


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_stream_equals_the_library_for_any_ids(tokenizer, data, skip) -> None:
    one = st.integers(0, tokenizer.vocab_size - 1)
    chunks = data.draw(st.lists(st.lists(one, max_size=4), max_size=12))
    ids = [i for chunk in chunks for i in chunk]
    expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, chunks, skip_special=skip)) == expected
    assert tokenizer.decode(ids, skip_special=skip) == expected


# --- stop strings (V3) ---------------------------------------------------------------------------


def stopped(stops: list[str], chunks: list[str]) -> tuple[str, bool]:
    """What a reader sees of a text that comes in chunks."""
    stop, shown, matched = StopStrings(stops), "", False
    for chunk in chunks:
        more, matched = stop.push(chunk)
        shown += more
    more, matched = stop.flush()
    return shown + more, matched


@pytest.mark.parametrize("first", range(len("the brown fox jumps") + 1))
def test_a_stop_split_at_any_place(first) -> None:
    text = "the brown fox jumps"
    assert stopped(["own fox"], [text[:first], text[first:]]) == ("the br", True)
    assert stopped(["own foz"], [text[:first], text[first:]]) == (text, False)
    assert stopped(["own fox"], [*text]) == ("the br", True)


def test_only_what_could_be_a_beginning_is_held() -> None:
    stop = StopStrings(["own fox", "\n\n"])
    assert stop.push("the brow") == ("the br", False)
    assert stop.push("n fo") == ("", False)
    assert stop.push("r\n") == ("own for", False)
    assert stop.push("a") == ("\na", False)
    assert stop.push("x\n\nbehind") == ("x", True)
    assert stop.push("more") == ("", True)
    assert stop.flush() == ("", True)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        ([], "abc", ("abc", False)),
        (["abc", "ab"], "xabc", ("x", True)),
        (["bcd", "abcde"], "abcdx", ("a", True)),  # the earlier start is not completed
        (["bcd", "abcde"], "abcde", ("", True)),  # it is
        (["bcd", "abcde"], "abcd", ("a", True)),  # the text ends before it is
        (["aab"], "aaab", ("a", True)),
        (["界"], "你好世界!", ("你好世", True)),
        (["x" * 9_000], "x" * 8_999, ("x" * 8_999, False)),
    ],
)
def test_which_match_cuts(stops, text, expected) -> None:
    assert stopped(stops, [text]) == expected
    assert stopped(stops, [*text]) == expected


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    chunks=st.lists(st.text("abc", max_size=6), max_size=8),
)
def test_stream_equals_search_in_the_whole_text(stops, chunks) -> None:
    text = "".join(chunks)
    found = [text.find(s) for s in stops if s in text]
    expected = (text[: min(found)], True) if found else (text, False)
    assert stopped(stops, chunks) == expected


@pytest.mark.parametrize("bad", [[""], ["a", ""], "abc", [1], None, {"a": 1}])
def test_bad_stop_strings(bad) -> None:
    with pytest.raises(CloverError, match="stop strings"):
        StopStrings(bad)


# --- training a small BPE ------------------------------------------------------------------------


def test_trained_vocabulary() -> None:
    backend = train_bpe(iter(CORPUS), 300)
    assert backend.get_vocab_size() == 300
    assert [backend.token_to_id(text) for text in ADDED] == list(range(len(ADDED)))
    flags = {t.content: t.special for t in backend.get_added_tokens_decoder().values()}
    assert flags == dict(ADDED_TOKENS)
    assert len(backend.encode(" the cat").ids) < len(" the cat")
    assert backend.encode(" 12").tokens == [
        "Ġ",
        "1",
        "2",
    ]  # "12" is frequent, yet digits stay apart


def test_training_repeats_exactly() -> None:
    assert train_bpe(CORPUS, 320).to_str() == train_bpe(CORPUS, 320).to_str()


def test_training_stops_when_nothing_is_left_to_merge() -> None:
    assert train_bpe([], 400).get_vocab_size() == SMALLEST_VOCAB


def test_too_small_a_vocabulary() -> None:
    with pytest.raises(CloverError, match=str(SMALLEST_VOCAB)):
        train_bpe(CORPUS, SMALLEST_VOCAB - 1)


def test_written_folder_loads_the_same(tmp_path) -> None:
    backend = train_bpe(CORPUS, 300)
    write_tokenizer(tmp_path / "a" / "b", backend, model_max_length=77)
    loaded = Tokenizer.load(tmp_path / "a" / "b")
    text = "the cat <think>žluť</think><|im_end|>"
    assert loaded.encode(text, special=True) == backend.encode(text).ids
    config = json.loads((tmp_path / "a" / "b" / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 77
    with pytest.raises(CloverError, match="cannot be written"):
        write_tokenizer(tmp_path / "a" / "b" / "tokenizer.json", backend, model_max_length=77)
