"""Turns plain texts into token ids and back, and compares token ids."""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from preference_recipes.data import thoughts
from preference_recipes.data.messages import BadRow

# Twice what the longest context of a model takes. Tokenising so much takes some ten seconds.
MOST_CHARACTERS = 10_000_000

# A surrogate: JSON may write a character as two of them.
HALF_CHARACTER = re.compile("[\ud800-\udfff]")


# ============================================================ one text
def encoding_of(tokenizer, text: str):
    """Returns the tokenizer's encoding of a text, without the special tokens it puts around texts.

    Raises:
        BadRow: the text is too long, or holds half of a character.
    """
    if len(text) > MOST_CHARACTERS:
        raise BadRow(
            f"a text of {len(text):,} characters, where at most {MOST_CHARACTERS:,} are read: "
            "split or remove it"
        )
    try:
        return tokenizer(text, add_special_tokens=False)
    except TypeError:  # which does not say what is wrong
        if HALF_CHARACTER.search(text):
            raise BadRow("a text holds one half of a character, without the other") from None
        raise


def encode_text(tokenizer, text: str) -> list[int]:
    """Returns the token ids of a text, see `encoding_of`."""
    return encoding_of(tokenizer, text).input_ids


def decode(tokenizer, ids: list[int]) -> str:
    """Returns the text of token ids as it is, special tokens included."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def decode_answers(tokenizer, answers: Sequence[list[int]]) -> list[str]:
    """Returns the texts of answers without special tokens, but with the markers of thoughts.

    Some tokenizers have markers that are special tokens. Without these, a thought would run into
    what follows it.
    """
    markers = [marker for pair in thoughts.MARKERS for marker in pair]
    left_out = {
        number
        for number, token in added_tokens(tokenizer).items()
        if token.special and not any(marker.startswith(token.content) for marker in markers)
    }
    kept = [[token for token in ids if token not in left_out] for ids in answers]
    return tokenizer.batch_decode(kept, skip_special_tokens=False)


# ============================================================ a text and longer ones
class Beginning(NamedTuple):
    """A text with its token ids, and how much of both stays the same in every longer text.

    What precedes the last marker stays the same, see `find_cuts`. Example:

        text             <user>Hi<bot>     ids   1 40 2
        kept_characters  8: <user>Hi       kept_ids   2: 1 40

    Of the longer text `<user>Hi<bot>Yes` only `<bot>Yes` is tokenised.

    Attributes:
        kept_ids, kept_characters: 0 if there is no marker.
    """

    text: str
    ids: list[int]
    kept_ids: int
    kept_characters: int


def encode_beginning(tokenizer, text: str) -> Beginning:
    """Returns the token ids of a text that longer texts begin with."""
    encoding = encoding_of(tokenizer, text)
    ids = encoding.input_ids
    cuts = cut_tokens(tokenizer)
    for place in range(len(ids) - 1, -1, -1):
        content = cuts.get(ids[place])
        if content is None:
            continue
        start = encoding.token_to_chars(place).start
        # An unknown character may have a marker's id, too.
        if text.startswith(content, start):
            return Beginning(text, ids, place, start)
    return Beginning(text, ids, 0, 0)


def encode_longer(tokenizer, beginning: Beginning, text: str) -> list[int]:
    """Returns what `encode_text` returns, and saves the work for the text's beginning."""
    if not text.startswith(beginning.text):
        return encode_text(tokenizer, text)
    kept = beginning.ids[: beginning.kept_ids]
    return kept + encode_text(tokenizer, text[beginning.kept_characters :])


def encode_after(tokenizer, beginning: Beginning, text: str) -> list[int]:
    """Returns the token ids of a text as they are where both texts are tokenised as one.

    They are those of the whole text, without the beginning's. If one token spans the border, no
    such cut exists, and the text is tokenised alone. Examples, with a space between tokens:

        beginning     text   both texts    returned
        <user> Hi     you    <user> Hi you      you
        ab            cd     a bc d             c d
    """
    whole = encode_longer(tokenizer, beginning, beginning.text + text)
    if whole[: len(beginning.ids)] == beginning.ids:
        return whole[len(beginning.ids) :]
    return encode_text(tokenizer, text)


# ============================================================ the tokens of a tokenizer
def added_tokens(tokenizer) -> dict:
    """Returns the tokens added to the vocabulary, by id."""
    return read_added_tokens(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=16)
def read_added_tokens(tokenizer, _size: int) -> dict:
    """Does the work of `added_tokens` once for each tokenizer and size, because it takes long."""
    return tokenizer.added_tokens_decoder


def cut_tokens(tokenizer) -> dict[int, str]:
    """Returns the markers in front of which texts can be cut, by id; see `find_cuts`."""
    return find_cuts(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=16)
def find_cuts(tokenizer, _size: int) -> dict[int, str]:
    """Finds the tokens in front of which a text can be cut, and both parts tokenised alone.

    A fast tokenizer first looks for special tokens, from left to right, then tokenises each stretch
    of text between them alone. So what follows a special token changes nothing in front of it.
    Tokens that are looked for later or under conditions are no such cuts, nor is a token that is
    part of a longer one.
    """
    if not tokenizer.is_fast:
        return {}
    contents = [token.content for token in added_tokens(tokenizer).values()]
    cuts = {}
    for number, token in added_tokens(tokenizer).items():
        is_plain = token.special and not (token.normalized or token.single_word or token.lstrip)
        if is_plain and sum(token.content in content for content in contents) == 1:
            cuts[number] = token.content
    return cuts


def is_marker(tokenizer, token: int) -> bool:
    """Whether a token was added to the vocabulary to mark something, such as the end of a turn."""
    added = added_tokens(tokenizer).get(token)
    return added is not None and not added.content.isspace()


# ============================================================ comparing
def n_shared(first: Sequence, second: Sequence) -> int:
    """Returns how many tokens, or characters, both begin with."""
    for place, (one, other) in enumerate(zip(first, second)):
        if one != other:
            return place
    return min(len(first), len(second))


def n_shared_at_end(first: Sequence, second: Sequence) -> int:
    """Returns how many tokens, or characters, both end with."""
    return n_shared(first[::-1], second[::-1])
