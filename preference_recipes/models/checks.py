"""Trials before training: whether a model's log-probs are right, and whether prompts are shared."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from common import engine, refuse
from preference_recipes.models import architecture, prepare
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer


@torch.no_grad()
def check_logprobs(accelerator: Accelerator, model: nn.Module) -> None:
    """Compares a prepared model's log-probs with its own logits. All processes must call it."""
    batch = Packer(accelerator.device).make_batch([[0]], [list(range(1, 16))])
    with prepare.evaluation_mode(model):
        output = model(batch, check=True)
    refuse_difference(accelerator, model, output["logps"], output["own_logps"])


def refuse_difference(accelerator, model: nn.Module, logps, own_logps, where: str = "") -> None:
    """Ends the run if our log-probs are not those of a model's own logits."""
    differences = (logps - own_logps).abs()
    # The median ignores outliers: half precision may round a single logit the other way, and a
    # router near a tie may choose another expert.
    median = differences.median().item()
    largest_logp = own_logps.abs().max().item()
    tolerance = 1e-2 if engine.half_precision(accelerator) else 1e-5
    if not median <= tolerance * (1 + largest_logp):  # NaN must fail, too
        [whole_model, *_] = architecture.whole_models(model).values()
        problem = f"its head's log-probs differ from its own logits' by {median:.3g}"
        reason = "it is not supported yet, or its weights are not finite"
        refuse(f"{whole_model.config.name_or_path}{where}: {problem}: {reason}")


def make_packer(accelerator: Accelerator, args, models: list, processor: Any = None) -> Packer:
    """Checks the models, and returns the packer of their batches. All processes must call it.

    With `--share_prompts` it shares prompts, unless that would change log-probs of a model.

    Args:
        models: the trained one first; None is left out.
        processor: see `Data.processor`.
    """
    readers = [model for model in models if model is not None]
    if isinstance(engine.unwrapped(accelerator, readers[0]), LogProbModel):
        check_logprobs(accelerator, readers[0])
    share = getattr(args, "share_prompts", False)  # SFT reads no prompt twice
    example = None
    if processor is not None:
        from preference_recipes.data import images  # only here: text needs none
        from preference_recipes.models import vision

        for model in readers:
            with prepare.evaluation_mode(model):
                logps, own_logps = vision.trial(accelerator, model, processor)
            refuse_difference(accelerator, model, logps, own_logps, ", with images")
        if accelerator.num_processes > 1:
            example = vision.example(processor)
        # Such architectures derive positions or masks from the types of tokens.
        share = share and images.types_name(processor) is None
    share = share and all(can_share(accelerator, model, args.max_length) for model in readers)
    groups = (architecture.whole_models(reader).values() for reader in readers)
    width = max(model.config.get_text_config().hidden_size for group in groups for model in group)
    return Packer(accelerator.device, share, width, processor, example)


@torch.no_grad()
def can_share(accelerator: Accelerator, prepared: nn.Module, max_length: int) -> bool:
    """Whether a model reads several answers in one row as it reads each alone.

    Unusual attention or positions and recurrent layers prevent that.
    """
    # Whole models only: a part, such as a vision tower, has another config.
    for model in architecture.whole_models(prepared).values():
        config = model.config.get_text_config()
        windows = [
            getattr(config, name, None) or max_length
            for name in ("sliding_window", "attention_chunk_size", "index_topk")
        ]
        takes_masks = config._attn_implementation == "sdpa" and not getattr(config, "alibi", False)
        if min(windows) < max_length or not takes_masks:
            return False

    ids = list(range(40))  # all different, so that attention to a wrong token shows
    prompts = [ids[:16], ids[:16], ids[:8], ids[3:9]]
    other_answers = [ids[20:32], ids[8:12], ids[2:6]]

    def outputs_of(first_answer: list[int], share: bool) -> torch.Tensor:
        packer = Packer(accelerator.device, share)
        output = prepared(packer.make_batch(prompts, [first_answer, *other_answers]))
        if isinstance(output, dict):
            return torch.stack(list(output.values()), 1)
        return output

    with prepare.evaluation_mode(prepared):
        unshared = outputs_of(ids[16:24], share=False)
        shared = outputs_of(ids[16:24], share=True)
        with_other_first = outputs_of(ids[32:], share=True)
    if (unshared - shared).abs().mean() > 0.01 * (1 + unshared.abs().max()):
        return False
    # Another first answer must not change the others by a single bit: a leak may be small.
    return shared[1:].equal(with_other_first[1:])
