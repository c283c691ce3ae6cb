"""clover_jax behind EleutherAI's lm-evaluation-harness (`lm_eval`, extra `lm-eval`).

    import lm_eval
    results = lm_eval.simple_evaluate(model=CloverLM(generator, sampling), tasks=[...],
                                      apply_chat_template=True)

What is measured is stated, since scores under this harness mostly differ by what is not:

- Generation: the sampler that serves, `mode` and `sampling` as given, seeds by request number.
  Under a chat template the answer is what follows the thoughts, and stop strings that are blank
  space only (the harness' default for base models) do not cut it.
- Likelihood: `estimator="ar"` is the causal one, exact; `"diffusion"` minus the bound by denoising
  of `likelihood.py` with `draws` masks a block (None: all of them, for blocks of few tokens), which
  depend on `seed` and the request's number alone. Context and continuation are tokenised apart;
  nothing is put before them but, where there is no context, the pad token.
- `log` holds one entry per request with its final token ids, stops and settings.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from clover_jax.data.chat import render_chat, thinking_state
from clover_jax.data.tokenizer import THINK_CLOSE, Tokenizer
from clover_jax.diffusion.generate import Completion, Generator, Request
from clover_jax.diffusion.sampling_config import SamplerConfig
from clover_jax.errors import CloverError
from clover_jax.eval.held_out import in_batches
from clover_jax.eval.likelihood import likelihood

try:
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
    )
except ImportError:
    raise CloverError(
        "lm_eval is not installed: install clover-jax with its extra `lm-eval`"
    ) from None

MAX_TOKENS = 256  # unless a task sets max_gen_toks


class CloverLM(LM):
    """A model under lm_eval.

    Attributes:
        log: one entry per request: kind, token ids, stops, and what came out.
    """

    def __init__(
        self,
        generator: Generator,
        sampling: SamplerConfig,
        *,
        mode: Literal["ar", "block"] = "block",
        estimator: Literal["ar", "diffusion"] = "diffusion",
        draws: int | None = 32,
        seed: int = 0,
        batch: int = 8,
        enable_thinking: bool | None = None,
    ) -> None:
        """See the module's text; `enable_thinking` is given to the chat template."""
        super().__init__()
        if generator.tokenizer is None:
            raise CloverError("evaluation needs a tokenizer, and this folder has none")
        if estimator == "diffusion" and generator.cfg.bd_gdn is None:
            raise CloverError("an autoregressive model has no diffusion bound: use estimator='ar'")
        self._tokenizer: Tokenizer = generator.tokenizer
        self._generator = generator
        self._sampling = sampling
        self._mode: Literal["ar", "block"] = mode
        self._estimator = estimator
        self._draws = draws
        self._seed = seed
        self._batch = batch
        self._enable_thinking = enable_thinking
        self._templated = False
        self.log: list[dict[str, Any]] = []

    def settings(self) -> dict[str, Any]:
        """What scores depend on beyond the weights."""
        cfg = self._generator.cfg
        return {
            "mode": self._mode,
            "block_length": cfg.block_length,
            "config": cfg.hash,
            "sampling": dataclasses.asdict(self._sampling),
            "estimator": self._estimator,
            "draws": self._draws if self._estimator == "diffusion" else None,
            "seed": self._seed,
            "chat_template": self._templated,
            "enable_thinking": self._enable_thinking,
        }

    # --- chat -----------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """Names the requests' cache."""
        return f"clover_jax-{self._generator.cfg.hash}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The folder's own template; there is only one."""
        return (self._tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt's text, as every other command renders it."""
        if self._tokenizer.chat_template is None:
            raise CloverError("this folder has no chat template: leave apply_chat_template off")
        self._templated = True
        return render_chat(
            self._tokenizer.chat_template, chat_history, enable_thinking=self._enable_thinking,
            add_generation_prompt=add_generation_prompt, variables=self._tokenizer.special_texts,
        )  # fmt: skip

    # --- generation -----------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, cut before the first stop string."""
        del disable_tqdm
        asked = [self._request(i, *instance.args) for i, instance in enumerate(requests)]
        texts = []
        for part, padded in in_batches(asked, self._batch):
            done = self._generator.complete([request for request, _ in padded], mode=self._mode)
            for (request, stops), completion in zip(part, done, strict=False):
                text = self._answer(request, completion, stops)
                texts.append(text)
                self.log.append(
                    {
                        "kind": "generate_until", "prompt_ids": list(request.prompt),
                        "token_ids": list(completion.token_ids), "stops": stops,
                        "max_tokens": request.max_tokens, "finish": completion.finish_reason,
                        "text": text,
                    }
                )  # fmt: skip
        return texts

    def _request(
        self, number: int, context: str, options: dict[str, Any]
    ) -> tuple[Request, list[str]]:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        stops = [s for s in until if s and not (self._templated and not s.strip())]
        sampling = self._sampling
        if options.get("do_sample") and options.get("temperature"):
            sampling = dataclasses.replace(sampling, temperature=options["temperature"])
        request = Request(
            prompt=self._ids(context),
            max_tokens=options.get("max_gen_toks") or MAX_TOKENS,
            sampling=sampling,
            seed=self._seed,
            sample_index=number,
        )
        return request, stops

    def _answer(self, request: Request, completion: Completion, stops: Sequence[str]) -> str:
        text = completion.text or ""
        if self._templated:
            thoughts, closed, answer = text.partition(THINK_CLOSE)
            unfinished = thinking_state(self._tokenizer, request.prompt) and not closed
            text = "" if unfinished else answer.lstrip() if closed else thoughts
        return text[: min([text.find(s) for s in stops if s in text], default=len(text))]

    def _ids(self, text: str) -> tuple[int, ...]:
        """Control tokens that a template wrote become their ids; none is added."""
        return tuple(self._tokenizer.encode(text, special=True)) or (self._tokenizer.pad_id,)

    # --- likelihood -----------------------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-likelihood or its bound, whether the sampler would write just that)."""
        del disable_tqdm
        pairs = [
            (self._ids(context), tuple(self._tokenizer.encode(continuation, special=True)))
            for context, continuation in (instance.args for instance in requests)
        ]
        values = [self._log_probability(i, *pair) for i, pair in enumerate(pairs)]
        written: list[tuple[int, ...]] = []
        for part, padded in in_batches(pairs, self._batch):
            done = self._generator.complete(
                [
                    Request(prompt=prompt, max_tokens=len(text), sampling=self._sampling)
                    for prompt, text in padded
                ],
                mode=self._mode,
            )
            written += [completion.token_ids for completion in done[: len(part)]]
        return [
            (value, ids == text)
            for value, ids, (_, text) in zip(values, written, pairs, strict=True)
        ]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts after the pad token, in windows where the context is too short."""
        del disable_tqdm
        cfg = self._generator.cfg
        room = cfg.max_position_embeddings - cfg.block_length
        found = []
        for i, instance in enumerate(requests):
            (text,) = instance.args
            windows = get_rolling_token_windows(
                token_list=self._tokenizer.encode(text, special=True),
                prefix_token=self._tokenizer.pad_id,
                max_seq_len=room,
                context_len=1,
            )
            found.append(sum(self._log_probability(i, *make_disjoint_window(w)) for w in windows))
        return found

    def _log_probability(self, number: int, prompt: Sequence[int], text: Sequence[int]) -> float:
        exact = self._estimator == "ar"
        got = likelihood(
            self._generator, prompt, text, draws=1 if exact else self._draws, seed=self._seed,
            number=number,
        )  # fmt: skip
        assert exact or got.bound is not None
        value = -got.ar if exact or got.bound is None else -sum(got.bound) / len(got.bound)
        self.log.append(
            {
                "kind": "loglikelihood", "prompt_ids": list(prompt), "token_ids": list(text),
                "estimator": self._estimator, "value": value,
            }
        )  # fmt: skip
        return value
