"""Text to ids and back for the byte-level BPE tokenizer of a checkpoint folder.

Every id comes from the folder. Decoding works on bytes: a byte-level token stands for a fixed byte
string, so a text is the UTF-8 reading of the tokens' bytes joined, whole or piece by piece.
"""

import codecs
import dataclasses
import reprlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import tokenizers

from clover_jax.errors import CloverError

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
MASK = "<|mask|>"


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()

# Letters with and without marks, digits, contractions, blanks, line ends, scripts, an emoji: a
# tokenizer that does not give this back would silently damage prompts.
_PROBE = "Aa we'll  12\t\r\n\n é ß Žluť عربي 你好 ﷽ 🙂🇨🇿 <x> \x00\x7f "


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A checkpoint folder's tokenizer and the ids the rest of the code asks for.

    Attributes:
        backend: encodes and recognises the added tokens (control tokens, think and tool tags).
        plain: the same byte-pair encoding without added tokens.
        chat_template: Jinja source, or None for a folder without one.
        special_texts: template variables such as `eos_token`, by name.
        stop_ids: ids that end a response.
        end_of_turn_id: the stop id that a chat turn ends with.
        pad_id: filler past the end of a row.
        mask_id: id of the mask token if the tokenizer has one. A folder may define the mask in
            config.json alone, as a spare row that no text maps to; then this is None.
        think_open_id: id of `<think>`, or None.
        think_close_id: id of `</think>`, or None.
        special_ids: ids of control tokens, which `skip_special` leaves out.
        vocab_size: number of addressable ids (highest id + 1); the model's table may be larger.
    """

    backend: tokenizers.Tokenizer
    plain: tokenizers.Tokenizer
    chat_template: str | None
    special_texts: Mapping[str, str]
    stop_ids: tuple[int, ...]
    end_of_turn_id: int
    pad_id: int
    mask_id: int | None
    think_open_id: int | None
    think_close_id: int | None
    special_ids: frozenset[int]
    vocab_size: int

    @staticmethod
    def load(folder: Path | str) -> "Tokenizer":
        """Reads tokenizer.json and tokenizer_config.json, and if they are there
        generation_config.json and chat_template.jinja.

        Stop ids are generation_config's `eos_token_id`, else tokenizer_config's `eos_token`. The
        pad is tokenizer_config's `pad_token`, else generation_config's, else the first stop id.
        Tokens that only tokenizer_config's `added_tokens_decoder` lists are added.

        Raises:
            CloverError: a file is missing, unreadable, not of its format or inconsistent.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        config_path = folder / "tokenizer_config.json"
        generation_path = folder / "generation_config.json"
        config = _read_json(config_path, _TokenizerConfig)
        generation = _read_json(generation_path, _GenerationConfig, missing="{}")

        backend = _read_backend(path)
        _add_declared_tokens(backend, config.added_tokens_decoder or {}, config_path)
        plain = _without_added_tokens(backend)
        _check_lossless(plain, path)

        texts = config.special_texts()
        named = {name: _id_of(backend, text, name, config_path) for name, text in texts.items()}
        stop_ids = generation.stop_ids() or tuple(named[k] for k in named if k == "eos_token")
        if not stop_ids:
            raise CloverError(
                f"{folder}: neither eos_token_id in generation_config.json nor eos_token in "
                f"tokenizer_config.json is set; name the token that ends a response"
            )
        pad_id = named.get("pad_token", generation.pad_token_id)
        for name, token_id in [*(("eos_token_id", i) for i in stop_ids), ("pad_token_id", pad_id)]:
            if token_id is not None and not _is_addressable(backend, token_id):
                raise CloverError(
                    f"{generation_path}: {name} {token_id} is not the id of any token in "
                    f"tokenizer.json; correct one of the two files"
                )
        added = backend.get_added_tokens_decoder()
        id_of_added = {token.content: token_id for token_id, token in added.items()}
        end = named.get("eos_token")
        return Tokenizer(
            backend=backend,
            plain=plain,
            chat_template=_read_chat_template(folder, config),
            special_texts=texts,
            stop_ids=stop_ids,
            end_of_turn_id=end if end in stop_ids else stop_ids[0],
            pad_id=stop_ids[0] if pad_id is None else pad_id,
            mask_id=named.get("mask_token", id_of_added.get(MASK)),
            think_open_id=id_of_added.get(THINK_OPEN),
            think_close_id=id_of_added.get(THINK_CLOSE),
            special_ids=frozenset(i for i, token in added.items() if token.special),
            vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
        )

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text; nothing is put before or after it.

        With `special`, the spelling of an added token becomes its id: what a rendered chat template
        needs. A rendered template is one string, so this also holds for what a user typed into a
        message, mask token included, exactly as in Hugging Face's `apply_chat_template`; the
        sampler is safe from that because masked-ness is an array of its own, never an id.
        Without `special` no text gives an added token's id.

        Raises:
            CloverError: the text holds half of a surrogate pair, which has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CloverError(
                f"text holds the lone surrogate {text[error.start]!r} at character {error.start}: "
                f"expected valid Unicode; remove it or send the full pair"
            ) from None
        backend = self.backend if special else self.plain
        return backend.encode(text, add_special_tokens=False).ids

    def to_bytes(self, ids: Iterable[int], *, skip_special: bool) -> bytes:
        """The bytes that the ids stand for, joined.

        Raises:
            CloverError: an id that the tokenizer has no token for, such as a spare row.
        """
        ids = map(int, ids)
        return b"".join(
            self._token_bytes(i) for i in ids if not (skip_special and i in self.special_ids)
        )

    def decode(self, ids: Iterable[int], *, skip_special: bool) -> str:
        """Text of the ids; bytes that are not UTF-8 read as U+FFFD.

        `skip_special` leaves out control tokens. Think and tool tags are not control tokens unless
        the folder says so, and stay.
        """
        return self.to_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def _token_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            raise CloverError(
                f"token id {token_id} has no text: the tokenizer's ids end at "
                f"{self.vocab_size - 1}; forbid other ids when sampling"
            )
        # As in Hugging Face: an added token with any character outside the alphabet is plain text.
        in_alphabet = all(char in _BYTE_OF for char in token)
        return bytes(_BYTE_OF[char] for char in token) if in_alphabet else token.encode()


class StreamDecoder:
    """Decodes ids as they arrive; the pieces joined are `Tokenizer.decode` of all the ids.

    A token may end one character and begin the next, so the bytes of an unfinished character are
    held back until it is complete. Constant work per token.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete, possibly empty."""
        return self._utf8.decode(self._tokenizer.to_bytes(ids, skip_special=self._skip_special))

    def flush(self) -> str:
        """What is left at the end: empty, or U+FFFD for a character that was cut off."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Cuts a text that arrives in pieces at the first stop string.

    The cut is where the earliest starting occurrence of any stop string begins, however the text is
    split into pieces: a beginning of a stop string is held back until it is complete or impossible,
    and so is a complete one while an earlier start is still open. One Knuth-Morris-Pratt
    automaton per string, so nothing is searched twice.
    """

    def __init__(self, strings: object) -> None:
        """Takes a list or tuple of non-empty strings; anything else raises CloverError."""
        if not isinstance(strings, list | tuple) or not all(
            isinstance(string, str) and string for string in strings
        ):
            raise CloverError(
                f"stop strings are {reprlib.repr(strings)}: expected a list of non-empty strings"
            )
        self._strings = tuple(strings)
        self._borders = tuple(_borders(s) for s in strings)
        self._reached = [0] * len(strings)  # longest beginning of each that ends the text so far
        self._held = ""
        self._start: int | None = None  # earliest complete match, as an index into _held
        self._matched = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was met). Nothing follows a match."""
        if self._matched:
            return "", True
        seen = len(self._held)
        self._held += text
        for end in range(seen + 1, len(self._held) + 1):
            self._advance(end)
            if self._start is not None and self._start <= self._open_start(end):
                return self.flush()
        return self._release(self._open_start(len(self._held))), False

    def flush(self) -> tuple[str, bool]:
        """The same at the end of the text, when no open beginning can be completed any more."""
        self._matched = self._matched or self._start is not None
        shown = self._release(len(self._held) if self._start is None else self._start)
        self._held, self._start, self._reached = "", None, [0] * len(self._strings)
        return shown, self._matched

    def _open_start(self, end: int) -> int:
        """Where the longest beginning of a stop string that reaches up to `end` starts."""
        return end - max(self._reached, default=0)

    def _advance(self, end: int) -> None:
        char = self._held[end - 1]
        for i, (string, borders) in enumerate(zip(self._strings, self._borders, strict=True)):
            reached = _step(string, borders, self._reached[i], char)
            if reached == len(string):
                start = end - reached
                self._start = start if self._start is None else min(self._start, start)
                reached = 0  # no later occurrence of this string can win
            self._reached[i] = reached

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self._start = None if self._start is None else self._start - count
        return shown


def _step(string: str, borders: Sequence[int], reached: int, char: str) -> int:
    """Length of the longest beginning of `string` that ends the text after one more character."""
    while reached and string[reached] != char:
        reached = borders[reached - 1]
    return reached + (string[reached] == char)


def _borders(string: str) -> list[int]:
    """For each beginning of `string`, its longest proper beginning that is also its end."""
    borders = [0]
    for char in string[1:]:
        borders.append(_step(string, borders, borders[-1], char))
    return borders


class _AddedToken(msgspec.Struct):
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _BPE(msgspec.Struct):
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    dropout: float | None = None


class _TokenizerFile(msgspec.Struct):
    model: _BPE


class _TokenizerConfig(msgspec.Struct):
    added_tokens_decoder: dict[int, _AddedToken] | None = None
    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None
    mask_token: str | _AddedToken | None = None

    def special_texts(self) -> dict[str, str]:
        tokens = {
            name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_token")
        }
        return {
            name: token if isinstance(token, str) else token.content
            for name, token in tokens.items()
            if isinstance(token, str | _AddedToken)
        }


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | Annotated[list[int], msgspec.Meta(min_length=1)] | None = None
    pad_token_id: int | None = None

    def stop_ids(self) -> tuple[int, ...]:
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(dict.fromkeys(ids))


def _read_text(path: Path, missing: str | None = None) -> str:
    """The file's text; `missing`, if given, stands in for a file that is not there."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and missing is not None:
            return missing
        raise CloverError(
            f"{path} cannot be read as UTF-8 text: {error}; check the folder or fetch it again"
        ) from None


def _read_json[T](path: Path, kind: type[T], missing: str | None = None) -> T:
    text = _read_text(path, missing)
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CloverError(f"{path} is not what it should be: {error}; fetch it again") from None


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    # Byte-level BPE has no affixes (with a wrong one the library aborts), and dropout is random.
    model = _read_json(path, _TokenizerFile).model
    for name, value in msgspec.structs.asdict(model).items():
        if value:
            raise CloverError(f"{path}: model.{name} is {reprlib.repr(value)}: expected null")
    try:
        backend = tokenizers.Tokenizer.from_str(_read_text(path))
    except Exception as error:  # the binding raises bare Exception for whatever the file lacks
        raise CloverError(f"{path} is not a tokenizer: {error}; fetch it again") from None
    backend.no_padding()  # a stored limit would cut prompts, as stored padding would lengthen them
    backend.no_truncation()
    return backend


def _add_declared_tokens(
    backend: tokenizers.Tokenizer, declared: Mapping[int, _AddedToken], path: Path
) -> None:
    for token_id, token in sorted(declared.items()):
        flags = msgspec.structs.asdict(token)
        if token.normalized is None:
            flags["normalized"] = not token.special
        backend.add_tokens([tokenizers.AddedToken(**flags)])
        actual = backend.token_to_id(token.content)
        if actual != token_id:
            raise CloverError(
                f"{path}: added_tokens_decoder gives {token.content!r} the id {token_id}, but with "
                f"tokenizer.json it gets {actual}; the two files do not belong together"
            )


def _without_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    plain = tokenizers.Tokenizer(backend.model)
    plain.normalizer = backend.normalizer
    plain.pre_tokenizer = backend.pre_tokenizer
    plain.decoder = backend.decoder
    return plain


def _check_lossless(plain: tokenizers.Tokenizer, path: Path) -> None:
    """Only a byte-level tokenizer can spell every text and be decoded by bytes."""
    missing = [byte for char, byte in _BYTE_OF.items() if plain.token_to_id(char) is None]
    if missing:
        raise CloverError(
            f"{path} has no token for byte {missing[0]} ({len(missing)} of 256 bytes are missing): "
            f"expected a byte-level BPE tokenizer"
        )
    try:
        encoded = plain.encode(_PROBE, add_special_tokens=False)
        decoded = plain.decode(encoded.ids)
    except Exception as error:  # as above
        raise CloverError(f"{path} cannot encode text: {error}; fetch it again") from None
    spelled = bytes(_BYTE_OF.get(char, 0) for token in encoded.tokens for char in token)
    probe = unicodedata.normalize("NFC", _PROBE)
    if decoded != probe or spelled != probe.encode():
        raise CloverError(
            f"{path} does not give a text back: {probe!r} becomes {decoded!r}; expected a "
            f"byte-level BPE tokenizer (ByteLevel pre-tokenizer and decoder)"
        )


def _is_addressable(backend: tokenizers.Tokenizer, token_id: int) -> bool:
    return 0 <= token_id < 2**32 and backend.id_to_token(token_id) is not None


def _id_of(backend: tokenizers.Tokenizer, text: str, name: str, path: Path) -> int:
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise CloverError(
            f"{path}: {name} is {text!r}, which tokenizer.json does not have; correct one of them"
        )
    return token_id


def _read_chat_template(folder: Path, config: _TokenizerConfig) -> str | None:
    """chat_template.jinja; else tokenizer_config's, of several the one named `default`."""
    if text := _read_text(folder / "chat_template.jinja", missing=""):
        return text
    if not isinstance(config.chat_template, list):
        return config.chat_template
    by_name = {entry.name: entry.template for entry in config.chat_template}
    if "default" not in by_name:
        raise CloverError(
            f"{folder / 'tokenizer_config.json'}: chat_template lists {sorted(by_name)}: expected "
            f"one named 'default'"
        )
    return by_name["default"]
