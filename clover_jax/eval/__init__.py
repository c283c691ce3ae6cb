"""Measuring a model on held-out prompts."""
