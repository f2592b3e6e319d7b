"""The worker of a real vLLM server, which a test can make lose weights on their way."""

import shutil
from pathlib import Path

import torch

from preference_recipes.rollouts.vllm_worker import Weights


class Faulty(Weights):
    """Attributes:
    fault: what happens to the next weights: `drop`, `delay`, `corrupt`; an empty string: nothing.
    """

    fault = ""

    def set_fault(self, fault: str) -> None:
        self.fault = fault

    def load(self, folder: str) -> None:
        kept = Path(folder).parent / "kept"
        if self.fault == "drop":
            return
        if self.fault == "delay" and kept.exists():
            super().load(str(kept))
            shutil.rmtree(kept)
        else:
            super().load(folder)
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        if self.fault == "corrupt":
            model = self.model_runner.get_model()
            with torch.no_grad():
                model.model.layers[1].post_attention_layernorm.weight.zero_()
