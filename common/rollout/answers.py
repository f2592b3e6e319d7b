"""Whether a response gives the right answer."""


def is_right(response: str, answer: str | float) -> bool:
    """Whether both end alike: after the last `####` (GSM8K's mark), or all of a text without one. What was thought before does not
    count, and 42.0 is 42, which a column of numbers may have become."""
    end = lambda text: str(text).split("</think>")[-1].split("####")[-1].strip().removesuffix(".0")
    return end(response) == end(answer)
