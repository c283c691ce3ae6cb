"""Text that the model in the package was trained for."""

from clover_jax.data import tasks
from clover_jax.data.chat import tokenize_prompt
from clover_jax.data.tokenizer import Tokenizer


def solved_problems(tokenizer: Tokenizer, n: int, *, skip: int = 0) -> list[int]:
    """n token ids of held-out problems and their answers, one after the other."""
    ids: list[int] = []
    families = [tasks.eval_set(name, "val", 60) for name in tasks.SCRATCHPAD_TASKS]
    for i in range(skip, 60):
        for family in families:
            item = family[i]
            ids += tokenize_prompt(tokenizer, tasks.messages(item), enable_thinking=True)
            ids += tokenizer.encode(tasks.response_text(item, True), special=True)
            ids.append(tokenizer.end_of_turn_id)
    assert len(ids) >= n
    return ids[:n]
