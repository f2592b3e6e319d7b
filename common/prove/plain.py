"""Loads a saved model as somebody without this repository would, and prints what was found.

    python common/prove/plain.py FOLDER

It imports transformers alone (for an adapter, peft too), and prints one JSON object at the end.
"""

import json
import sys
from pathlib import Path

import torch


def load(folder: Path):
    """Returns the model, and what transformers says of its weights."""
    if (folder / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification

        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        if config.get("task_type") == "SEQ_CLS":
            return AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1), {}
        return AutoPeftModelForCausalLM.from_pretrained(folder), {}
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    is_classifier = "SequenceClassification" in (config.get("architectures") or [""])[0]
    model_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    return model_class.from_pretrained(folder, output_loading_info=True)


def main() -> None:
    from transformers import AutoTokenizer

    folder = Path(sys.argv[1])
    model, info = load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("12").input_ids])
    with torch.no_grad():
        output = model.float()(ids).logits
    found = {
        "missing": sorted(info.get("missing_keys", [])),
        "unexpected": sorted(info.get("unexpected_keys", [])),
        "not finite": int((~output.isfinite()).sum()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
