"""Scores of responses."""


def is_right(response: str, answer: str | float) -> bool:
    """Whether both end alike: after the last `####` (GSM8K's mark), or all of a text without one. What was thought before does not
    count, and 42.0 is 42, which a column of numbers may have become."""
    end = lambda text: str(text).split("</think>")[-1].split("####")[-1].strip().removesuffix(".0")
    return end(response) == end(answer)


def answer_reward(prompts: list, responses: list[str], answer: list[str], **columns) -> list[float]:
    """A reward function: 1 where the final answer is that of the column `answer`, else 0."""
    return [float(is_right(response, right)) for response, right in zip(responses, answer)]
