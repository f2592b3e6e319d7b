"""Generates by a decoding step with fixed addresses, which a GPU records as a CUDA graph.

Keys and values stay in place, while transformers' own cache copies all of them for each token. A
step of a small model also launches about a thousand kernels, faster than the host can. A recording
launches them all at once. So nothing in a step may depend on the host: what changes is in tensors.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from common import one_line, patched, print_once
from preference_recipes.rollouts import sharing
from preference_recipes.rollouts.context import SamplingContext

# The argument of models and `generate` that takes the cache: transformers 5.24 renamed it.
IS_RENAMED = "cache" in GenerateDecoderOnlyOutput.__annotations__
CACHE_ARGUMENT = "cache" if IS_RENAMED else "past_key_values"
# A recorded step reads a multiple of so many slots of the cache; each has its own recording.
SLOTS = 128
RECORDED_ON = {"cuda"}
# Model types that copy a number from the host to the GPU in each step, as of transformers 5.23.
READ_HOST = ("falcon", "phimoe")


def has_fixed_step(context: SamplingContext, cache: DynamicCache) -> bool:
    """Whether this model can take such steps; otherwise transformers' `generate` is called.

    Other models read something on the host, or keep more than each token's keys and values.
    """
    model = context.unwrapped.model
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        all(type(layer) is DynamicLayer for layer in cache.layers)  # and no subclass of it
        and model._can_compile_fullgraph
        and config._attn_implementation == "sdpa"
        and rope.get("rope_type") not in ("dynamic", "longrope")
        and config.model_type not in READ_HOST
        and all(weight.ndim < 3 for weight in model.parameters())  # stacked experts read the host
        and not any(isinstance(module, FSDPModule) for module in model.modules())
    )


def with_slots(tensor: torch.Tensor, step: Step) -> torch.Tensor:
    """Returns keys or values with slots for all tokens to come."""
    _, heads, _, head_size = tensor.shape
    roomy = tensor.new_empty(step.rows, heads, step.mask.shape[-1], head_size)
    if step.prompts is None:
        roomy[:, :, : step.read] = tensor
    if step.is_recorded:  # it also reads masked slots, which must hold numbers
        roomy[:, :, step.read :] = 0
    return roomy


class FixedLayer(DynamicLayer):
    """A layer of the cache whose keys and values `[rows, heads, slots, head size]` never move.

    `layer` has those of the tokens read so far.
    """

    def __init__(self, layer: DynamicLayer, step: Step):
        super().__init__()
        self.step = weakref.proxy(step)  # a reference cycle would keep the cache from being freed
        self.is_initialized = True
        if step.prompts is not None:
            self.prompt_keys = layer.keys.transpose(2, 3).contiguous()  # multiplies faster
            self.prompt_values = layer.values
        self.keys = with_slots(layer.keys, step)
        self.values = with_slots(layer.values, step)

    def update(self, key_states, value_states, *args, **kwargs):
        rows = slice(self.step.rows)
        # Under autocast, rotary keys are fp32 and so are the values read before; new ones are not.
        self.keys[rows, :, self.step.slot] = key_states.to(self.keys.dtype)
        self.values[rows, :, self.step.slot] = value_states.to(self.values.dtype)
        visible = slice(self.step.visible)
        keys = self.keys[rows, :, visible]
        keys.layer = self  # for `sharing.attend`
        return keys, self.values[rows, :, visible]

    def get_seq_length(self) -> int:
        return self.step.visible - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.step.visible, 0


class Step:
    """One more token for each row. Calling it is what a GPU records.

    Args:
        batch: see `generation.Batch`, with one new token. Its cache, for all but each row's last
            token, becomes the step's own.
        prompts: the shared prompts of a batch from `sharing.share`, which has no new token.

    Attributes:
        read: tokens of a row in the cache so far; a plain number.
        rows, visible: how many rows are computed, the first of each tensor, and how many slots of
            the cache they read. Plain numbers: when they change, a step is recorded anew.
        token, position: `[rows, 1]`, the newest token and its position.
        slot, n_drawn: `[1]`, where the keys of the newest token go, and how many were drawn.
        mask: bool `[rows, 1, 1, slots]`, which slots a row attends to.
        drawn: `[rows, max_new_tokens]`, the tokens. `token_sampler` has their log-probs.
    """

    def __init__(self, batch, max_new_tokens: int, prompts=None):
        ids = batch.ids
        device = ids.device
        self.model = batch.context.unwrapped.model
        # Layers may hold another config than the model, whose config `disable_dropout` copies.
        parts = self.model.get_decoder().modules()
        configs = {id(part.config): part.config for part in parts if hasattr(part, "config")}
        config = self.model.config.get_text_config()
        configs[id(config)] = config
        name = "sdpa" if prompts is None else sharing.ATTENTION
        # GPT-2 looks for padding where there is no mask, for which the host would wait for a GPU.
        no_warning = (PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None)
        self.changes: list[tuple[Any, str, Any]] = [no_warning]
        self.changes += [(config, "_attn_implementation", name) for config in configs.values()]
        token_ids = batch.context.tokens_without_probability()
        self.never_drawn = torch.tensor(token_ids, dtype=torch.long, device=device)
        self.token_sampler = batch.token_sampler
        self.prompts = prompts
        self.rows = len(ids)
        self.read = ids.shape[1] - 1
        self.visible = self.read
        self.is_recorded = device.type in RECORDED_ON
        padding_of_row = torch.from_numpy(batch.padding).to(device)[:, None]
        self.token = ids[:, -1:].clone()
        self.position = self.read - padding_of_row
        self.slot = torch.tensor([self.read], device=device)
        n_drawn = 1 if prompts is None else 0
        self.n_drawn = torch.tensor([n_drawn], device=device)
        slot = torch.arange(self.n_slots(self.read + max_new_tokens - n_drawn), device=device)
        self.mask = ((slot >= padding_of_row) & (slot < self.read))[:, None, None]
        # Without a mask torch has a faster attention; `sharing.attend` has masks of its own.
        self.is_masked = prompts is None and (self.is_recorded or bool(batch.padding.any()))
        self.drawn = ids.new_zeros(self.rows, max_new_tokens)
        self.drawn[:, :1] = self.token  # replaced by the first draw if none is drawn yet
        self.cache = batch.cache
        for index, layer in enumerate(self.cache.layers):  # one by one: two caches might not fit
            self.cache.layers[index] = FixedLayer(layer, self)

    def n_slots(self, tokens: int) -> int:
        """Returns how many slots a step reads when the cache holds this many tokens."""
        return math.ceil(tokens / SLOTS) * SLOTS if self.is_recorded else tokens

    def __call__(self) -> None:
        rows = slice(self.rows)
        token = self.token[rows]
        mask = self.mask[rows]
        mask.index_fill_(3, self.slot, True)
        with patched(*self.changes):
            output = self.model(
                input_ids=token,
                position_ids=self.position[rows],
                attention_mask=mask[..., : self.visible] if self.is_masked else None,
                use_cache=True,
                logits_to_keep=1,
                **{CACHE_ARGUMENT: self.cache},
            )
        if self.prompts is not None and not self.prompts.were_read:
            raise sharing.CannotShare
        scores = output.logits[:, -1].float()
        scores.index_fill_(1, self.never_drawn, -torch.inf)
        if self.token_sampler is None:
            new = scores.argmax(-1, keepdim=True)
        else:
            uniform = self.token_sampler.uniforms[rows].index_select(1, self.n_drawn)
            new, logps = self.token_sampler.draw(scores, uniform)
            self.token_sampler.logps[rows].index_copy_(1, self.n_drawn, logps)
        self.drawn[rows].index_copy_(1, self.n_drawn, new)
        token.copy_(new)
        self.position[rows].add_(1)
        self.slot.add_(1)
        self.n_drawn.add_(1)

    def keep(self, rows: list[int]) -> None:
        """Moves these rows to the front; the others are no longer computed."""
        index = torch.tensor(rows, device=self.token.device)
        tensors = [self.token, self.position, self.mask, self.drawn]
        if self.token_sampler is not None:
            tensors += [self.token_sampler.uniforms, self.token_sampler.logps]
        for layer in self.cache.layers:  # later slots are not written yet
            tensors += [layer.keys[:, :, : self.visible], layer.values[:, :, : self.visible]]
        for tensor in tensors:
            tensor[: len(rows)] = tensor[index]
        self.rows = len(rows)
        if self.prompts is not None:
            self.prompts.keep(rows, self.cache.layers)


class Decoder:
    """A batch of rows that is continued by steps, as `generation.Batch` is by `generate`.

    A GPU has a recording for each number of rows and of visible slots.
    """

    stream = None  # all steps are recorded on it
    drops_at = 0.25  # dropping rows copies the cache, and needs new recordings

    def __init__(self, step: Step):
        self.step = step
        self.keep = step.keep
        self.n_tokens = int(step.n_drawn)  # new tokens of each row so far
        self.tokens_at_once = 4
        if step.is_recorded:
            self.tokens_at_once = 16  # reading them makes the host wait
            self.replays: dict[tuple[int, int], Callable[[], None]] = {}
            Decoder.stream = Decoder.stream or torch.cuda.Stream()  # cuBLAS keeps memory for each
            self.pool = torch.cuda.graph_pool_handle()  # recordings never run at the same time

    @property
    def drawn(self) -> torch.Tensor:
        """See `generation.Batch.drawn`."""
        return self.step.drawn[: self.step.rows, : self.n_tokens]

    def advance(self, n_tokens: int) -> None:
        """See `generation.Batch.advance`."""
        step = self.step
        while self.n_tokens < n_tokens:
            step.visible = step.n_slots(step.read + 1)
            if step.is_recorded:
                self.replay()
            else:
                step()
            step.read += 1
            self.n_tokens += 1

    def replay(self) -> None:
        """Takes a step by its recording, which is made on first use."""
        shape = (self.step.rows, self.step.visible)
        if shape in self.replays:
            self.replays[shape]()
            return
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):  # unlike torch's, left if a recording fails
            # The first step of a shape is not recorded, because libraries set themselves up in it.
            self.step()
            try:
                # Other threads, such as a reward function's, may use the GPU meanwhile.
                with torch.cuda.graph(graph, self.pool, stream, capture_error_mode="thread_local"):
                    self.step()  # recorded, not run
                self.replays[shape] = graph.replay
            except RuntimeError as error:
                print_once(f"NOTE: decoding is not recorded, so it is slower: {one_line(error)}")
                self.step.is_recorded = False
                RECORDED_ON.clear()  # do not try again
        torch.cuda.current_stream().wait_stream(stream)
