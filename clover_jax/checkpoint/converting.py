"""Turns a Qwen3.6 folder into a Clover folder: the start of a training, not a trained Clover.

Nothing is loaded. Tensors go from memory-mapped files to new files as they are, one shard at a
time, so the 69 GB of the 35B model need a few GB of memory.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from clover_jax.checkpoint.config_map import (
    CLOVER_KEYS,
    TOKEN_ID_KEYS,
    config_from_hf,
    config_to_hf,
)
from clover_jax.checkpoint.hf_map import BLOCK_DIFFUSION, NamePrefix, pieces, with_prefix
from clover_jax.checkpoint.json_text import parse, show
from clover_jax.checkpoint.loading import CONFIG_FILE, Source, look_through
from clover_jax.checkpoint.report import Ignored, NormStorage
from clover_jax.checkpoint.safetensors_io import MappedFiles
from clover_jax.checkpoint.saving import (
    SHARD_BYTES,
    Entry,
    copy_other_files,
    new_folder,
    write_json,
    write_weights,
)
from clover_jax.config import ModelConfig
from clover_jax.data.tokenizer import MASK, Tokenizer
from clover_jax.errors import CloverError
from clover_jax.model.leaves import leaf_kind
from clover_jax.model.transformer import param_specs
from clover_jax.params import named_leaves
from clover_jax.presets import clover_35b_a3b

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_ROWS = 4096  # averaged at a time


@dataclasses.dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        folder: the new folder.
        config: its model.
        mask_in_tokenizer: whether the folder's tokenizer has the mask token; if not, config.json
            alone names its row.
        copied: tensors taken over.
        new: tensors at their start values.
        not_written: tensors of the source that the new folder does not have.
    """

    folder: Path
    config: ModelConfig
    mask_in_tokenizer: bool
    copied: int
    new: int
    not_written: tuple[Ignored, ...]

    def lines(self) -> list[str]:
        """The report as text."""
        where = "in the tokenizer" if self.mask_in_tokenizer else "in config.json only"
        return [
            f"wrote {self.folder}: {self.copied} tensors copied, {self.new} new at start values",
            f"mask token {self.config.mask_token_id} ({where}), its row is the mean row",
            *(f"not written: {i.tensors} tensors {i.prefix}*" for i in self.not_written),
        ]


def convert(
    source: Path | str,
    target: Path | str,
    *,
    mask_token_id: int | None = None,
    overwrite: bool = False,
    norms: NormStorage | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Writes a Clover folder with the weights of a Qwen3.6 folder.

    The block-diffusion parameters start at scale 1, bias 0, c 1 and right taps 0. The mask token's
    rows of the embedding and of lm_head become the mean of the tokens' rows. Other files are
    copied, and the tokenizer learns the mask token.

    Args:
        source: a folder that `load` accepts.
        target: must not exist, or be empty.
        mask_token_id: the mask's row. None: the one that config.json or the tokenizer names, else
            the first row that no token uses.
        overwrite: replace the target if it is a checkpoint folder.
        norms: as for `load`; the tensors are copied as they are.
        settings: what differs from the preset's block operator, by its path under `clover` in
            config.json: {"logits_position": "shifted", "bd_gdn.right_conv": False}.

    Raises:
        CloverError: the source cannot be loaded or is Clover already, there is no row for the mask
            token, no such setting, or the target is in the way.
    """
    source, target = Path(source), Path(target)
    survey = look_through(source, norms=norms)
    base = survey.report.require_loadable()
    if base.bd_gdn is not None:
        raise CloverError(f"{source} is a Clover folder already: there is nothing to convert")
    tokenizer = Tokenizer.load(source) if (source / TOKENIZER_FILE).exists() else None
    mask = _mask_id(source, base, tokenizer, mask_token_id)
    cfg = _with_settings(clover_config(base, mask), settings or {})
    used = base.vocab_size if tokenizer is None else tokenizer.vocab_size
    files = MappedFiles()
    old = [
        _copy(path, s, files, mask, used) for path, found in survey.sources.items() for s in found
    ]
    new = _start_values(cfg, survey.report.prefix)
    kept = _token_ids(survey.config_json)
    with new_folder(target, overwrite=overwrite) as building:
        write_weights(building, [*old, *new], SHARD_BYTES)
        write_json(building / CONFIG_FILE, {**config_to_hf(cfg), **kept})
        copy_other_files(source, building)
        named = tokenizer is not None and tokenizer.mask_id is not None
        if tokenizer is not None and not named and mask == tokenizer.vocab_size:
            _add_mask_token(building, mask)
            named = True
    return ConvertReport(target, cfg, named, len(old), len(new), survey.report.ignored)


def clover_config(base: ModelConfig, mask_token_id: int) -> ModelConfig:
    """The config of a Qwen3.6 model with the preset's block operator and coreset added."""
    preset = clover_35b_a3b()
    return base.replace(
        bd_gdn=preset.bd_gdn, mask_token_id=mask_token_id, **{"moe.coreset": preset.moe.coreset}
    )


def _with_settings(cfg: ModelConfig, settings: Mapping[str, Any]) -> ModelConfig:
    content = config_to_hf(cfg)
    for path, value in settings.items():
        *parents, name = path.split(".")
        section = content["clover"]
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if not isinstance(section, dict) or name not in section or path == "mask_token_id":
            known = [key for key in CLOVER_KEYS if key != "mask_token_id"]
            raise CloverError(
                f"setting {path}={show(value)} is unknown: expected one of {', '.join(known)}, "
                "or a field of the last two, such as bd_gdn.right_conv"
            )
        section[name] = value
    changed = config_from_hf(content)
    if changed.bd_gdn is None:
        raise CloverError("setting bd_gdn is null, but a Clover folder has a block operator")
    return changed


def _mask_id(
    folder: Path, base: ModelConfig, tokenizer: Tokenizer | None, asked: int | None
) -> int:
    chosen = base.mask_token_id if asked is None else asked
    if chosen is None and tokenizer is not None:
        first_spare = tokenizer.vocab_size
        chosen = first_spare if tokenizer.mask_id is None else tokenizer.mask_id
    if chosen is None:
        raise CloverError(
            f"{folder} has no {TOKENIZER_FILE} to tell which rows are spare: name the mask "
            f"token's id"
        )
    if not 0 <= chosen < base.vocab_size:
        raise CloverError(
            f"mask token id {chosen} has no row in the {base.vocab_size} rows of {folder}: "
            f"name the id of a token that may be given up"
        )
    named = None if tokenizer is None else tokenizer.mask_id
    if named is not None and named != chosen:
        raise CloverError(f"mask token id is {chosen}, but the tokenizer of {folder} says {named}")
    text = None if tokenizer is None else tokenizer.backend.id_to_token(chosen)
    if text is not None and named is None and asked is None:
        raise CloverError(
            f"mask token id {chosen} in the config.json of {folder} is the token {show(text)} of "
            f"its tokenizer: name the mask token's id"
        )
    return chosen


def _copy(path: str, source: Source, files: MappedFiles, mask: int, used: int) -> Entry:
    """The tensor as it is; where a row stands for a token, with the mask's row set."""
    tensor = source.tensor
    if path not in ("embed_tokens", "lm_head"):
        return Entry(tensor.name, tensor.nbytes, lambda: files.view(tensor))

    def with_mask_row() -> np.ndarray:
        rows = files.view(tensor)
        changed = np.array(rows)
        changed[mask] = _mean_row(rows, mask, used)
        return changed

    return Entry(tensor.name, tensor.nbytes, with_mask_row)


def _mean_row(rows: np.ndarray, mask: int, used: int) -> np.ndarray:
    """Mean of the rows of tokens, the mask's own left out; rows past the last token are noise."""
    starts = range(0, used, _ROWS)
    parts = [rows[a : min(a + _ROWS, used)].astype(np.float64).sum(axis=0) for a in starts]
    total = np.sum(parts, axis=0)
    if mask >= used:
        return total / used
    return (total - rows[mask].astype(np.float64)) / (used - 1)


def _start_values(cfg: ModelConfig, prefix: NamePrefix) -> list[Entry]:
    """The parameters that the base does not have."""
    key = jax.random.key(0)  # these start values do not depend on it
    entries = []
    specs = named_leaves(param_specs(cfg))
    for path, whole in pieces(cfg).items():
        if leaf_kind(path) in BLOCK_DIFFUSION:
            spec = specs[path]
            leaf = np.asarray(spec.init(key, spec.shape)).astype(spec.dtype)
            for piece in whole:
                tensor = piece.to_file(leaf)
                name = with_prefix(piece.name, prefix)
                entries.append(Entry(name, tensor.nbytes, lambda tensor=tensor: tensor))
    return entries


def _token_ids(config_json: dict[str, Any]) -> dict[str, Any]:
    text = config_json.get("text_config", config_json)
    return {key: text[key] for key in TOKEN_ID_KEYS if key in text}


def _add_mask_token(folder: Path, mask: int) -> None:
    """Adds the mask to both tokenizer files, in the id right after the last token."""
    try:
        tokenizer, config = (
            parse((folder / name).read_bytes()) for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
        )
    except ValueError as error:
        raise CloverError(f"the tokenizer files cannot be edited: {error}") from None
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    declared = config.get("added_tokens_decoder") or {}
    declared[str(mask)] = {"content": MASK, **flags, "special": True}
    config |= {"added_tokens_decoder": declared, "mask_token": MASK}
    # Ids are given in the order of the list, so tokens that only the second file has come first.
    listed = tokenizer.setdefault("added_tokens", [])
    known = {token["id"] for token in listed}
    for token_id, token in sorted((int(i), t) for i, t in declared.items()):
        if token_id not in known:
            given = {key: value for key, value in token.items() if value is not None}
            plain = {**flags, "special": False, "normalized": not token.get("special")}
            listed.append({"id": token_id, **plain, **given})
    write_json(folder / TOKENIZER_FILE, tokenizer)
    write_json(folder / TOKENIZER_CONFIG_FILE, config)
    found = Tokenizer.load(folder).mask_id
    if found != mask:
        raise CloverError(f"the tokenizer gives {MASK} the id {found}, not {mask}: name another id")
