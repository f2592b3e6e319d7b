"""Greedy answers to held-out prompts, under every strategy."""

import contextlib

import numpy as np
import torch
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig

from .launch import zero_stage
from .models import reshard
from .windows import arrange, pad


@contextlib.contextmanager
def whole_weights(accelerator, prepared):
    """Holds the whole weights on every rank, so that each generates alone, at its own pace.

    Under ZeRO-3 it gathers them and takes the engine's hooks off, which would gather and release again at every token;
    both are undone whatever happens in the block. Under FSDP2 it unshards. Elsewhere it does nothing.
    """
    if zero_stage(accelerator) == 3:
        import deepspeed

        offload = prepared.optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(list(prepared.module.parameters())):
            offload._remove_module_hooks()
            try:
                yield
            finally:
                offload.forward_hooks, offload.backward_hooks = [], []
                offload.setup_zero_stage3_hooks()
    elif accelerator.distributed_type == DistributedType.FSDP:
        shards = [module for module in prepared.modules() if isinstance(module, FSDPModule)]
        for module in shards:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in shards:
                module.set_reshard_after_forward(True, recurse=False)
            reshard(prepared)
    else:
        yield


@torch.no_grad()
def greedy_answers(
    accelerator, prepared, model, tokenizer, prompts: list[list[int]], batch_size: int, max_new_tokens: int
) -> dict[int, str]:
    """Greedy answers of this process's share of the prompts, decoded without special tokens.

    Args:
        prepared, model: what `accelerator.prepare` returned, and the `transformers` model inside it.
        prompts: token ids, the same list on every rank.

    Returns:
        prompt number -> answer. Over all processes each prompt occurs once.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    stops = {tokenizer.eos_token_id} | set(np.atleast_1d(model.generation_config.eos_token_id or []).tolist())
    settings = GenerationConfig(  # said in full: what is left out would be taken from the model's own generation config
        do_sample=False, num_beams=1, repetition_penalty=1.0, no_repeat_ngram_size=0, max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=sorted(stops),
    )  # fmt: skip
    answers = {}
    training = prepared.training
    prepared.eval()
    with whole_weights(accelerator, prepared):
        share = arrange(np.arange(len(prompts)), lengths, batch_size, accelerator.num_processes, accelerator.process_index)
        for rows, weights in share:
            rows = [row for row, weight in zip(rows, weights) if weight]
            if not rows:
                continue
            ids = pad([prompts[row] for row in rows], tokenizer.pad_token_id, accelerator.device, left=True)
            mask = pad([[1] * len(prompts[row]) for row in rows], 0, accelerator.device, left=True)
            with accelerator.autocast():
                out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings, synced_gpus=False)
            texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
            answers.update(zip(rows, texts))
    prepared.train(training)
    return answers


def final_answer(text: str) -> str:
    """What is compared for an exact match: the text after the last `####` (GSM8K's mark), else all of it."""
    return text.split("####")[-1].strip()


def exact_match(accelerator, prepared, model, tokenizer, dataset, batch_size: int, max_new_tokens: int) -> tuple[torch.Tensor, list[str]]:  # fmt: skip
    """Greedy answers to a data set's prompts against its column `answer`.

    Returns:
        for this process's share of the rows 1.0 where the final answer is right, and a few of the answers to show.
    """
    answered = [row for row, answer in enumerate(dataset["answer"][:]) if answer]  # "" where a row has none
    rows = dataset.select_columns(["prompt_ids", "answer"])[answered]
    answers = greedy_answers(accelerator, prepared, model, tokenizer, rows["prompt_ids"], batch_size, max_new_tokens)
    right = {row: final_answer(text) == final_answer(str(rows["answer"][row])) for row, text in answers.items()}
    samples = []
    for row in sorted(answers)[:4]:
        prompt = " ".join(tokenizer.decode(rows["prompt_ids"][row], skip_special_tokens=True).split())
        samples.append(f"{'right' if right[row] else 'wrong'}: {prompt[-80:]!r} -> {answers[row][-80:]!r}")
    return torch.tensor([right[row] for row in sorted(right)], dtype=torch.float32, device=accelerator.device), samples
