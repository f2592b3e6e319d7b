"""A reward function whose scores often tie, so that GRPO leaves some groups out."""


def ties(prompts, responses, response_ids, **columns) -> list[float]:
    """1 where the tokens of a response sum up to a multiple of 5, else 0."""
    return [float(sum(ids) % 5 == 0) for ids in response_ids]


def n_images(prompts, responses, images):
    return [float(len(of_prompt)) for of_prompt in images]
