"""Low-rank adapters (LoRA) by peft: which layers get one, and the model without them.

Hu et al. 2021, arXiv:2106.09685. A linear layer `W` becomes `W + (alpha / r) * B @ A`, where `A` is
`[r, inputs]` and `B` is `[outputs, r]`. Only `A` and `B` are trained. `B` starts at zero, so the
model starts as its base. With a 4-bit base: Dettmers et al. 2023, arXiv:2305.14314 (QLoRA).
"""

from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from common import display, engine, patched, refuse
from common.saving import ADAPTER
from preference_recipes.models import architecture

# peft's name for every linear layer but the output layer.
ALL_LINEAR = "all-linear"


# ============================================================ the adapters
def add_adapters(wrapper: nn.Module, args) -> None:
    """Freezes the models in a module and gives each an adapter, drawn from the seed alone.

    A score head is trained whole, and saved with the adapter.
    """
    import peft

    if args.lora_alpha is None:
        args.lora_alpha = 2.0 * args.lora_r
    seed = torch.initial_seed()
    layers = []
    for index, model in enumerate(architecture.whole_models(wrapper).values()):
        is_scorer = hasattr(model, "score")
        layers_of_model = layers_to_adapt(model, args.lora_target_modules)
        layers += layers_of_model
        config = peft.LoraConfig(
            task_type="SEQ_CLS" if is_scorer else "CAUSAL_LM",
            r=args.lora_r,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            target_modules=layers_of_model,  # peft shortens long lists
            modules_to_save=["score"] if is_scorer else None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + index)
            # This keeps the model's class; a `PeftModel` would wrap it.
            model.add_adapter(config, ADAPTER)
        base = model.config.name_or_path
        if Path(base).is_dir():
            base = str(Path(base).resolve())  # found from any directory
        config.base_model_name_or_path = base
        config.target_modules = sorted(config.target_modules)  # a set would be written in any order
        config.inference_mode = True  # in the saved file: it is loaded for inference
    for module in wrapper.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Otherwise bitsandbytes repacks 4-bit weights in the first evaluation on a CPU.
            module.support_avx512bf16_for_cpu = False
    kinds = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    scale = f"rank {args.lora_r}, alpha {args.lora_alpha:g}"
    display.write(f"adapters of {scale} on {len(layers)} layers: {kinds}")


def layers_to_adapt(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """Returns the names of the layers that get an adapter.

    With `all-linear` these are all linear layers except the output layer, the score head, layers
    that text never reaches, such as a vision tower's, and layers that are not called, such as a
    router. Otherwise `targets` are names of layers or their last parts, such as `q_proj`.
    """
    heads = {id(model.get_output_embeddings()), id(getattr(model, "score", None))}
    unreached = architecture.unreached_parameters(model)
    called = architecture.layers_called(model)
    layers = [
        name
        for name, module in model.named_modules()
        if name in called and id(module) not in heads and f"{name}.weight" not in unreached
    ]
    if targets == [ALL_LINEAR]:
        return layers
    for target in targets:  # peft would ignore a name that it does not find
        if not any(f".{layer}".endswith(f".{target}") for layer in layers):
            kinds = sorted({layer.rpartition(".")[2] for layer in layers})
            problem = f"no linear layer of {type(model).__name__} that could get an adapter"
            refuse(f"--lora_target_modules {target}: {problem}; there are {', '.join(kinds)}")
    return [name for name in layers if any(f".{name}".endswith(f".{target}") for target in targets)]


# ============================================================ the base
class WithoutAdapters(nn.Module):
    """A prepared model with its adapters off: the policy before training, without a second copy.

    Call it under `torch.no_grad`, and not between the policy's forward and backward pass: gradient
    checkpointing runs layers again, adapters on. `settings` are passed to the model's forward.
    """

    def __init__(self, prepared: nn.Module, **settings):
        super().__init__()
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.prepared = prepared
        self.settings = settings
        self.adapted = [layer for layer in prepared.modules() if isinstance(layer, BaseTunerLayer)]

    def forward(self, *args, **kwargs):
        """Returns what the prepared model returns without its adapters."""
        # peft's own switch would also freeze weights, which sharding engines do not expect.
        with patched(*((layer, "_disable_adapters", True) for layer in self.adapted)):
            return self.prepared(*args, **kwargs, **self.settings)


def packed_in_4bit() -> dict:
    """Returns arguments of `from_pretrained` for QLoRA: NormalFloat, and quantized scales."""
    state = AcceleratorState()
    if engine.is_sharded(state):
        refuse("--load_in_4bit: DeepSpeed and FSDP2 cannot shard packed weights: take ddp.yaml")
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=engine.half_precision(state) or torch.float32,
    )
    # Weights are packed on the device that computes: with cpu.yaml the CPU, even if there is a GPU.
    return {"quantization_config": settings, "device_map": {"": str(state.device)}}
