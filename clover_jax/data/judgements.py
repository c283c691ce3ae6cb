"""Linked judgements: one short context, several questions whose answers depend on each other.

Every set gives contexts with the answer vectors ("worlds") that the context allows, found by brute
force, so a checker needs no reference solution. `coherent` are the vectors that fit together under
the context's rules whether or not they fit its facts: a guesser that answers each question by
itself mostly leaves them. From the standard library only.

- `kk4`, `kk6`: knights and knaves, one world.
- `kk5_multi`: the same with two to four worlds, any of which is right.
- `order8`: the order of five names by height; every order that fits the answers is coherent.
- `rules8`: facts and rules over earlier items; coherent are the vectors of any facts.
- `mirror8`: a tree of claims without an anchor; two worlds, each the negation of the other.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from clover_jax.errors import CloverError

NAMES = ("Ann", "Ben", "Cal", "Dan", "Eli", "Fay", "Gus", "Hal")

type World = tuple[str, ...]


@dataclass(frozen=True)
class Judgement:
    """A context with its questions.

    Attributes:
        family: one of `SETS`.
        prompt: the user's message: context, then numbered questions.
        worlds: the answer vectors that are right, the first one the reference.
        coherent: the vectors that contradict no rule; they hold every world.
        answers: what an answer may be, question by question.
    """

    family: str
    prompt: str
    worlds: tuple[World, ...]
    coherent: frozenset[World]
    answers: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        """Without the coherent set, whose order differs from process to process."""
        return f"Judgement({self.family!r}, {self.prompt!r}, {self.worlds!r})"


@dataclass(frozen=True)
class JudgementScore:
    """Judgement of one response.

    Attributes:
        correct: all answers are those of one world.
        format_valid: one answer of the right kind for each question.
        questions_right: share of right answers, in the world that they agree with most.
        consistent: the answers are coherent.
    """

    correct: bool
    format_valid: bool
    questions_right: float
    consistent: bool


YES_NO = ("yes", "no")


def _judgement(
    family: str,
    context: Sequence[str],
    questions: Sequence[str],
    worlds: Sequence[World],
    coherent: frozenset[World],
    answers: Sequence[tuple[str, ...]],
) -> Judgement:
    asked = [f"{i + 1}. {question}" for i, question in enumerate(questions)]
    task = "Answer all questions in one line."
    prompt = "\n".join([" ".join(context), *asked, task])
    return Judgement(family, prompt, tuple(worlds), coherent, tuple(answers))


def _said(values: Sequence[bool]) -> World:
    return tuple("yes" if value else "no" for value in values)


# --- knights and knaves -------------------------------------------------------------------------

_KNIGHT = {True: "a knight", False: "a knave"}
_JOIN: Mapping[str, Callable[[bool, bool], bool]] = {
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
}

# (left person, left is a knight, word, right person, right is a knight); no word: the left alone.
type _Claim = tuple[int, bool, str, int, bool]


def _holds(claim: _Claim, knights: Sequence[bool]) -> bool:
    left, is_left, word, right, is_right = claim
    first = knights[left] == is_left
    return first if not word else _JOIN[word](first, knights[right] == is_right)


def _claim(rng: random.Random, speaker: int, n: int) -> _Claim:
    left, right = rng.sample([i for i in range(n) if i != speaker], 2)
    word = rng.choice(("", "and", "or", "or"))
    return left, rng.random() < 0.5, word, right, rng.random() < 0.5


def _claim_text(speaker: int, claim: _Claim) -> str:
    left, is_left, word, right, is_right = claim
    said = f"{NAMES[left]} is {_KNIGHT[is_left]}"
    if word:
        said += f" {word} {NAMES[right]} is {_KNIGHT[is_right]}"
    return f"{NAMES[speaker]}: {said}."


def _worlds_of(claims: Sequence[tuple[int, _Claim]], n: int) -> list[World]:
    """Knights tell the truth, knaves do not."""
    return [
        _said(knights)
        for knights in itertools.product((True, False), repeat=n)
        if all(knights[speaker] == _holds(claim, knights) for speaker, claim in claims)
    ]


def _knights(family: str, n: int, fewest: int, most: int) -> Callable[[random.Random], Judgement]:
    def draw(rng: random.Random) -> Judgement:
        while True:
            claims = [(speaker, _claim(rng, speaker, n)) for speaker in range(n)]
            worlds = _worlds_of(claims, n)
            if fewest <= len(worlds) <= most:
                break
        rng.shuffle(worlds)
        return _judgement(
            family,
            ["Knights tell the truth, knaves lie.", *(_claim_text(s, c) for s, c in claims)],
            [f"Is {name} a knight?" for name in NAMES[:n]],
            worlds,
            frozenset(worlds),
            [YES_NO] * n,
        )

    return draw


def _mirror(rng: random.Random) -> Judgement:
    """A claim says that two people are alike or not: negating everybody changes nothing."""
    n = len(NAMES)
    order = rng.sample(range(n), n)
    claims: list[tuple[int, _Claim]] = []
    for k in range(1, n):
        other = order[rng.randrange(k)]
        claims.append((order[k], (other, rng.random() < 0.5, "", 0, True)))
    rng.shuffle(claims)
    worlds = _worlds_of(claims, n)
    rng.shuffle(worlds)
    return _judgement(
        "mirror8",
        ["Knights tell the truth, knaves lie.", *(_claim_text(s, c) for s, c in claims)],
        [f"Is {name} a knight?" for name in NAMES],
        worlds,
        frozenset(worlds),
        [YES_NO] * n,
    )


# --- orders -------------------------------------------------------------------------------------


def _order(rng: random.Random) -> Judgement:
    names = rng.sample(NAMES, 5)  # from the tallest
    clues = [f"{a} is taller than {b}." for a, b in itertools.pairwise(names)]
    i, j = sorted(rng.sample(range(5), 2))
    clues.append(f"{names[i]} is taller than {names[j]}.")
    rng.shuffle(clues)
    a, b = rng.sample(range(5), 2)
    others = [p for p in itertools.permutations(range(5), 2) if p not in ((a, b), (b, a))]
    pairs = [(a, b), (b, a), *rng.sample(others, 4)]
    rng.shuffle(pairs)
    questions = [f"Is {names[x]} taller than {names[y]}?" for x, y in pairs]
    questions += ["Who is the tallest?", "Who is the shortest?"]

    def answers(order: Sequence[int]) -> World:
        """`order` lists the five from the tallest."""
        place = {who: at for at, who in enumerate(order)}
        told = _said([place[x] < place[y] for x, y in pairs])
        return (*told, names[order[0]], names[order[-1]])

    everyone = tuple(sorted(names))
    return _judgement(
        "order8",
        clues,
        questions,
        [answers(range(5))],
        frozenset(map(answers, itertools.permutations(range(5)))),
        [*[YES_NO] * 6, everyone, everyone],
    )


# --- rules --------------------------------------------------------------------------------------

_RULES: Mapping[str, Callable[[bool, bool], bool]] = {
    "{0} and {1} are on": lambda a, b: a and b,
    "{0} or {1} is on": lambda a, b: a or b,
    "exactly one of {0} and {1} is on": lambda a, b: a != b,
    "{0} is off": lambda a, _: not a,
}


def _rules(rng: random.Random) -> Judgement:
    n_facts, n_rules = 4, 8
    letters = rng.sample("ABCDEFGHIJKLMNOP", n_facts + n_rules)
    facts = [rng.random() < 0.5 for _ in range(n_facts)]
    rules = [
        (rng.choice(tuple(_RULES)), *rng.sample(range(n_facts + k), 2)) for k in range(n_rules)
    ]

    def follow(facts: Sequence[bool]) -> World:
        values = list(facts)
        for form, a, b in rules:
            values.append(_RULES[form](values[a], values[b]))
        return _said(values[n_facts:])

    context = [f"{letters[i]} is {'on' if fact else 'off'}." for i, fact in enumerate(facts)]
    lines = [
        f"{letters[n_facts + k]} is on if and only if {form.format(letters[a], letters[b])}."
        for k, (form, a, b) in enumerate(rules)
    ]
    rng.shuffle(lines)
    return _judgement(
        "rules8",
        [*context, *lines],
        [f"Is {letters[n_facts + k]} on?" for k in range(n_rules)],
        [follow(facts)],
        frozenset(map(follow, itertools.product((True, False), repeat=n_facts))),
        [YES_NO] * n_rules,
    )


# --- the public surface -------------------------------------------------------------------------

_DRAW: Mapping[str, Callable[[random.Random], Judgement]] = {
    "kk4": _knights("kk4", 4, 1, 1),
    "kk6": _knights("kk6", 6, 1, 1),
    "kk5_multi": _knights("kk5_multi", 5, 2, 4),
    "order8": _order,
    "rules8": _rules,
    "mirror8": _mirror,
}
SETS = tuple(_DRAW)
SPLITS = ("train", "val", "test")


def draw(family: str, rng: random.Random) -> Judgement:
    """A random context of a set, of whatever split.

    Raises:
        CloverError: unknown set.
    """
    if family not in _DRAW:
        raise CloverError(f"set of judgements is {family!r}: expected one of {', '.join(SETS)}")
    return _DRAW[family](rng)


def split_of(judgement: Judgement) -> str:
    """`train` (90 % of the contexts), `val` (5 %) or `test` (5 %), by a hash of the prompt."""
    key = f"{judgement.family}\0{judgement.prompt}"
    bucket = int(hashlib.sha1(key.encode()).hexdigest()[:8], 16) % 100
    return "test" if bucket < 5 else "val" if bucket < 10 else "train"


def eval_set(family: str, split: str, n: int) -> list[Judgement]:
    """The first `n` different contexts of a split; a smaller set is a prefix of a larger one.

    Raises:
        CloverError: unknown set or split.
    """
    if split not in SPLITS:
        raise CloverError(f"split is {split!r}: expected one of {', '.join(SPLITS)}")
    found: dict[str, Judgement] = {}
    for index in itertools.count():
        if len(found) >= n:
            return list(found.values())
        judgement = draw(family, random.Random(f"judgements\0{index}"))
        if split_of(judgement) == split:
            found.setdefault(judgement.prompt, judgement)
    raise AssertionError("count() ends nowhere")


def score(judgement: Judgement, text: str) -> JudgementScore:
    """Judges a decoded response: answers separated by blanks, commas or lines, numbered or not."""
    words = [word.strip(".,;:") for word in text.rpartition("</think>")[2].split()]
    found = tuple(word for word in words if word and not word.isdigit())
    kinds = judgement.answers
    by_case = [{option.lower(): option for option in options} for options in kinds]
    if len(found) != len(kinds) or any(
        word.lower() not in options for word, options in zip(found, by_case, strict=True)
    ):
        return JudgementScore(False, False, 0.0, False)
    given = tuple(options[word.lower()] for word, options in zip(found, by_case, strict=True))
    agreeing = max(
        sum(a == b for a, b in zip(given, world, strict=True)) for world in judgement.worlds
    )
    return JudgementScore(
        correct=given in judgement.worlds,
        format_valid=True,
        questions_right=agreeing / len(kinds),
        consistent=given in judgement.coherent,
    )
