"""TRL's side of benchmarks/peers.py, run by TRL's own virtual environment: one trainer, settings from a JSON file.

    python benchmarks/peers_trl.py SETTINGS.json

SETTINGS: `work` (dpo, sft, reward), `model`, `data` (a .jsonl file in the order to train in), `log`, and `config`, the fields of the trainer's own
config that differ from its defaults. Writes to `log` a JSON line an update, what TRL logs and `perf/seconds`, the time since the line before.
"""

import json
import sys
import time

from datasets import load_dataset
from transformers import TrainerCallback


class Log(TrainerCallback):
    """Times updates from log to log, which leaves nothing of an update out."""

    def __init__(self, path: str):
        self.path = path

    def on_train_begin(self, *_, **__):
        self.since = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" not in logs:  # the summary at the end
            return
        now = time.perf_counter()
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"global_step": state.global_step, **logs, "perf/seconds": now - self.since}) + "\n")
        self.since = now


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        settings = json.load(file)
    # Imported one by one as a user's script does: TRL's own package imports lazily.
    if settings["work"] == "dpo":
        from trl import DPOConfig as Config
        from trl import DPOTrainer as Trainer
    elif settings["work"] == "sft":
        from trl import SFTConfig as Config
        from trl import SFTTrainer as Trainer
    else:
        from trl import RewardConfig as Config
        from trl import RewardTrainer as Trainer
    data = load_dataset("json", data_files=settings["data"], split="train")
    trainer = Trainer(model=settings["model"], args=Config(**settings["config"]), train_dataset=data, callbacks=[Log(settings["log"])])
    trainer.train()


if __name__ == "__main__":
    main()
