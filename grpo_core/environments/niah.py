"""niah, the needle in a haystack: find one number among look-alikes in a page of filler sentences.

Holds the texts, the generator and the reward. How a problem becomes a prompt is `chat.py`'s business, and
whether a completion was cut off is evaluation's.
"""

from __future__ import annotations

import hashlib
import re
from typing import Self

from pydantic import Field, model_validator

from grpo_core.environments.base import Draws, Environment, EnvironmentOptions, Problem, Score, Split
from grpo_core.errors import ConfigError
from grpo_core.validation import refusal

SENTENCES_PER_BLOCK = 5

_ADJECTIVES = """
    amber ancient bitter bold brave bright brisk broad calm careful cheerful clever cold curious dark deep eager
    early fair famous fancy fast fierce fresh gentle giant golden grand green happy heavy honest humble hungry kind
    lazy little lonely loud lucky narrow noble patient polite proud quick quiet rapid royal rusty shy silent silver
    simple smooth strong sunny tall warm wild
"""
_NOUNS = """
    anchor apple basket bear bell bridge candle canyon castle cloud comet crown desert dragon eagle falcon feather
    field flame forest fox garden hammer harbor hawk hill island jungle lake lamp lantern lion maple meadow mirror
    moon mountain ocean orange otter owl panther pearl piano planet rabbit river rocket sailor shadow spider star
    stone storm temple tiger tower valley violin wolf
"""
KEYS = tuple(f"{adjective}-{noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split())

SENTENCES = (
    "A cat slept on the warm stone wall.",
    "A child drew a house with blue chalk.",
    "A cool wind came down from the hills.",
    "A dog barked at the passing train.",
    "A farmer carried hay across the yard.",
    "A gull landed on the end of the pier.",
    "A letter arrived from a cousin by the sea.",
    "A light burned in the kitchen all night.",
    "A long road runs along the coast.",
    "A man sold roasted nuts by the gate.",
    "A neighbor lent us a ladder and some paint.",
    "A new roof was built before the winter.",
    "A painter sat by the water all day.",
    "A red kite hung in the tall tree.",
    "A small boat waited near the shore.",
    "A thin path led to the old mill.",
    "After lunch the office was almost empty.",
    "After the rain the air smelled of grass.",
    "At dusk the birds returned to the roof.",
    "At noon the market filled with people.",
    "Bread was cooling on the wooden table.",
    "Dust settled slowly on the empty shelves.",
    "Every morning she waters the plants.",
    "Everyone agreed that the soup needed salt.",
    "Fresh snow covered the quiet street.",
    "He closed the book and turned off the light.",
    "He fixed the fence before the storm came.",
    "He forgot his coat at the station.",
    "He learned to cook from his grandmother.",
    "In autumn the leaves turn yellow and red.",
    "In spring the fields are full of flowers.",
    "In the evening they played cards at home.",
    "Music drifted out of the open window.",
    "My aunt keeps bees behind the barn.",
    "No one heard the clock in the hall.",
    "Our teacher told a story about the desert.",
    "People walked slowly through the park.",
    "She keeps her tools in a green box.",
    "She made tea and sat by the fire.",
    "She walked to school along the canal.",
    "Some friends met for coffee after work.",
    "Someone left a bicycle by the door.",
    "The baker opens his shop before dawn.",
    "The bus was late because of the fog.",
    "The cellar was cool and smelled of apples.",
    "The children built a dam in the stream.",
    "The choir practiced in the old church.",
    "The doctor spoke softly to the family.",
    "The ferry crosses the bay in an hour.",
    "The garden needs water in the summer.",
    "The horses rested in the shade.",
    "The ice on the pond was still thin.",
    "The library is quiet in the afternoon.",
    "The museum has a room full of maps.",
    "The new bridge made the trip much shorter.",
    "The nurse wrote a note and went home.",
    "The oven was still warm from baking.",
    "The puppy chased its tail in the yard.",
    "The river was high after the rain.",
    "The soup tasted better the next day.",
    "The sun went down behind the hills.",
    "The tailor measured the cloth with care.",
    "The train moved slowly through the valley.",
    "The village holds a fair in the spring.",
    "The wind blew the papers off the desk.",
    "There was a smell of coffee in the hall.",
    "They ate their lunch under an oak tree.",
    "They painted the kitchen a pale yellow.",
    "They shared a blanket and watched the stars.",
    "Two old friends talked about the weather.",
    "We found a quiet place to sit and read.",
    "We spent the whole day cleaning the attic.",
)

# One split for each tenth of the hash space, so the shares are 80 %, 10 % and 10 %.
_SPLIT_OF_TENTH: tuple[Split, ...] = ("train",) * 8 + ("validation", "eval")


def split_of(key: str, value: int) -> Split:
    """The only split in which this value may be asked for under this key, whatever the seed and the options."""
    digest = hashlib.sha256(f"{key}={value}".encode()).digest()
    return _SPLIT_OF_TENTH[int.from_bytes(digest[:8], "big") % 10]


class NiahOptions(EnvironmentOptions):
    """How long the haystack is and how much in it looks like the needle."""

    min_blocks: int = Field(
        default=1, ge=1, le=4096, description="Fewest filler blocks in a document (a block: 5 sentences)."
    )
    max_blocks: int = Field(default=4, ge=1, le=4096, description="Most filler blocks in a document.")
    num_keys: int = Field(
        default=4, ge=1, le=64, description="Needles in a document; one is asked for, the others distract."
    )
    num_digits: int = Field(default=4, ge=1, le=12, description="Digits of every value; the first is never 0.")

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        if self.min_blocks > self.max_blocks:
            message = f"{self.min_blocks} is more than max_blocks, which is {self.max_blocks}"
            raise refusal(ConfigError(message, field="min_blocks", hint="lower min_blocks or raise max_blocks"))
        if self.num_keys > self.num_values:
            message = (
                f"{self.num_keys} needles need as many values, but num_digits {self.num_digits} has {self.num_values}"
            )
            raise refusal(ConfigError(message, field="num_keys", hint="lower num_keys or raise num_digits"))
        return self

    @property
    def lowest_value(self) -> int:
        """The smallest value of `num_digits` digits."""
        return 10 ** (self.num_digits - 1)

    @property
    def num_values(self) -> int:
        """How many values of `num_digits` digits there are."""
        return 9 * self.lowest_value


class Niah(Environment):
    """Needle in a haystack.

    A problem's address is (seed, split, stream, index). Options are no part of it: the asked needle is drawn
    first, so at one address it is the same for every document length and number of distractors, and runs that
    differ only in those compare like with like.
    """

    name = "niah"
    description = "Needle in a haystack: find the number that belongs to a key, among distractors in filler text."
    Options = NiahOptions
    part_names = ("contains",)
    max_new_tokens = 16  # every tokenizer here spends at most one token a digit; the rest ends the turn

    options: NiahOptions

    def problem(self, seed: int, split: Split, index: int, stream: str = "") -> Problem:
        """The problem at this address (see `Environment.problem`).

        Its metadata: ``depth``, the asked needle's place among the document's sentences from 0 (first) to 1
        (last); ``blocks`` and ``keys``, how many of each the document has.
        """
        options = self.options
        draws = Draws(self.name, seed, split, stream, index)
        asked_key, asked_value = self._asked(draws, split)
        keys = [KEYS[number] for number in _distinct(draws, len(KEYS), options.num_keys, asked_key)]
        values = [options.lowest_value + n for n in _distinct(draws, options.num_values, options.num_keys, asked_value)]
        needles = [f"The special magic number for {key} is {value}." for key, value in zip(keys, values, strict=True)]
        blocks = [_filler(draws) for _ in range(draws.integer(options.min_blocks, options.max_blocks))]
        for needle in needles:
            block = draws.choice(blocks)
            block.insert(draws.integer(0, len(block)), needle)

        sentences = [sentence for block in blocks for sentence in block]
        document = "\n".join(" ".join(block) for block in blocks)
        question = f"What is the special magic number for {keys[0]}? Answer with the number only."
        content = hashlib.sha256(f"{document}\n{question}".encode()).hexdigest()
        return Problem(
            id=f"{self.name}-{content[:12]}",
            split=split,
            seed=seed,
            index=index,
            document=document,
            question=question,
            answer=str(values[0]),
            metadata={
                "depth": round(sentences.index(needles[0]) / (len(sentences) - 1), 4),
                "blocks": len(blocks),
                "keys": len(keys),
            },
        )

    def score(self, problem: Problem, completion: str) -> Score:
        """Reward 1 when the completion is the value and nothing else, white space and one full stop aside.

        The part ``contains`` is 1 when the value stands anywhere in the completion as a number of its own,
        whatever else is said around it.
        """
        said = completion.strip().removesuffix(".").rstrip()
        return Score(
            reward=float(said == problem.answer),
            parts={"contains": float(_contains_number(completion, problem.answer))},
        )

    def _asked(self, draws: Draws, split: Split) -> tuple[int, int]:
        """Numbers of the asked key and value: the first pair of the split at or after a random one.

        The walk passes every pair once before it would repeat, and no split is without a pair.
        """
        count = len(KEYS) * self.options.num_values
        start = draws.integer(0, count - 1)
        pairs = (divmod(number % count, len(KEYS)) for number in range(start, start + count))
        return next(
            (key, value) for value, key in pairs if split_of(KEYS[key], self.options.lowest_value + value) == split
        )


def _distinct(draws: Draws, size: int, count: int, first: int) -> list[int]:
    """`first` and then `count` - 1 other numbers of range(size), all distinct.

    Floyd's algorithm (Bentley and Floyd 1987): every subset is equally likely, one draw each, no retries.
    """
    others: list[int] = []
    for last in range(size - count, size - 1):
        number = draws.integer(0, last)
        others.append(last if number in others else number)
    return [first, *(number + (number >= first) for number in others)]


def _filler(draws: Draws) -> list[str]:
    """The sentences of one block, all different."""
    first = draws.integer(0, len(SENTENCES) - 1)
    return [SENTENCES[number] for number in _distinct(draws, len(SENTENCES), SENTENCES_PER_BLOCK, first)]


def _contains_number(text: str, number: str) -> bool:
    """Whether a whole number stands in a text by itself and not as a piece of another number or word.

    Digits, letters, a decimal or thousands part, a minus sign or a leading decimal point make it another one.
    """
    before = r"(?<![A-Za-z_\d])(?<!\d[.,])(?<!(?<![\w.])[-\u2212.])"
    after = r"(?![A-Za-z_\d])(?![.,]\d)"
    return re.search(f"{before}{number}{after}", text) is not None
