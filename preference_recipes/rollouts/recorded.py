"""Generation on a GPU by a decoding step that is recorded once, as a CUDA graph, and replayed.

A decoding step of a small model launches about a thousand kernels, and the host is slower at that
than the GPU. A recording has all of them in one launch. So nothing in a step may depend on the
host: shapes and addresses stay, and what changes from token to token is in tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import DynamicCache, DynamicLayer

from common import in_one_line, print_once
from preference_recipes.rollouts.sampler import Sampler

# A step reads so many places of the cache, or a multiple of it: each multiple is a recording.
PLACES = 128
DEVICES = ("cuda",)  # that can record
# With transformers 5.23 these copy a number of the host to the GPU in each step.
READ_HOST = ("falcon", "phimoe")


def can_record(sampler: Sampler, cache: DynamicCache) -> bool:
    """Whether steps of this model can be recorded; otherwise transformers' `generate` is called.

    The others read something on the host, or keep more than the keys of each token.
    """
    model = sampler.unwrapped.model
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        sampler.accelerator.device.type in DEVICES
        and all(type(layer) is DynamicLayer for layer in cache.layers)  # and no subclass of it
        and model._can_compile_fullgraph
        and config._attn_implementation == "sdpa"
        and rope.get("rope_type") not in ("dynamic", "longrope")
        and config.model_type not in READ_HOST
        and not any(isinstance(module, FSDPModule) for module in model.modules())
    )


def round_up(tokens: int) -> int:
    """Returns a number of places, a multiple of `PLACES`, that holds so many tokens."""
    return math.ceil(tokens / PLACES) * PLACES


class FixedLayer(DynamicLayer):
    """A layer of the cache whose keys and values `[rows, heads, places, head size]` never move.

    Args:
        prompts: the layer that has those of the prompts.
    """

    def __init__(self, prompts: DynamicLayer, step: Step):
        super().__init__()
        self.step = step
        self.is_initialized = True
        # What is masked must be a number, too: 0.
        room = (0, 0, 0, step.mask.shape[-1] - step.read)  # after the prompts' places
        self.keys = torch.nn.functional.pad(prompts.keys, room)
        self.values = torch.nn.functional.pad(prompts.values, room)

    def update(self, key_states, value_states, *args, **kwargs):
        rows = slice(self.step.rows)
        self.keys[rows].index_copy_(2, self.step.place, key_states)
        self.values[rows].index_copy_(2, self.step.place, value_states)
        visible = slice(self.step.visible)
        return self.keys[rows, :, visible], self.values[rows, :, visible]

    def get_seq_length(self) -> int:
        return self.step.visible - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.step.visible, 0


class Step:
    """One more token for each row. Calling it is what is recorded.

    Args:
        batch: see `generation.Batch`. Its cache, of all but each row's last token, becomes the
            step's own.

    Attributes:
        rows, visible: rows that are computed, the first of each tensor, and places of the cache
            that they read. Plain numbers: for others a step is recorded anew.
        token, position: `[rows, 1]`, the newest token and its position.
        place, n_drawn: `[1]`, where the keys of the newest token go, and how many were drawn.
        mask: bool `[rows, 1, 1, places]`, which places a row attends to.
        drawn, logps: `[rows, max_new_tokens]`, the tokens, and the log-prob of each.
    """

    def __init__(self, batch, max_new_tokens: int):
        ids = batch.ids
        device = ids.device
        self.model = batch.sampler.unwrapped.model
        self.vocabulary = batch.sampler.unwrapped.vocabulary
        self.draw = batch.draw
        self.rows, length = ids.shape
        self.read = length - 1  # tokens in the cache when generation begins
        self.visible = 0
        padding_of_row = torch.from_numpy(batch.padding).to(device)[:, None]
        self.token = ids[:, -1:].clone()
        self.position = self.read - padding_of_row
        self.place = torch.tensor([self.read], device=device)
        self.n_drawn = torch.zeros(1, dtype=torch.long, device=device)
        place = torch.arange(round_up(length + max_new_tokens), device=device)
        self.mask = ((place >= padding_of_row) & (place < self.read))[:, None, None]
        self.drawn = ids.new_zeros(self.rows, max_new_tokens)
        self.logps = torch.zeros(self.rows, max_new_tokens, device=device)
        self.uniforms = None if batch.draw is None else batch.draw.uniforms.clone()
        self.cache = batch.cache
        self.cache.layers = [FixedLayer(layer, self) for layer in self.cache.layers]

    def __call__(self) -> None:
        rows = slice(self.rows)
        token = self.token[rows]
        mask = self.mask[rows]
        mask.index_fill_(3, self.place, True)
        output = self.model(
            input_ids=token,
            position_ids=self.position[rows],
            attention_mask=mask[..., : self.visible],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        scores = output.logits[:, -1].float()
        scores[:, self.vocabulary :] = -torch.inf  # see `LogProbModel.vocabulary`
        if self.draw is None:
            new = scores.argmax(-1, keepdim=True)
        else:
            uniform = self.uniforms[rows].index_select(1, self.n_drawn)
            new, logps = self.draw.tokens(scores, uniform)
            self.logps[rows].index_copy_(1, self.n_drawn, logps)
        self.drawn[rows].index_copy_(1, self.n_drawn, new)
        token.copy_(new)
        self.position[rows].add_(1)
        self.place.add_(1)
        self.n_drawn.add_(1)

    def keep(self, rows: list[int]) -> None:
        """Moves these rows to the front; the others are computed no more."""
        index = torch.tensor(rows, device=self.token.device)
        tensors = [self.token, self.position, self.mask, self.drawn, self.logps]
        if self.uniforms is not None:
            tensors.append(self.uniforms)
        for layer in self.cache.layers:
            tensors += [layer.keys, layer.values]
        for tensor in tensors:
            tensor[: len(rows)] = tensor[index]
        self.rows = len(rows)


class Recorder:
    """A batch of rows, see `generation.Batch`, whose steps are recorded and replayed.

    There is a recording for each number of rows and of visible places.
    """

    drops_at = 0.25  # dropping rows needs new recordings

    def __init__(self, step: Step):
        self.step = step
        self.replays: dict[tuple[int, int], Callable[[], None]] = {}
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()  # recordings never run at the same time
        self.n_tokens = 0

    def advance(self, n_new: int) -> tuple[list[list[int]], list[list[float]]]:
        """Adds tokens to each row; returns all so far, and their log-probs. Waits for the GPU."""
        step = self.step
        for _ in range(n_new):
            self.n_tokens += 1
            step.visible = round_up(step.read + self.n_tokens)
            self()
        drawn = step.drawn[: step.rows, : self.n_tokens].tolist()
        if step.draw is None:
            return drawn, [[]] * step.rows
        return drawn, step.logps[: step.rows, : self.n_tokens].tolist()

    def keep(self, rows: list[int]) -> None:
        self.step.keep(rows)

    def __call__(self) -> None:
        shape = (self.step.rows, self.step.visible)
        if shape in self.replays:
            self.replays[shape]()
            return
        # The first step of a shape runs as it is: what a library sets up in it is not recorded.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.step()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as those of reward functions, may use the GPU meanwhile.
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                self.step()  # recorded, not run
        except RuntimeError as error:
            print_once(f"NOTE: decoding is not recorded, so it is slower: {in_one_line(error)}")
            self.replays[shape] = self.step
        else:
            self.replays[shape] = graph.replay
