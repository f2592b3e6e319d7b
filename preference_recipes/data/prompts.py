"""Turns a row with a prompt into token ids, for every recipe that samples its own answers."""

import json

from preference_recipes.data import chat, formats
from preference_recipes.data.messages import has_text


def prompt_row(
    row: dict,
    tokenizer,
    max_length: int,
    max_new_tokens: int,
    strings_as_messages: bool = False,
    tools: list[dict] | None = None,
) -> dict:
    """Returns `prompt_ids length truncated columns reason notes` of one row.

    `columns` is the whole row as a JSON text, for the reward function. Of `max_length` tokens,
    `max_new_tokens` are for the response.

    Args:
        tools: JSON schemas of what an environment lets the model call; None: column `tools`.
    """
    formats.require(row, "prompt", expected="'prompt'")
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        prompt = formats.question_of(prompt)
    [prompt] = formats.as_chat(row, strings_as_messages, prompt)
    if row.get("system"):
        row = {**row, "prompt": prompt}
    notes: list[str] = []
    if isinstance(prompt, str):
        (ids,) = chat.encode_plain(tokenizer, prompt)
    else:
        _, ids, notes = chat.encode_prompt(tokenizer, prompt, tools or row.get("tools"))
    reason = ""  # why the row cannot be used
    if not has_text(prompt):
        reason = "empty prompt"
    elif len(ids) + max_new_tokens > max_length:
        reason = "prompt leaves no room for max_new_tokens within max_length"
    return {
        "prompt_ids": ids,
        "length": len(ids),
        "truncated": False,
        "columns": json.dumps(row, default=str),
        "reason": reason,
        "notes": notes,
    }


# ============================================================ prompts with teachers
def taught_row(
    row: dict,
    tokenizer,
    max_length: int,
    max_new_tokens: int,
    teacher_names: list[str],
    teacher_prompt: str | None,
    with_completion: bool,
    strings_as_messages: bool = False,
) -> dict:
    """Returns what `prompt_row` does for one row, and what a distillation needs besides.

    That is `teacher`, if there are several; `teacher_prompt_ids`, if the teacher's prompt is in
    another column, `teacher_prompt`; and with completions what `add_completion` adds.
    """
    formats.require(row, "prompt", expected="'prompt'")
    completion: formats.Text | None = None
    if with_completion and row.get("completion") is not None:
        pair = {name: row.get(name) for name in ("prompt", "completion", "label")}
        prompt, completion = formats.as_chat(row, strings_as_messages, *formats.conversation(pair))
        row = {**row, "prompt": prompt, "completion": completion}
    how = (tokenizer, max_length, max_new_tokens, strings_as_messages)
    values = prompt_row(row, *how)
    if teacher_names:
        fits = row.get("teacher") in teacher_names
        formats.refuse_unless(fits, {"teacher": None, **row}, "teacher", " or ".join(teacher_names))
        values["teacher"] = row["teacher"]
    prompts = [row["prompt"], row["prompt"]]  # the student's and the teacher's
    if teacher_prompt is not None:
        formats.require(row, teacher_prompt, expected=f"{teacher_prompt!r} (--teacher_prompt)")
        prompt = row[teacher_prompt]
        if not (isinstance(prompt, str) and isinstance(row["prompt"], str)):
            prompt = formats.question_of(prompt)
        of_teacher = prompt_row({**row, "prompt": prompt, "system": None}, *how)
        values["teacher_prompt_ids"] = of_teacher["prompt_ids"]
        values["reason"] = values["reason"] or of_teacher["reason"]
        prompts[1] = prompt
    if with_completion:
        add_completion(values, prompts, completion, tokenizer, row.get("tools"), max_new_tokens)
    return values


def add_completion(
    values: dict, prompts: list, completion: formats.Text | None, tokenizer, tools, room: int
) -> None:
    """Adds a completion's tokens to a row, of which `room` are kept; none if the row has none.

    They are `completion_ids`, `completion_learned`, which of them the model writes, and what
    precedes them after the student's prompt and the teacher's: `context_ids teacher_context_ids`.
    """
    contexts: list[list[int]] = [[], []]
    answer = chat.Sequence([], [])
    if completion is not None and has_text(completion):
        # Its tokens are the same after both prompts: those that the student would write.
        contexts[1], _, _ = chat.encode_answers(tokenizer, prompts[1], [completion], tools)
        contexts[0], [answer], notes = chat.encode_answers(
            tokenizer, prompts[0], [completion], tools
        )
        values["notes"] += notes
    ids = answer.ids[:room]
    learned = answer.learned[:room]
    if completion is not None and not answer.ids:
        left_out = chat.why_left_out(values["notes"]) or formats.missing_answer(completion)
        values["reason"] = values["reason"] or left_out
    elif ids and not any(learned):
        values["reason"] = values["reason"] or "nothing to learn within max_new_tokens"
    values["completion_ids"] = ids
    values["completion_learned"] = learned
    values["truncated"] = len(answer.ids) > room
    values["context_ids"], values["teacher_context_ids"] = contexts
