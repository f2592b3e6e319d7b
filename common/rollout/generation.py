"""Responses to prompts."""

import contextlib

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, LogitsProcessor

from common import batches, distributed, engine, zero
from common.data import tokens


@contextlib.contextmanager
def ready_to_generate(accelerator, prepared, model):
    """Holds the whole weights of `model`, inside the prepared one, on every rank, so that each generates alone, at its own pace.

    Under ZeRO-3 it gathers them and takes the engine's hooks off, which would gather and release again at every token; under FSDP2 it
    unshards. The model's own generation config is put away. All is undone whatever happens in the block.
    """
    with contextlib.ExitStack() as undo:  # what is pushed last is undone first
        undo.callback(setattr, model, "generation_config", model.generation_config)
        model.generation_config = (
            GenerationConfig()
        )  # what a call does not say is taken from there: other draws, cuts, caches
        if zero.stage(accelerator) == 3:
            offload = prepared.optimizer.parameter_offload
            undo.enter_context(zero.gathered(list(model.parameters())))
            offload._remove_module_hooks()
            offload.forward_hooks, offload.backward_hooks = [], []
            undo.callback(offload.setup_zero_stage3_hooks)
        elif accelerator.is_fsdp2:
            undo.callback(engine.reshard, prepared)
            undo.callback(prepared.set_reshard_after_forward, True)
            prepared.set_reshard_after_forward(False)
            for module in filter(lambda module: isinstance(module, FSDPModule), prepared.modules()):
                module.unshard()
        yield


class SampleByUniform(LogitsProcessor):
    """Draws each token by a number given in advance: the one where the cumulative probability passes it.

    So a response depends on its prompt, the weights and its own row of numbers; not on any random state, and on the batch and the process
    only as far as rounding does.
    """

    def __init__(self, uniforms: torch.Tensor, prompt_length: int, temperature: float):
        self.uniforms, self.prompt_length, self.temperature = uniforms, prompt_length, temperature

    def __call__(self, input_ids, scores):
        cumulative = (scores.float() / self.temperature).softmax(-1).double().cumsum(-1)
        uniform = self.uniforms[:, input_ids.shape[1] - self.prompt_length, None]
        # The last one where logits are no numbers: whoever scores the response will notice.
        token = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp(
            max=scores.shape[1] - 1
        )
        return torch.full_like(scores, -torch.inf).scatter(
            1, token, 0.0
        )  # all that the greedy choice after it can take


@torch.no_grad()
def generate(
    accelerator,
    prepared,
    model,
    tokenizer,
    prompts,
    batch_size,
    max_new_tokens,
    temperature=0.0,
    uniforms=None,
) -> list:
    """One response to each prompt, up to and including its first stop token; the processes share the work.

    Args:
        prepared, model: in evaluation mode, what `accelerator.prepare` returned, and the `transformers` model inside it.
        prompts: token ids `list[list[int]]`, the same on every rank.
        batch_size: prompts that a process takes at once.
        temperature: 0 is greedy; above it tokens are drawn from the whole vocabulary by
        uniforms: `[prompts, max_new_tokens]` in [0, 1), see `SampleByUniform`.

    Returns:
        token ids in the order of the prompts, on every rank.
    """
    stops, mine = tokens.stop_tokens(tokenizer, model), {}
    # A batch drops its ended rows every few tokens, else it would compute them until the last one ends: where a cache can be picked by row.
    at_once = (
        16 if model._supports_default_dynamic_cache() and not model._is_stateful else max_new_tokens
    )
    settings = GenerationConfig(
        return_dict_in_generate=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(stops),
    )
    share = batches.split(
        accelerator,
        np.arange(len(prompts)),
        np.array([len(prompt) for prompt in prompts]),
        batch_size,
    )
    with ready_to_generate(accelerator, prepared, model), accelerator.autocast():
        for rows in filter(None, ([row for row, weight in zip(*part) if weight] for part in share)):
            ids = batches.pad(
                [prompts[row] for row in rows],
                tokenizer.pad_token_id,
                accelerator.device,
                left=True,
            )
            start, cache = ids.shape[1], None
            while rows:
                padding = torch.tensor(
                    [[start - len(prompts[row])] for row in rows], device=ids.device
                )
                past = {
                    "attention_mask": (
                        torch.arange(ids.shape[1], device=ids.device) >= padding
                    ).long(),
                    "past_key_values": cache,
                }
                settings.max_new_tokens = min(start + max_new_tokens - ids.shape[1], at_once)
                draw = (
                    [
                        SampleByUniform(
                            torch.from_numpy(uniforms[rows]).to(ids.device), start, temperature
                        )
                    ]
                    if temperature
                    else []
                )
                out = model.generate(
                    ids,
                    **past,
                    generation_config=settings,
                    logits_processor=draw,
                    synced_gpus=False,
                )
                for row, response in zip(rows, out.sequences[:, start:].tolist()):
                    mine[row] = response[
                        : next((i for i, token in enumerate(response, 1) if token in stops), None)
                    ]
                going = [
                    i
                    for i, row in enumerate(rows)
                    if mine[row][-1] not in stops and len(mine[row]) < max_new_tokens
                ]
                if 0 < len(going) < len(rows):
                    out.past_key_values.reorder_cache(torch.tensor(going))
                rows, ids, cache = (
                    [rows[i] for i in going],
                    out.sequences[going],
                    out.past_key_values,
                )
            del out, past, cache  # or two caches would be held while the next batch begins
    return distributed.gather_rows(mine)
