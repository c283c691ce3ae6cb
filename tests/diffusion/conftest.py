"""What several test modules of this folder share."""

import pytest

from clover_jax.data.bpe import train_bpe, write_tokenizer
from clover_jax.data.tokenizer import Tokenizer

CORPUS = ["the own fox ran over the hill and the other fox", "žluťoučký kůň 你好 🙂"] * 20


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A small tokenizer, its folder gone by the next session."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, train_bpe(CORPUS, 300), model_max_length=1024)
    return Tokenizer.load(folder)
