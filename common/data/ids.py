"""Token ids and texts: the plain ways from one to the other, and what ids have in common."""

import functools


def encode_text(tokenizer, text: str) -> list[int]:
    """Token ids of a text, without the special tokens that the tokenizer puts around texts."""
    return tokenizer(text, add_special_tokens=False).input_ids


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
