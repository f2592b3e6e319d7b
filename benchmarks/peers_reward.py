"""The reward function of `peers.py grpo`, for both programs: it needs nothing of either."""


def digits(prompts, completions=None, responses=None, **columns) -> list[float]:
    """The share of digits among the characters of a response. TRL calls responses completions."""
    texts = responses if completions is None else completions
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]
