"""Token ids and texts: the plain ways from one to the other, and what ids have in common."""

import functools
import re
from typing import NamedTuple

from common.data.formats import BadRow

# Twice what the longest context of a model takes. Tokenising so much takes some ten seconds.
MOST_CHARACTERS = 10_000_000

# A surrogate: JSON may write a character as two of them.
HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class Beginning(NamedTuple):
    """A text with its token ids, and how much of both stays when more text follows.

    Attributes:
        kept_ids, kept_characters: what stands in front of the last marker, see `find_cuts`. 0 if
            there is none.
    """

    text: str
    ids: list[int]
    kept_ids: int
    kept_characters: int


def encoding_of(tokenizer, text: str):
    """What the tokenizer makes of a text, without the special tokens that it puts around texts.

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
    """Token ids of a text, see `encoding_of`."""
    return encoding_of(tokenizer, text).input_ids


def encode_beginning(tokenizer, text: str) -> Beginning:
    """Token ids of a text that longer ones begin with, see `encode_longer`."""
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
    """Token ids of a text, the same as `encode_text` returns, without its beginning's work."""
    if not text.startswith(beginning.text):
        return encode_text(tokenizer, text)
    kept = beginning.ids[: beginning.kept_ids]
    return kept + encode_text(tokenizer, text[beginning.kept_characters :])


def decode(tokenizer, ids: list[int]) -> str:
    """The text of ids, special tokens included, as it is."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def added_tokens(tokenizer) -> dict:
    """The tokens added to the vocabulary, by id."""
    return read_added_tokens(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=16)
def read_added_tokens(tokenizer, _size: int) -> dict:
    """What `added_tokens` returns; once for each tokenizer and size, because it takes long."""
    return tokenizer.added_tokens_decoder


def cut_tokens(tokenizer) -> dict[int, str]:
    """The markers in front of which texts can be cut, by id; see `find_cuts`."""
    return find_cuts(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=16)
def find_cuts(tokenizer, _size: int) -> dict[int, str]:
    """The tokens in front of which a text can be cut, and both parts tokenised alone.

    A fast tokenizer first looks for special tokens, from left to right, then tokenises each stretch
    of text between them alone. So what follows a special token changes nothing in front of it. Left
    out are tokens that are looked for later or under conditions, and those that a longer one holds.
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


def shared_length(first: list[int], second: list[int]) -> int:
    """The number of tokens that both lists begin with."""
    for place, (one, other) in enumerate(zip(first, second)):
        if one != other:
            return place
    return min(len(first), len(second))
