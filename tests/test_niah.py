"""niah: its problems, its splits, its reward. Nothing here needs a model."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from itertools import combinations, product
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.environments.base import Problem, Split
from grpo_core.environments.niah import KEYS, SENTENCES, Niah, NiahOptions, split_of

SPLITS: tuple[Split, ...] = get_args(Split)
NEEDLE = re.compile(r"The special magic number for ([a-z]+-[a-z]+) is (\d+)\.")
QUESTION = re.compile(r"What is the special magic number for ([a-z]+-[a-z]+)\? Answer with the number only\.")


def niah(**options: int) -> Niah:
    return Niah(NiahOptions(**options))


def needles(problem: Problem) -> list[tuple[str, str]]:
    """All (key, value) pairs of the document, read from its text alone."""
    assert problem.document is not None
    return NEEDLE.findall(problem.document)


def asked(problem: Problem) -> tuple[str, str]:
    """The (key, value) pair that is asked for."""
    match = QUESTION.fullmatch(problem.question)
    assert match is not None
    return match[1], problem.answer


def sentences(problem: Problem) -> list[list[str]]:
    """The document's blocks, each a list of sentences. No sentence has a full stop but its last character."""
    assert problem.document is not None
    return [[f"{text}." for text in re.split(r"\. ?", block)[:-1]] for block in problem.document.split("\n")]


# --- Problems come from their address alone ---------------------------------------------------------------

# Frozen: a change of the generator, of its word lists or of `Draws` changes every published number.
GOLDEN = Problem(
    id="niah-46a370994d14",
    split="train",
    seed=0,
    index=0,
    document=(
        "Our teacher told a story about the desert. The special magic number for hungry-castle is 6362. "
        "The library is quiet in the afternoon. They shared a blanket and watched the stars. "
        "A thin path led to the old mill. The puppy chased its tail in the yard.\n"
        "A dog barked at the passing train. The choir practiced in the old church. "
        "In autumn the leaves turn yellow and red. She made tea and sat by the fire. "
        "The special magic number for patient-apple is 1359. He closed the book and turned off the light.\n"
        "A light burned in the kitchen all night. A new roof was built before the winter. "
        "She made tea and sat by the fire. A long road runs along the coast. "
        "The special magic number for fresh-river is 6963. The special magic number for giant-piano is 9412. "
        "We spent the whole day cleaning the attic.\n"
        "In autumn the leaves turn yellow and red. At dusk the birds returned to the roof. "
        "They shared a blanket and watched the stars. The ferry crosses the bay in an hour. "
        "They ate their lunch under an oak tree."
    ),
    question="What is the special magic number for fresh-river? Answer with the number only.",
    answer="6963",
    # 4 blocks of 5 sentences and 4 needles are 24 sentences; 16 stand before the asked one: 16 / 23.
    metadata={"depth": 0.6957, "blocks": 4, "keys": 4},
)


def test_problem_of_seed_0_is_frozen():
    assert niah().problem(0, "train", 0) == GOLDEN


def test_problems_do_not_depend_on_what_was_asked_before():
    addresses: list[tuple[int, Split, int]] = [
        (seed, split, index) for seed in (0, 7) for split in SPLITS for index in range(4)
    ]
    environment = niah()
    forwards = {address: environment.problem(*address) for address in addresses}
    backwards = {address: environment.problem(*address) for address in reversed(addresses)}
    assert forwards == backwards
    assert environment.problems(7, "eval", count=2, start=1) == [forwards[7, "eval", 1], forwards[7, "eval", 2]]


def test_every_part_of_the_address_counts():
    environment = niah()
    problems = [
        environment.problem(seed, split, index, stream)
        for seed, split, index, stream in product((0, 1), SPLITS, (0, 1), ("", "sft", "rl"))
    ]
    assert len({problem.id for problem in problems}) == 36  # 2 seeds x 3 splits x 2 indices x 3 streams


def test_streams_of_train_share_no_problem_here():
    environment = niah()
    streams = [{problem.id for problem in environment.problems(0, "train", 300, name)} for name in ("sft", "rl")]
    assert [len(ids) for ids in streams] == [300, 300]
    assert not streams[0] & streams[1]


def test_id_is_equal_exactly_when_document_and_question_are():
    # One block, one key and one digit: 32,400 pairs, so 2,000 draws of the eval tenth ask most pairs again.
    problems = niah(max_blocks=1, num_keys=1, num_digits=1).problems(0, "eval", 2000)
    contents = {(problem.document, problem.question) for problem in problems}
    assert len({asked(problem) for problem in problems}) < 2000
    assert len({problem.id for problem in problems}) == len(contents)
    # Other options that come to the same content: the id knows nothing else.
    longer, short = niah(max_blocks=4), niah(max_blocks=1)
    single = next(problem for problem in longer.problems(0, "train", 50) if problem.metadata["blocks"] == 1)
    assert short.problem(0, "train", single.index).id == single.id


def test_asked_needle_is_the_same_for_every_length_and_number_of_distractors():
    variants = [niah(), niah(min_blocks=8, max_blocks=8), niah(num_keys=1), niah(num_keys=64)]
    for index in range(5):
        assert len({asked(environment.problem(0, "eval", index)) for environment in variants}) == 1


# --- What a problem is made of -----------------------------------------------------------------------------


@st.composite
def valid_options(draw: st.DrawFn) -> NiahOptions:
    num_digits = draw(st.integers(1, 12))
    least, most = sorted(draw(st.tuples(st.integers(1, 6), st.integers(1, 6))))
    num_keys = draw(st.integers(1, min(64, 9 * 10 ** (num_digits - 1))))
    return NiahOptions(min_blocks=least, max_blocks=most, num_keys=num_keys, num_digits=num_digits)


@settings(deadline=None)
@given(valid_options(), st.integers(0, 2**63 - 1), st.sampled_from(SPLITS), st.integers(0, 10**6))
def test_every_problem_can_be_solved_from_its_text(options: NiahOptions, seed: int, split: Split, index: int):
    environment = Niah(options)
    problem = environment.problem(seed, split, index)
    pairs, (key, value) = needles(problem), asked(problem)

    assert len(pairs) == len(dict(pairs)) == len(set(dict(pairs).values())) == options.num_keys
    assert dict(pairs)[key] == value
    assert problem.document is not None
    assert problem.document.count(value) == 1
    assert all(len(number) == options.num_digits and number[0] != "0" for _, number in pairs)
    assert split_of(key, int(value)) == split

    blocks = sentences(problem)
    assert options.min_blocks <= problem.metadata["blocks"] == len(blocks) <= options.max_blocks
    for block in blocks:
        filler = [sentence for sentence in block if not NEEDLE.fullmatch(sentence)]
        assert len(set(filler)) == len(filler) == 5
        assert set(filler) <= set(SENTENCES)
    flat = [sentence for block in blocks for sentence in block]
    place = flat.index(f"The special magic number for {key} is {value}.")
    assert problem.metadata["depth"] == round(place / (len(flat) - 1), 4)

    for completion in (value, f" {value}\n", f"{value}."):
        score = environment.score(problem, completion)
        assert (score.reward, score.parts) == (1.0, {"contains": 1.0})
    for _, other in set(pairs) - {(key, value)}:
        score = environment.score(problem, other)
        assert (score.reward, score.parts) == (0.0, {"contains": 0.0})


def test_asked_needle_stands_at_every_depth():
    # One block and one needle are 6 sentences, so the depth is one of k / 5.
    problems = niah(max_blocks=1, num_keys=1).problems(0, "train", 600)
    counts = Counter(problem.metadata["depth"] for problem in problems)
    assert set(counts) == {0.0, 0.2, 0.4, 0.6, 0.8, 1.0}
    # Uniform: 100 of 600 each, standard deviation sqrt(600 * 1/6 * 5/6) = 9.1; 60 is 4.4 of these away.
    assert min(counts.values()) > 60
    # Longer documents reach both ends and every tenth between them.
    longer = [problem.metadata["depth"] for problem in niah(min_blocks=3).problems(0, "train", 600)]
    assert (min(longer), max(longer)) == (0.0, 1.0)
    assert {min(int(depth * 10), 9) for depth in longer} == set(range(10))


def test_every_number_of_blocks_within_the_bounds_occurs():
    problems = niah(min_blocks=2, max_blocks=5).problems(0, "validation", 100)
    assert {problem.metadata["blocks"] for problem in problems} == {2, 3, 4, 5}


def test_all_nine_one_digit_values_fit_in_one_document():
    problem = niah(num_digits=1, num_keys=9).problem(0, "train", 0)
    assert sorted(value for _, value in needles(problem)) == list("123456789")


def test_texts_hold_no_number_and_nothing_twice():
    assert len(set(KEYS)) == len(KEYS) == 3600
    assert all(re.fullmatch(r"[a-z]+-[a-z]+", key) for key in KEYS)
    assert len(set(SENTENCES)) == len(SENTENCES) == 72
    for sentence in SENTENCES:
        assert re.fullmatch(r"[A-Z][A-Za-z ]+\.", sentence)
        assert "magic" not in sentence
        assert "number" not in sentence


# --- Splits ------------------------------------------------------------------------------------------------


def test_splits_share_no_asked_pair_whatever_the_seeds():
    # One digit leaves 3,600 * 9 = 32,400 pairs. Without the rule, 1,500 draws of one split and 1,500 of another
    # would share about 1500 * 1500 / 32400 = 69 pairs.
    environment = niah(num_digits=1, num_keys=1)
    pairs = {
        split: {asked(problem) for seed in range(5) for problem in environment.problems(seed, split, 300)}
        for split in SPLITS
    }
    for one, other in combinations(SPLITS, 2):
        assert not pairs[one] & pairs[other]


def test_shares_of_the_splits():
    # By another route: the first 16 hexadecimal digits of SHA-256 over "key=value", by their last decimal digit.
    tenths = {**dict.fromkeys("01234567", "train"), "8": "validation", "9": "eval"}
    counts: Counter[Split] = Counter()
    for key, value in product(KEYS, range(1, 10)):
        digest = hashlib.sha256(f"{key}={value}".encode()).hexdigest()
        split = split_of(key, value)
        assert split == tenths[str(int(digest[:16], 16))[-1]]
        counts[split] += 1
    # Of 32,400 pairs 80 % are 25,920 and 10 % are 3,240, with a standard deviation of at most 72.
    assert counts == {"train": 25942, "validation": 3242, "eval": 3216}


@pytest.mark.parametrize("num_digits", range(1, 13))
def test_no_split_is_empty(num_digits: int):
    # This is why the walk to the next pair of a split always ends, for every number of digits.
    lowest = 10 ** (num_digits - 1)
    assert {split_of(key, lowest) for key in KEYS} == set(SPLITS)


# --- Reward ------------------------------------------------------------------------------------------------

SCORES = [
    # completion, reward, contains
    ("4821", 1, 1),
    ("  4821\n", 1, 1),
    ("\u00a04821\t", 1, 1),
    ("4821.", 1, 1),
    ("4821.\n", 1, 1),
    ("4821 .", 1, 1),
    # More than the value: right in `contains` alone.
    ("4821..", 0, 1),
    ("4821!", 0, 1),
    ("**4821**", 0, 1),
    ("$4821", 0, 1),
    ("+4821", 0, 1),
    ("4821, I think", 0, 1),
    ("(4821)", 0, 1),
    ("The number is 4821.", 0, 1),
    ("... 4821", 0, 1),
    ("...4821", 0, 1),
    ("- 4821", 0, 1),
    ("brave-otter-4821", 0, 1),
    ("\u7b54\u6848\u662f4821\u3002", 0, 1),
    # Several numbers: it is enough that one of them is the value, the denial included.
    ("1234 4821", 0, 1),
    ("14821 or 4821", 0, 1),
    ("not 4821", 0, 1),
    # Another number that has the value's digits in it.
    ("14821", 0, 0),
    ("48210", 0, 0),
    ("04821", 0, 0),
    ("4821.5", 0, 0),
    ("4821.0", 0, 0),
    ("4821,000", 0, 0),
    ("1.4821", 0, 0),
    ("1,4821", 0, 0),
    (".4821", 0, 0),
    ("-4821", 0, 0),
    ("it is -4821", 0, 0),
    ("\u22124821", 0, 0),
    ("4821e5", 0, 0),
    ("0x4821", 0, 0),
    ("4821_000", 0, 0),
    ("\u06614821", 0, 0),  # an Arabic-Indic digit in front
    # Not the value's own digits.
    ("4,821", 0, 0),
    ("4 821", 0, 0),
    ("482", 0, 0),
    ("\uff14\uff18\uff12\uff11", 0, 0),  # full-width digits
    ("four thousand eight hundred twenty-one", 0, 0),
    ("", 0, 0),
    (".", 0, 0),
]
FIXED = Problem("niah-fixed", "eval", 0, 0, None, "?", "4821")


@pytest.mark.parametrize(("completion", "reward", "contains"), SCORES)
def test_score(completion: str, reward: int, contains: int):
    score = niah().score(FIXED, completion)
    assert (score.reward, score.parts) == (reward, {"contains": contains})
    assert tuple(score.parts) == Niah.part_names


anything = st.text(st.characters(codec=None))  # unpaired surrogates included


@settings(deadline=None)
@given(anything, anything)
def test_hostile_completions_are_scored(before: str, after: str):
    environment = niah()
    for completion in (before, f"{before}4821{after}"):
        score = environment.checked_score(FIXED, completion)
        assert not isinstance(score, str)
        assert score.reward in (0.0, 1.0)
        assert score.reward <= score.parts["contains"] <= ("4821" in completion)


@settings(deadline=None)
@given(st.from_regex(r"[0-9]{0,3}", fullmatch=True), st.from_regex(r"[0-9]{0,3}", fullmatch=True))
def test_longer_numbers_are_not_the_value(before: str, after: str):
    score = niah().score(FIXED, f"It is {before}4821{after}, surely.")
    assert score.parts["contains"] == (before == after == "")
