"""A reward that is learned in a few updates."""


def even(prompts, responses, **columns):
    """The share of a response's characters that are even digits."""
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in responses]
