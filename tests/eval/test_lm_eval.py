"""The adapter under lm-evaluation-harness itself, on a task in local files.

Needs the extra `lm-eval`, which the test command does not install: 44 packages, no torch.
"""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from clover_jax.data.chat import tokenize_prompt
from clover_jax.diffusion.generate import Completion, Generator, Stats
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.env import Env
from clover_jax.errors import CloverError
from clover_jax.eval.likelihood import likelihood
from tests.diffusion.test_generate import CFG, params, tokenizer
from tests.helpers.compilation import unoptimised

__all__ = ["tokenizer"]  # a fixture
HERE = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not HERE, reason="the extra lm-eval is not installed")
SAMPLING = SamplerConfig(threshold=0.05)
TOY = CFG.replace(block_length=2)
YAML = """
task: toy_{kind}
custom_dataset: !function toy.{kind}
test_split: test
output_type: {output}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}
metric_list:
  - metric: {metric}
"""
MODULE = """
import datasets

def generated(**_):
    return {"test": datasets.Dataset.from_list(
        [{"question": q, "answer": "right"} for q in ("two ants", "three cats")])}

def chosen(**_):
    return {"test": datasets.Dataset.from_list(
        [{"question": "two ants", "choices": [" the", " cats"], "label": 1}])}
"""


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with unoptimised():
        yield


@functools.cache
def adapter_class():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from clover_jax.eval.lm_eval_adapter import CloverLM
    return CloverLM


def lm(tokenizer, cfg=CFG, **options):
    generator = Generator(cfg, params(), tokenizer=tokenizer, env=Env(moe_path="dense"))
    return adapter_class()(generator, SAMPLING, batch=2, **options)


class Instance:
    def __init__(self, *args):
        self.args = args


def says(monkeypatch, text):
    done = Completion((7, 8), text, "stop", (), (), (), Stats(1, 0, 2, 1, 1, 2.0, 2.0, 1.0, 1.0, (), ()))  # noqa: E501  # fmt: skip
    monkeypatch.setattr(Generator, "complete", lambda _, requests, **__: [done] * len(requests))


@pytest.mark.skipif(HERE, reason="the extra lm-eval is installed")
def test_without_the_extra():
    with pytest.raises(CloverError, match="extra `lm-eval`"):
        import clover_jax.eval.lm_eval_adapter  # noqa: F401


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_local_yaml_tasks(tokenizer, tmp_path: Path, monkeypatch):
    """The template renders the chat path's ids; thoughts and blank lines do not spoil a score."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "toy.py").write_text(MODULE)
    kinds = (("generated", "generate_until", "answer", "", "exact_match"),
             ("chosen", "multiple_choice", "label", "doc_to_choice: choices", "acc"))  # fmt: skip
    for kind, output, target, more, metric in kinds:
        (tmp_path / f"{kind}.yaml").write_text(
            YAML.format(kind=kind, output=output, target=target, more=more, metric=metric)
        )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    model = lm(tokenizer, enable_thinking=True)
    scored = lambda task, **options: lm_eval.simple_evaluate(
        model=model, tasks=[task], task_manager=manager, bootstrap_iters=0, **options
    )["results"][task]
    assert "acc,none" in scored("toy_chosen")
    with monkeypatch.context() as patch:
        says(patch, "a thought\n\nmore</think>\n\nright")
        assert scored("toy_generated", apply_chat_template=True)["exact_match,none"] == 1
        says(patch, "an unfinished thought: right")
        assert scored("toy_generated", apply_chat_template=True)["exact_match,none"] == 0
    asked = [entry for entry in model.log if entry["kind"] == "generate_until"]
    message = [{"role": "user", "content": "two ants"}]
    assert asked[0]["prompt_ids"] == tokenize_prompt(tokenizer, message, enable_thinking=True)
    assert asked[0]["stops"] == [] and asked[0]["token_ids"] == [7, 8]
    assert model.settings()["chat_template"] and json.dumps(model.settings())
    assert "torch" not in sys.modules


@needs_lm_eval
@pytest.mark.slow
def test_stops(tokenizer, monkeypatch):
    says(monkeypatch, "one\n\ntwo. three")
    asked = [Instance("two ants", {"until": ["\n\n"]}), Instance("two ants", {"until": "."})]
    model = lm(tokenizer)
    assert model.generate_until(asked) == ["one", "one\n\ntwo"]
    model.apply_chat_template([{"role": "user", "content": "two"}])
    assert model.generate_until(asked) == ["one\n\ntwo. three", "one\n\ntwo"]


@needs_lm_eval
@pytest.mark.slow
def test_likelihoods(tokenizer):
    """Equal twice with one seed, and to the exact bound where every mask is tried."""
    pair = Instance("two ants", " the cats")
    ids = [tuple(tokenizer.encode(text, special=True)) for text in pair.args]
    exact = lm(tokenizer, TOY, draws=None)
    ((value, greedy),) = exact.loglikelihood([pair])
    want = likelihood(exact._generator, *ids, draws=None)
    assert want.bound is not None and value == pytest.approx(-want.bound[0], rel=1e-6)
    assert isinstance(greedy, bool)
    drawn = lm(tokenizer, TOY, draws=64, seed=3)
    first, second = (drawn.loglikelihood([pair])[0][0] for _ in range(2))
    assert first == second and first == pytest.approx(value, rel=0.05)
    causal = lm(tokenizer, TOY, estimator="ar")
    assert causal.loglikelihood([pair])[0][0] == pytest.approx(-want.ar, rel=1e-6)
    (rolling,) = causal.loglikelihood_rolling([Instance(" the cats")])
    assert rolling == pytest.approx(
        -likelihood(causal._generator, (tokenizer.pad_id,), ids[1], draws=1).ar, rel=1e-6
    )
    assert [e["estimator"] for e in causal.log] == ["ar", "ar"]
