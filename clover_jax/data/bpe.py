"""Small byte-level BPE tokenizers shaped like Qwen3.6's, and the files of a checkpoint folder."""

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from clover_jax.data.tokenizer import MASK, THINK_CLOSE, THINK_OPEN
from clover_jax.errors import CloverError
from clover_jax.files import whole_file

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
# Text and whether it is a control token, in the order of the ids 0, 1, ... Tags are not control
# tokens, so that they stay in decoded text.
ADDED_TOKENS = (
    (END_OF_TEXT, True),
    ("<|im_start|>", True),
    (END_OF_TURN, True),
    (THINK_OPEN, False),
    (THINK_CLOSE, False),
    (MASK, True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
)
SMALLEST_VOCAB = 256 + len(ADDED_TOKENS)

# Pieces that merges never cross. First alternative that matches wins.
_PIECES = "|".join(
    (
        r"'(?i:[stmd]|re|ve|ll)",  # English endings: 's 't 'm 'd 're 've 'll
        r"[^\p{L}\p{N}\r\n]?[\p{L}\p{M}]+",  # a word with at most one blank or sign before it
        r"\p{N}",  # one digit
        r"\x20?[^\p{L}\p{M}\p{N}\s]+[\r\n]*",  # signs, with the line ends after them
        r"\s*[\r\n]+",  # line ends, with the blanks before them
        r"\s+(?!\S)",  # blanks, save the last one before a word
        r"\s+",
    )
)


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE with the added tokens at ids 0 to 9 and every byte in the vocabulary.

    The same texts in the same order give the same tokenizer. Fewer than `vocab_size` ids come out
    if the texts have no more pairs to merge.

    Raises:
        CloverError: `vocab_size` leaves no room for the bytes and the added tokens.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise CloverError(
            f"vocab_size is {vocab_size}: expected at least {SMALLEST_VOCAB} (256 bytes and "
            f"{len(ADDED_TOKENS)} added tokens)"
        )
    learner = _pipeline(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[text for text, _ in ADDED_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    learner.train_from_iterator(texts, trainer)
    # The trainer marks every token it is given as control token; a fresh pipeline takes its
    # vocabulary and our flags.
    tokenizer = _pipeline(learner.model)
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=special) for text, special in ADDED_TOKENS]
    )
    return tokenizer


def write_tokenizer(
    folder: Path | str, tokenizer: tokenizers.Tokenizer, *, model_max_length: int
) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja of a small model.

    Args:
        folder: made if it is not there.
        tokenizer: from `train_bpe`.
        model_max_length: the model's context, tokens.

    Raises:
        CloverError: the folder cannot be written.
    """
    config = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "mask_token": MASK,
        "model_max_length": model_max_length,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    template = resources.files("clover_jax") / "assets" / "clover-nano" / "chat_template.jinja"
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "chat_template.jinja": template.read_text(encoding="utf-8"),
        # Last: where it is, the others are, too.
        "tokenizer_config.json": msgspec.json.format(msgspec.json.encode(config)).decode() + "\n",
    }
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with whole_file(Path(folder) / name) as building:
                building.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise CloverError(f"{folder} cannot be written: {error}; choose another folder") from None


def _pipeline(model: models.Model) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
