"""The `clover` command. Nothing heavy is imported before a command runs."""

from clover_jax.cli.app import main

__all__ = ["main"]
