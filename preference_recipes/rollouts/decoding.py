"""Generation by a decoding step of fixed addresses, which a GPU records as a CUDA graph.

Keys and values stay where they are: transformers' own cache copies all of them for each token. A
step of a small model also launches about a thousand kernels, and the host is slower at that than a
GPU. A recording has all of them in one launch. So nothing in a step may depend on the host: what
changes from token to token is in tensors.
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

# What models and `generate` call the cache that they take: transformers 5.24 renamed it.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__annotations__ else "past_key_values"
# A recorded step reads a multiple of so many places of the cache; each has its own recording.
PLACES = 128
RECORDED_ON = {"cuda"}
# With transformers 5.23 these copy a number of the host to the GPU in each step.
READ_HOST = ("falcon", "phimoe")


def has_fixed_step(context: SamplingContext, cache: DynamicCache) -> bool:
    """Whether this model can take such steps; else transformers' `generate` is called.

    Others read something on the host, or keep more than keys and values of each token.
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


def with_room(tensor: torch.Tensor, step: Step) -> torch.Tensor:
    """Returns keys or values with room for those of all tokens to come."""
    _, heads, _, head_size = tensor.shape
    roomy = tensor.new_empty(step.rows, heads, step.mask.shape[-1], head_size)
    if step.prompts is None:
        roomy[:, :, : step.read] = tensor
    if step.is_recorded:  # it reads more places; what is masked must be a number, too
        roomy[:, :, step.read :] = 0
    return roomy


class FixedLayer(DynamicLayer):
    """A layer of the cache whose keys and values `[rows, heads, places, head size]` never move.

    `read` is the layer that has those of the tokens read so far.
    """

    def __init__(self, read: DynamicLayer, step: Step):
        super().__init__()
        self.step = weakref.proxy(step)  # it holds this layer: in a circle, no cache would be freed
        self.is_initialized = True
        if step.prompts is not None:
            self.prompt_keys = read.keys.transpose(2, 3).contiguous()  # faster to be multiplied by
            self.prompt_values = read.values
        self.keys = with_room(read.keys, step)
        self.values = with_room(read.values, step)

    def update(self, key_states, value_states, *args, **kwargs):
        rows = slice(self.step.rows)
        # Under autocast rotary keys are fp32, and so the values that were read; new ones are not.
        self.keys[rows].index_copy_(2, self.step.place, key_states.to(self.keys.dtype))
        self.values[rows].index_copy_(2, self.step.place, value_states.to(self.values.dtype))
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
        batch: see `generation.Batch`, with one new token. Its cache, of all but each row's last
            token, becomes the step's own.
        prompts: those of a batch from `sharing.share`, which has no new token.

    Attributes:
        read: tokens of a row in the cache so far; a plain number.
        rows, visible: rows that are computed, the first of each tensor, and places of the cache
            that they read. Plain numbers: for others a step is recorded anew.
        token, position: `[rows, 1]`, the newest token and its position.
        place, n_drawn: `[1]`, where the keys of the newest token go, and how many were drawn.
        mask: bool `[rows, 1, 1, places]`, which places a row attends to.
        drawn: `[rows, max_new_tokens]`, the tokens. Their log-probs are in `draw`.
    """

    def __init__(self, batch, max_new_tokens: int, prompts=None):
        ids = batch.ids
        device = ids.device
        self.model = batch.context.unwrapped.model
        # Layers may hold another config than the model, which `prepare.disable_dropout` copies.
        parts = self.model.get_decoder().modules()
        configs = {id(part.config): part.config for part in parts if hasattr(part, "config")}
        config = self.model.config.get_text_config()
        configs[id(config)] = config
        name = "sdpa" if prompts is None else sharing.ATTENTION
        # GPT-2's looks at tokens where there is no mask, so that the host would wait for a GPU.
        silent = (PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None)
        self.changes: list[tuple[Any, str, Any]] = [silent]
        self.changes += [(config, "_attn_implementation", name) for config in configs.values()]
        never = batch.context.tokens_without_probability()
        self.never_drawn = torch.tensor(never, dtype=torch.long, device=device)
        self.draw = batch.draw
        self.prompts = prompts
        self.rows = len(ids)
        self.read = ids.shape[1] - 1
        self.visible = self.read
        self.is_recorded = device.type in RECORDED_ON
        padding_of_row = torch.from_numpy(batch.padding).to(device)[:, None]
        self.token = ids[:, -1:].clone()
        self.position = self.read - padding_of_row
        self.place = torch.tensor([self.read], device=device)
        n_drawn = 1 if prompts is None else 0
        self.n_drawn = torch.tensor([n_drawn], device=device)
        place = torch.arange(self.places(self.read + max_new_tokens - n_drawn), device=device)
        self.mask = ((place >= padding_of_row) & (place < self.read))[:, None, None]
        # Without it torch has a faster attention; `sharing.attend` has masks of its own.
        self.is_masked = prompts is None and (self.is_recorded or bool(batch.padding.any()))
        self.drawn = ids.new_zeros(self.rows, max_new_tokens)
        self.drawn[:, :1] = self.token  # the first draw replaces it where none is drawn yet
        self.cache = batch.cache
        for number, layer in enumerate(self.cache.layers):  # one by one: both caches may not fit
            self.cache.layers[number] = FixedLayer(layer, self)

    def places(self, tokens: int) -> int:
        """Returns how many places a step reads when the cache holds this many tokens."""
        return math.ceil(tokens / PLACES) * PLACES if self.is_recorded else tokens

    def __call__(self) -> None:
        rows = slice(self.rows)
        token = self.token[rows]
        mask = self.mask[rows]
        mask.index_fill_(3, self.place, True)
        with patched(*self.changes):
            output = self.model(
                input_ids=token,
                position_ids=self.position[rows],
                attention_mask=mask[..., : self.visible] if self.is_masked else None,
                use_cache=True,
                logits_to_keep=1,
                **{CACHE: self.cache},
            )
        if self.prompts is not None and not self.prompts.were_read:
            raise sharing.NotPlain
        scores = output.logits[:, -1].float()
        scores.index_fill_(1, self.never_drawn, -torch.inf)
        if self.draw is None:
            new = scores.argmax(-1, keepdim=True)
        else:
            uniform = self.draw.uniforms[rows].index_select(1, self.n_drawn)
            new, logps = self.draw.tokens(scores, uniform)
            self.draw.logps[rows].index_copy_(1, self.n_drawn, logps)
        self.drawn[rows].index_copy_(1, self.n_drawn, new)
        token.copy_(new)
        self.position[rows].add_(1)
        self.place.add_(1)
        self.n_drawn.add_(1)

    def keep(self, rows: list[int]) -> None:
        """Moves these rows to the front; the others are computed no more."""
        index = torch.tensor(rows, device=self.token.device)
        tensors = [self.token, self.position, self.mask, self.drawn]
        if self.draw is not None:
            tensors += [self.draw.uniforms, self.draw.logps]
        for layer in self.cache.layers:  # what comes later is not written yet
            tensors += [layer.keys[:, :, : self.visible], layer.values[:, :, : self.visible]]
        for tensor in tensors:
            tensor[: len(rows)] = tensor[index]
        self.rows = len(rows)
        if self.prompts is not None:
            self.prompts.keep(rows, self.cache.layers)


class Decoder:
    """A batch of rows that goes on by steps, as `generation.Batch` does by `generate`.

    A GPU has a recording for each number of rows and of visible places.
    """

    stream = None  # on which all of them are recorded
    drops_at = 0.25  # dropping rows copies the cache, and needs new recordings

    def __init__(self, step: Step):
        self.step = step
        self.keep = step.keep
        self.n_tokens = int(step.n_drawn)  # of each row so far
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
            step.visible = step.places(step.read + 1)
            if step.is_recorded:
                self.replay()
            else:
                step()
            step.read += 1
            self.n_tokens += 1

    def replay(self) -> None:
        """Takes a step by its recording, which is made the first time."""
        shape = (self.step.rows, self.step.visible)
        if shape in self.replays:
            self.replays[shape]()
            return
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):  # left also where a recording fails, which torch does not
            # The first step of a shape runs as it is: what a library sets up is not recorded.
            self.step()
            try:
                # Other threads, such as those of reward functions, may use the GPU meanwhile.
                with torch.cuda.graph(graph, self.pool, stream, capture_error_mode="thread_local"):
                    self.step()  # recorded, not run
                self.replays[shape] = graph.replay
            except RuntimeError as error:
                print_once(f"NOTE: decoding is not recorded, so it is slower: {one_line(error)}")
                self.step.is_recorded = False
                RECORDED_ON.clear()  # not tried again
        torch.cuda.current_stream().wait_stream(stream)
