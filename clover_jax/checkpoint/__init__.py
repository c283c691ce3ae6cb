"""Checkpoint folders in the format of Hugging Face: load, inspect, save, convert; adapters."""

from clover_jax.checkpoint.adapter import load_adapter, merge_adapter, save_adapter
from clover_jax.checkpoint.config_map import config_from_hf, config_to_hf
from clover_jax.checkpoint.converting import ConvertReport, clover_config, convert
from clover_jax.checkpoint.loading import inspect, load
from clover_jax.checkpoint.report import LoadReport, Problem
from clover_jax.checkpoint.saving import SaveReport, save

__all__ = [
    "ConvertReport",
    "LoadReport",
    "Problem",
    "SaveReport",
    "clover_config",
    "config_from_hf",
    "config_to_hf",
    "convert",
    "inspect",
    "load",
    "load_adapter",
    "merge_adapter",
    "save",
    "save_adapter",
]
