"""Writes what was asked and answered in evaluations and rollouts, and shows some of it.

An example is a dict: `source` (`eval`, `eval/<name>` or `rollout`), `row` (its number in the data,
from 1), `prompt`, `response`, and what is known of the response: `right` and the right `answer`,
`score`, `rewards`.
"""

import json
import textwrap
from pathlib import Path

FILE = "samples.jsonl"


def write(output_dir: Path, global_step: int, examples: list[dict]) -> None:
    """Appends examples to `samples.jsonl`, a JSON object a line.

    Args:
        global_step: updates that the model had made when it answered.
    """
    lines = [
        json.dumps({"global_step": global_step, **example}, ensure_ascii=False) + "\n"
        for example in examples
    ]
    with open(output_dir / FILE, "a", encoding="utf-8") as file:
        file.writelines(lines)


def first_of_each(examples: list[dict], most: int) -> list[dict]:
    """Returns the first examples of each source, `most` of each."""
    by_source: dict[str, list[dict]] = {}
    for example in examples:
        by_source.setdefault(example["source"], []).append(example)
    return [example for own in by_source.values() for example in own[:most]]


def on_console(examples: list[dict]) -> list[str]:
    """Returns a line for each of the first examples, with the ends of its prompt and response."""
    lines = []
    for example in first_of_each(examples, most=4):
        prompt = example["prompt"][-80:]
        response = example["response"][-80:]
        lines.append(f"  {verdict(example)}: {prompt!r} -> {response!r}")
    return lines


def as_markdown(examples: list[dict]) -> str:
    """Returns the first examples as Markdown, each prompt and response as an indented block.

    What is indented is shown as it is: `2*3*4` shows its stars, and no image is fetched from an
    address that a model wrote.
    """
    parts = []
    for example in first_of_each(examples, most=8):
        parts.append(f"{example['source']}, row {example['row']}:")
        parts.append(indented(example["prompt"]))
        parts.append(f"{verdict(example)}:")
        parts.append(indented(example["response"]))
    return "\n\n".join(parts)


def indented(text: str) -> str:
    """Returns a text with every line indented: also those of blanks, such as U+2028."""
    return textwrap.indent(text, "    ", predicate=lambda line: True)


def verdict(example: dict) -> str:
    """Returns what is known of a response, such as `wrong (right: '25')` or `score 0.25`."""
    if "score" in example:
        score = example["score"]
        return "failed" if score is None else f"score {score:.4g}"
    if "right" in example:
        # An answer may be a whole solution that ends with it.
        return "right" if example["right"] else f"wrong (right: {example['answer'][-40:]!r})"
    return "drawn" if example["source"] == "rollout" else "answered"
