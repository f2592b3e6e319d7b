"""The model and the rows that benchmarks/audit.py gives to every program: tiny, and the same for all."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

MODEL = Path(__file__).resolve().parents[2] / "assets/model"
DROPOUT = 0.1


class Inputs(NamedTuple):
    """Folders of models and files of rows.

    Attributes:
        model: fp32, without dropout.
        dropout_model: the same weights; its attention has dropout.
        scorer: fp32, with a head of one output.
        rows: by work and number of rows, such as `rows["dpo", 16]`.
    """

    model: Path
    dropout_model: Path
    scorer: Path
    dropout_scorer: Path
    rows: dict[tuple[str, int], Path]

    def model_for(self, work: str, dropout: bool) -> Path:
        """Returns the model that a work starts from."""
        if work == "reward":
            return self.dropout_scorer if dropout else self.scorer
        return self.dropout_model if dropout else self.model


def make(folder: Path, sizes: dict[str, list[int]]) -> Inputs:
    """Writes models and rows below a folder.

    Args:
        sizes: for each work the numbers of rows that are wanted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folders = {}
    for name, auto_class, settings in (
        ("model", AutoModelForCausalLM, {}),
        ("scorer", AutoModelForSequenceClassification, {"num_labels": 1}),
    ):
        for dropout in (0.0, DROPOUT):
            path = folder / (f"{name}-dropout" if dropout else name)
            torch.manual_seed(0)
            model = auto_class.from_pretrained(MODEL, dtype=torch.float32, **settings)
            model.config.attention_dropout = dropout
            if name == "scorer":
                size = model.config.hidden_size
                head = [math.cos(n) / math.sqrt(size) for n in range(size)]
                model.score.weight.data[0] = torch.tensor(head)
            model.save_pretrained(path)
            AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)
            folders[path.name] = path
    rows = {}
    for work, numbers in sizes.items():
        for number in numbers:
            path = folder / f"{work}-{number}.jsonl"
            lines = [json.dumps(row) + "\n" for row in rows_of(work, number)]
            path.write_text("".join(lines), encoding="utf-8")
            rows[work, number] = path
    return Inputs(
        model=folders["model"],
        dropout_model=folders["model-dropout"],
        scorer=folders["scorer"],
        dropout_scorer=folders["scorer-dropout"],
        rows=rows,
    )


def rows_of(work: str, number: int) -> list[dict]:
    """Sums whose prompts and answers are of very unlike lengths, so that no mean of means is exact."""
    found = []
    for n in range(number):
        first, second = n * 7 % 50, n * 11 % 40
        right = f"{first + second:03}"
        wrong = f"{first + second + 1 + n % 5:03}"
        prompt = "+".join([f"{first}", f"{second}"] * (1 + n % 4)) + "="
        long = right * (1 + n * n % 9)  # of 3 to 24 digits
        other_length = wrong * (1 + (n * 5 + 3) % 7)
        messages = [{"role": "user", "content": prompt}]
        say = lambda text: [{"role": "assistant", "content": text}]
        if work == "sft":
            found.append({"prompt": messages, "completion": say(long)})
        elif work in ("dpo", "reward"):
            found.append({"prompt": messages, "chosen": say(long), "rejected": say(other_length)})
        elif work == "kto":
            # One of three is good, and the good ones are not evenly spread.
            good = n % 3 == 0 or n in (1, 2)
            text = long if good else other_length
            found.append({"prompt": messages, "completion": say(text), "label": good})
        else:  # grpo, rloo
            found.append({"prompt": messages})
    return found
