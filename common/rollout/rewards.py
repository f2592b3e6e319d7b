"""Scores of responses."""

from common.rollout import answers


def answer_reward(prompts: list, responses: list[str], answer: list[str], **columns) -> list[float]:
    """A reward function: 1 where the final answer is that of the column `answer`, else 0."""
    return [float(answers.is_right(response, right)) for response, right in zip(responses, answer)]
