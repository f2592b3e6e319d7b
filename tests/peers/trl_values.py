"""What TRL's trainers compute on a few rows: loss, metrics and weights of five updates, as JSON.

    python tests/peers/trl_values.py [OTHER.json]            # needs `pip install -e '.[peers]'`

tests/contracts/test_references.py compares the recipes with trl_values.json. Make it again when the rows or settings
below change, or the embedded model.

TRL's numbers are exact in one process, without dropout, with the samples of an update in one batch, because its metrics
are means of batches. It gets the rows in the order in which a recipe takes them, and must not shuffle.
"""

import json
import math
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

VERSION = "1.16.0"
MODEL = Path(__file__).resolve().parents[2] / "assets/model"
STORED = Path(__file__).with_suffix(".json")

ROWS = 34  # updates of 8, 8, 8, 8 and 2 rows
SETTINGS = dict(
    seed=3,
    train_batch_size=8,
    max_length=64,
    learning_rate=2e-4,
    lr_scheduler_type="linear",
    warmup_steps=1,
    weight_decay=0.1,
    adam_epsilon=1e-6,
    max_grad_norm=1.0,
)
# Each case's recipe, and the settings that it adds.
CASES = {
    "sft": ("sft", {}),
    "reward": ("reward", {"center_coef": 0.05}),
    "dpo sigmoid": ("dpo", {"beta": 0.3, "loss_type": "sigmoid"}),  # TRL has no cDPO
    "dpo robust": ("dpo", {"beta": 0.3, "loss_type": "robust", "label_smoothing": 0.1}),
    "dpo ipo": ("dpo", {"beta": 0.3, "loss_type": "ipo"}),
}
# Settings and tags that TRL calls otherwise.
SETTINGS_OF_TRL = {
    "train_batch_size": "per_device_train_batch_size",
    "center_coef": "center_rewards_coefficient",
}
TAGS_OF_TRL = {"num_tokens": "tokens", "step": "global_step"}


def rows(recipe: str) -> list[dict]:
    """Sums, right and wrong, some after another sum; as the file of a recipe holds them."""
    say = lambda role, content: [{"role": role, "content": content}]
    found = []
    for n in range(ROWS):
        first, second = n * 7 % 50, n * 11 % 40
        right = f"{first + second:03}"
        wrong = f"{first + second + 1 + n % 5:03}" * (1 + n % 3)  # of 3 to 9 digits
        prompt = say("user", f"{first}+{second}=")
        if n % 3 == 0:
            prompt = say("user", f"{n}+1=") + say("assistant", f"{n + 1:03}") + prompt
        if recipe == "sft":
            found.append({"prompt": prompt, "completion": say("assistant", wrong)})
        else:
            pair = {"chosen": say("assistant", right), "rejected": say("assistant", wrong)}
            margin = {"margin": n % 4 / 4} if recipe == "reward" else {}
            found.append({"prompt": prompt, **pair, **margin})
    return found


def load_model(recipe: str, path: Path) -> torch.nn.Module:
    if recipe == "reward":
        auto_class, settings = AutoModelForSequenceClassification, {"num_labels": 1}
    else:
        auto_class, settings = AutoModelForCausalLM, {}
    return auto_class.from_pretrained(path, dtype=torch.float32, **settings)


def save_model(recipe: str, folder: Path) -> Path:
    """The embedded model; for the reward model with a head, none of it random."""
    if recipe != "reward":
        return MODEL
    model = load_model(recipe, MODEL)
    size = model.config.hidden_size
    head = [math.cos(n) / math.sqrt(size) for n in range(size)]
    model.score.weight.data[0] = torch.tensor(head)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def vector(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one fp64 vector, in the order of their names."""
    parts = dict(model.named_parameters())
    return torch.cat([parts[name].detach().double().flatten() for name in sorted(parts)])


def projections(change: torch.Tensor) -> list[float]:
    """The products of a vector with eight random ones, which stand for the whole of it.

    The mean square of such products is, up to chance, the square of the vector's norm. So those of
    two vectors at a distance `d` are about `d` apart.
    """
    generator = np.random.default_rng(0)
    return [float(change.numpy() @ generator.standard_normal(len(change))) for _ in range(8)]


def train(recipe: str, settings: dict, folder: Path) -> dict[str, list[float]]:
    """Trains with TRL. Returns the values of each tag in its log lines, and the weights' change."""
    import datasets
    import trl
    from torch.utils.data import SequentialSampler

    trainer_class, config_class = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
    }[recipe]

    class InOrder(trainer_class):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    settings = SETTINGS | settings
    path = save_model(recipe, folder / "model")
    model = load_model(recipe, path)
    unordered = rows(recipe)
    order = np.random.default_rng([settings["seed"], 0]).permutation(ROWS)  # that of epoch 0
    given = {SETTINGS_OF_TRL.get(tag, tag): value for tag, value in settings.items()}
    quiet = dict(save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1)
    plain = dict(gradient_checkpointing=False, bf16=False, use_cpu=True)
    config = config_class(folder / "run", num_train_epochs=1, **quiet, **plain, **given)
    trainer = InOrder(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_list([unordered[row] for row in order]),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    start = vector(trainer.model)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    values = {TAGS_OF_TRL.get(tag, tag): [line[tag] for line in lines] for tag in lines[0]}
    return values | {"change of the weights": projections(vector(trainer.model) - start)}


def values() -> dict[str, dict[str, list[float]]]:
    import trl

    if trl.__version__ != VERSION:
        sys.exit(f"expected TRL {VERSION}, found {trl.__version__}: pip install -e '.[peers]'")
    found = {}
    for case, (recipe, settings) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found[case] = train(recipe, settings, Path(folder))
    return found


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else STORED
    output.write_text(json.dumps(values(), indent=1) + "\n")
