"""Whether a response gives the right answer, and the share that does over a held-out set."""

from common.rollout import generation


def is_right(response: str, answer: str | float) -> bool:
    """Returns whether a response and an answer have the same final answer."""
    return final_answer(response) == final_answer(answer)


def final_answer(text: str | float) -> str:
    """Returns what follows the last `####` (GSM8K's mark), or the whole text if it has no mark.

    What a model thought before answering does not count. A final `.0` does not count either,
    because a column of whole numbers may have become one of floats.
    """
    after_thinking = str(text).split("</think>")[-1]
    return after_thinking.split("####")[-1].strip().removesuffix(".0")


def exact_match(
    accelerator, model, unwrapped, tokenizer, eval_set, batch_size: int, max_new_tokens: int
) -> tuple[float | None, list[str]]:
    """Answers the prompts of a held-out set by greedy decoding. All processes must call it.

    Args:
        model, unwrapped: what `accelerator.prepare` returned, and the `LogProbModel` inside it.
        eval_set: has the column `prompt_ids`; rows with an empty `answer` are left out.
        batch_size: prompts that a process takes at once.

    Returns:
        the share of right responses, None where the set has no column `answer`; up to four
        lines that each show a prompt and its response.
    """
    if "answer" not in eval_set.column_names:
        return None, []
    answered = [row for row, answer in enumerate(eval_set["answer"][:]) if answer]
    rows = eval_set.select_columns(["prompt_ids", "answer"])[answered]
    prompts = rows["prompt_ids"]
    responses = generation.generate(
        accelerator, model, unwrapped.model, tokenizer, prompts, batch_size, max_new_tokens
    )
    prompt_texts = tokenizer.batch_decode(prompts, skip_special_tokens=True)
    texts = tokenizer.batch_decode(
        [response.ids for response in responses], skip_special_tokens=True
    )
    right = [is_right(text, answer) for text, answer in zip(texts, rows["answer"])]

    examples = []
    for is_one_right, prompt, text in list(zip(right, prompt_texts, texts))[:4]:
        verdict = "right" if is_one_right else "wrong"
        examples.append(f"{verdict}: {prompt[-80:]!r} -> {text[-80:]!r}")
    return sum(right) / len(right), examples
