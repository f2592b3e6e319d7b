"""Rewards for sums. A function gets the columns of the data, and returns one number a response."""


def digits(prompts: list, responses: list[str], answer: list[str], **columns) -> list[float]:
    """Returns which share of the answer's digits are in their places."""
    return [
        sum(a == b for a, b in zip(response, right)) / len(right)
        for response, right in zip(responses, answer)
    ]


def brief(prompts: list, responses: list[str], **columns) -> list[float]:
    """Returns 1 for a response of up to three characters, less for each further one."""
    return [1.0 / max(1, len(response) - 2) for response in responses]
