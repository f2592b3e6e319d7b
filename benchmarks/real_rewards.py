"""The reward of `real_model.py` for GSM8K: a format, which a small model learns in a few updates."""


def marked(prompts: list, responses: list[str], **columns) -> list[float]:
    """Returns a score for each response: a half for `####`, a half for an end within 200 characters."""
    return [("####" in text) / 2 + (len(text) <= 200) / 2 for text in responses]
