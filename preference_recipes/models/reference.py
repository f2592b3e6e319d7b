"""The policy that another one is held near: frozen weights, or the trained model as it began."""

import torch
from accelerate import Accelerator
from torch import nn

from preference_recipes.models import load, prepare
from preference_recipes.models.logprobs import LogProbModel


class Reference:
    """A frozen copy of the first policy, or a model that is named. With adapters, the policy itself
    with these switched off, unless another is named.

    Attributes:
        model: reads batches as the policy does; None where all its log-probs are precomputed.
        fingerprints: of a model of its own, for the identity of a checkpoint.
    """

    def __init__(self, accelerator: Accelerator, args, tokenizer, model: nn.Module, **settings):
        """Loads what the arguments name. All processes must call it.

        Args:
            model: the trained one, prepared.
            settings: what each of its forward passes gets where it is the reference, such as
                `with_values=False` of PPO's.
        """
        self.model: nn.Module | None
        self.fingerprints: dict[str, str] = {}
        if args.lora_r and args.ref_model_name_or_path is None:
            from preference_recipes.models import lora

            self.model = lora.WithoutAdapters(model, **settings)
            return
        name = args.ref_model_name_or_path or args.model_name_or_path
        wrapper = LogProbModel(load.causal_lm(name, tokenizer, args, frozen=True))
        self.fingerprints["reference model"] = load.fingerprint(accelerator, name, wrapper.config)
        self.model = prepare.frozen(accelerator, wrapper)

    @torch.no_grad()
    def logps(self, batch: dict, temperature: float = 1.0) -> torch.Tensor:
        """Returns the log-prob of each token of the answers, fp32 `[answers, longest]`."""
        return self.model(batch, temperature)["logps"]
