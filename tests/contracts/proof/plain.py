"""Loads a saved model as somebody without this repository would, and prints what it found.

    python tests/contracts/proof/plain.py FOLDER START

START is the model that the training began with. What it has besides weights, FOLDER must have, too.
It imports transformers alone (for an adapter, peft too), and prints one JSON object at the end.
"""

import json
import sys
from pathlib import Path

import torch


def load(folder: Path):
    """Returns the model, and what transformers says about its weights."""
    if (folder / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification

        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        if config.get("task_type") == "SEQ_CLS":
            return AutoPeftModelForSequenceClassification.from_pretrained(
                folder, num_labels=1, trust_remote_code=False
            ), {}
        return AutoPeftModelForCausalLM.from_pretrained(folder, trust_remote_code=False), {}
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    is_classifier = "SequenceClassification" in (config.get("architectures") or [""])[0]
    model_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    return model_class.from_pretrained(folder, output_loading_info=True, trust_remote_code=False)


def lost_files(folder: Path, tokenizer, start: Path) -> list[str]:
    """Returns what the start has besides its weights, and the saved model has not.

    Args:
        tokenizer: that of the saved model.
    """
    from transformers import AutoTokenizer

    lost = []
    had_template = bool(AutoTokenizer.from_pretrained(start, trust_remote_code=False).chat_template)
    if had_template and not tokenizer.chat_template:
        lost.append("chat template")
    is_adapter = (folder / "adapter_config.json").is_file()  # peft saves no generation config
    generates = not is_adapter and "CausalLM" in (folder / "config.json").read_text()
    name = "generation_config.json"
    if generates and (start / name).is_file() and not (folder / name).is_file():
        lost.append(name)
    return lost


def main() -> None:
    from transformers import AutoTokenizer

    folder, start = map(Path, sys.argv[1:])
    model, info = load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = torch.tensor([tokenizer("12").input_ids])
    with torch.no_grad():
        output = model.float()(ids).logits
    found = {
        "missing": sorted(info.get("missing_keys", [])),
        "unexpected": sorted(info.get("unexpected_keys", [])),
        "not finite": int((~output.isfinite()).sum()),
        "lost": lost_files(folder, tokenizer, start),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
