"""Generates responses to prompts, on all processes together."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, LogitsProcessor
from transformers.cache_utils import DynamicCache

from common import batches, distributed, engine
from preference_recipes.models import architecture, prepare
from preference_recipes.rollouts import decoding, sharing
from preference_recipes.rollouts.context import Response, SamplingContext

# Memory for keys and values of the responses generated at once, if `--generate_batch_size` is 0.
CACHE_BYTES = 16 * 2**30
# Model types that give other tokens in a batch than alone, as of transformers 5.23. GPT-Neo's mask
# ends at its last position, padding counted.
UNBATCHABLE = ("recurrent_gemma", "minimax", "rwkv", "gpt_neo")


def generate(
    context: SamplingContext,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    batch_size: int = 0,
    temperature: float = 0.0,
    uniforms: np.ndarray | None = None,
    images: Sequence[list[bytes]] = (),
) -> list[Response]:
    """Generates one response to each prompt, up to and including its first stop token.

    The processes share the work, and each gets all responses. All processes must call it.
    Temperature 0 is greedy. Above it, `uniforms` `[prompts, max_new_tokens]` decide, see
    `SampleByUniform`. `images` are the files of each prompt, if any prompt has some.
    """
    batch_size = responses_at_once(context, prompts, max_new_tokens, batch_size)
    lengths = np.array([len(prompt) for prompt in prompts])
    micro_batches = batches.split(context.accelerator, np.arange(len(prompts)), lengths, batch_size)
    responses: dict[int, Response] = {}
    with ready_to_generate(context):
        for indices, sample_weights in micro_batches:
            if sample_weights.any():  # there may be fewer prompts than processes
                responses |= generate_some(
                    context, prompts, indices, max_new_tokens, temperature, uniforms, images
                )
    return distributed.gather_by_index(responses)


def generate_some(
    context: SamplingContext,
    prompts: list[list[int]],
    indices: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    uniforms: np.ndarray | None,
    images: Sequence[list[bytes]] = (),
) -> Iterator[tuple[int, Response]]:
    """Yields the index of each of these prompts with its response, as soon as that has ended.

    They form one batch, on this process only. Finished rows are dropped from time to time.
    """
    stops = torch.tensor(sorted(context.stop_tokens()), device=context.accelerator.device)
    token_sampler = None  # greedy
    if temperature:
        draws = torch.from_numpy(uniforms[indices]).to(context.accelerator.device)
        token_sampler = SampleByUniform(draws, temperature)
    files = [file for index in indices for file in images[index]] if images else []
    row_prompts = [prompts[index] for index in indices]
    batch = begin(context, row_prompts, max_new_tokens, token_sampler, files)
    limit = architecture.longest_row(context.unwrapped.model)
    # For each row of the batch: its prompt's index, its largest length, and whether it has ended.
    indices = np.array(indices)
    token_budgets = np.array([int(min(max_new_tokens, limit - len(ids))) for ids in row_prompts])
    has_ended = np.zeros(len(indices), dtype=bool)
    n_tokens = 0
    while not has_ended.all():
        n_before = n_tokens
        n_tokens = min(n_tokens + batch.tokens_at_once, int(token_budgets.min()))
        batch.advance(n_tokens)
        drawn = batch.drawn
        # The host reads which new tokens are stops, and a row's tokens once the row has ended.
        is_stop = torch.isin(drawn[:, n_before:], stops).cpu().numpy()
        has_stop = is_stop.any(1)
        ends = np.where(has_stop, n_before + is_stop.argmax(1) + 1, n_tokens)
        is_full = token_budgets == n_tokens
        for row in np.flatnonzero((has_stop | is_full) & ~has_ended):
            logps = token_sampler.logps[row, : ends[row]].tolist() if token_sampler else []
            yield int(indices[row]), Response(drawn[row, : ends[row]].tolist(), logps)
            has_ended[row] = True
        drops = has_ended.any() and has_ended.sum() >= batch.drops_at * len(has_ended)
        if not has_ended.all() and (is_full.any() or drops):
            kept = np.flatnonzero(~has_ended)
            batch.keep(kept.tolist())
            indices, token_budgets = indices[kept], token_budgets[kept]
            has_ended = has_ended[kept]


def begin(
    context: SamplingContext,
    prompts: list[list[int]],
    max_new_tokens: int,
    token_sampler: "SampleByUniform | None",
    files: list[bytes],
) -> "Batch | decoding.Decoder":
    """Returns a batch of these prompts. Its first new tokens may already be drawn."""
    model = context.unwrapped.model
    device = context.accelerator.device
    ids = batches.pad(prompts, context.pad_token(), device, left=True)
    padding = np.array([ids.shape[1] - len(prompt) for prompt in prompts])
    if files:  # a model may keep more of them than a cache of ours holds, such as Qwen's positions
        from preference_recipes.data import images  # only here: text needs none

        processor = context.tokenizer.processor
        pixels = images.inputs_of(processor, ids.cpu().numpy(), files, device)
        return Batch(context, ids, padding, None, token_sampler, pixels)
    if model._is_stateful or not model._supports_default_dynamic_cache():
        return Batch(context, ids, padding, None, token_sampler)
    batch = Batch(context, ids, padding, DynamicCache(config=model.config), token_sampler)
    can_step = decoding.has_fixed_step(context, batch.cache)
    prompt_of_row = group_ids(prompts)
    if ids.shape[1] > 1 and max(prompt_of_row) + 1 < len(prompts):
        read_prompts(batch, prompt_of_row)
        if can_step:
            with contextlib.suppress(sharing.CannotShare):
                return shared_decoder(batch, prompt_of_row, max_new_tokens)
        batch.cache.reorder_cache(torch.tensor(prompt_of_row))  # this repeats rows, too
    if not can_step:
        return batch
    batch.advance(1)
    return decoding.Decoder(decoding.Step(batch, max_new_tokens))


def shared_decoder(batch: "Batch", prompt_of_row: list[int], max_new_tokens: int):
    """Returns a decoder whose rows share prompts, after its first step; may raise `CannotShare`."""
    rows, prompts = sharing.share(batch, prompt_of_row)
    decoder = decoding.Decoder(decoding.Step(rows, max_new_tokens, prompts))
    decoder.advance(1)  # only a step shows what a model's attention does
    return decoder


def group_ids(prompts: list[list[int]]) -> list[int]:
    """Returns each prompt's index among the distinct prompts: 0 0 1 0 for A A B A."""
    ids: dict[tuple, int] = {}
    return [ids.setdefault(tuple(prompt), len(ids)) for prompt in prompts]


def read_prompts(batch: "Batch", prompt_of_row: list[int]) -> None:
    """Fills the cache with the distinct prompts, without the last token of each."""
    _, first_rows = np.unique(prompt_of_row, return_index=True)
    firsts = batch.ids[first_rows, :-1]
    # `generate` also draws a token, which is ignored.
    Batch(batch.context, firsts, batch.padding[first_rows], batch.cache, None).advance(1)


@dataclasses.dataclass
class Batch:
    """Rows that transformers' `generate` continues."""

    context: SamplingContext
    ids: torch.Tensor  # `[rows, tokens]`, padded on the left
    padding: np.ndarray  # `[rows]`, how many tokens of each row are padding
    cache: DynamicCache | None  # for all but each row's last token; None: the model makes its own
    token_sampler: "SampleByUniform | None"  # None: greedy
    images: dict = dataclasses.field(default_factory=dict)  # see `images.inputs_of`
    drops_at = 0.0  # finished rows are dropped once they are this share

    def __post_init__(self):
        self.length = self.ids.shape[1]  # new tokens begin there
        # Tokens after which finished rows are dropped; a model's own cache cannot drop any.
        self.tokens_at_once = 10**9 if self.cache is None else 16

    @property
    def drawn(self) -> torch.Tensor:
        """The new tokens so far, `[rows, tokens]`. Tokens after a stop token have no meaning."""
        return self.ids[:, self.length :]

    def advance(self, n_tokens: int) -> None:
        """Generates until rows have `n_tokens` new tokens, or until each has a stop token."""
        context = self.context
        model = context.unwrapped.model
        config = GenerationConfig(
            max_new_tokens=self.length + n_tokens - self.ids.shape[1],
            pad_token_id=context.pad_token(),
            eos_token_id=sorted(context.stop_tokens()) or None,
            suppress_tokens=context.tokens_without_probability() or None,
        )
        is_real = torch.from_numpy(np.arange(self.ids.shape[1]) >= self.padding[:, None])
        self.ids = model.generate(
            self.ids,
            attention_mask=is_real.long().to(self.ids.device),
            generation_config=config,
            logits_processor=[] if self.token_sampler is None else [self.token_sampler],
            synced_gpus=False,
            **self.images,
            **{decoding.CACHE_ARGUMENT: self.cache},
        )

    def keep(self, rows: list[int]) -> None:
        self.ids = self.ids[rows]
        self.padding = self.padding[rows]
        self.cache.reorder_cache(torch.tensor(rows))
        if self.token_sampler is not None:
            self.token_sampler.uniforms = self.token_sampler.uniforms[rows]
            self.token_sampler.logps = self.token_sampler.logps[rows]


def responses_at_once(
    context: SamplingContext, prompts: list[list[int]], max_new_tokens: int, batch_size: int = 0
) -> int:
    """Returns `batch_size`, `--generate_batch_size`, or how many a cache of `CACHE_BYTES` holds.

    It does not depend on the device, so that a resumed run generates the same anywhere.
    """
    if context.unwrapped.config.model_type in UNBATCHABLE:
        return 1
    if given_size := batch_size or context.args.generate_batch_size:
        return given_size
    config = context.unwrapped.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)  # Mamba has none
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    # Also under autocast: rotary embeddings make keys fp32, and values take the dtype of the keys.
    element_size = context.unwrapped.model.get_input_embeddings().weight.element_size()
    elements_per_token = 2 * config.num_hidden_layers * kv_heads * head_size  # keys and values
    longest = max(map(len, prompts)) + max_new_tokens
    return max(1, CACHE_BYTES // (elements_per_token * element_size * longest))


class SampleByUniform(LogitsProcessor):
    """Draws the first token whose cumulative probability exceeds a number given in advance.

    A response thus depends on its prompt, the weights and its own row of `uniforms` `[rows, new
    tokens]` in [0, 1), and only through rounding on the batch and the process.
    """

    def __init__(self, uniforms: torch.Tensor, temperature: float):
        self.uniforms = uniforms
        self.temperature = temperature
        # Log-probs of the drawn tokens; 0 where none is drawn.
        self.logps = torch.zeros_like(uniforms, dtype=torch.float32)
        self.n_drawn = 0  # tokens of each row so far

    def __call__(self, input_ids, scores):
        """Draws a token for each row; transformers, which is greedy, gets -inf for all others."""
        token, logps = self.draw(scores.float(), self.uniforms[:, self.n_drawn, None])
        self.logps[:, self.n_drawn] = logps[:, 0]
        self.n_drawn += 1
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)

    def draw(self, scores, uniform) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a token for each row and its log-prob, `[rows, 1]`."""
        scaled = scores / self.temperature
        cumulative = scaled.softmax(-1).double().cumsum(-1)
        total = cumulative[:, -1:]  # 1 up to rounding
        token = torch.searchsorted(cumulative, uniform * total, right=True)
        # NaN makes `searchsorted` return an index past the vocabulary, so it is clamped. The
        # token's log-prob is NaN, too, so `Samples.check_finite` ends the run.
        token = token.clamp(max=scores.shape[1] - 1)
        return token, scaled.gather(1, token) - scaled.logsumexp(-1, keepdim=True)


# ============================================================ the model while it generates
@contextlib.contextmanager
def ready_to_generate(context: SamplingContext):
    """Gathers the actor's weights on every process, so that each can generate at its own pace."""
    model = context.unwrapped.model
    with contextlib.ExitStack() as undo:  # undoes in the reverse order
        undo.enter_context(torch.no_grad())
        undo.enter_context(prepare.evaluation_mode(model))
        # A call takes missing settings from the model's own config: temperature, top-k, the kind of
        # cache ... Only the stop tokens may change what is drawn here.
        undo.callback(setattr, model, "generation_config", model.generation_config)
        stops = sorted(context.stop_tokens())
        model.generation_config = GenerationConfig(eos_token_id=stops or None)
        # cuDNN's attention makes a plan for each new shape, and here every token brings one.
        undo.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
        if engine.zero_stage(context.accelerator) == 3:
            from common import zero

            undo.enter_context(zero.gathered_for_generation(context.model, model))
        elif context.accelerator.is_fsdp2:
            undo.enter_context(unsharded(context.model, model))
        undo.enter_context(context.accelerator.autocast())
        yield


@contextlib.contextmanager
def unsharded(prepared, model):
    """Unshards the weights of `model`, and keeps a forward pass from sharding them again.

    Other models in what FSDP2 prepared, such as PPO's critic, stay in shards.
    """
    # The root shards what no other module does, such as the final norm.
    modules_that_generate = {prepared, *model.modules()}
    fsdp_modules = [module for module in prepared.modules() if isinstance(module, FSDPModule)]
    # torch has a public method to set whether a module is resharded, but none to read it. A few
    # modules stay whole until their backward pass in any case: accelerate's choice, and the root.
    groups = {module: module._get_fsdp_state()._fsdp_param_group for module in fsdp_modules}
    reshards_in_training = {
        module: group is not None and group.post_forward_mesh_info is not None
        for module, group in groups.items()
    }
    prepared.set_reshard_after_forward(False)  # a forward pass leaves the weights whole
    try:
        for module in fsdp_modules:
            if module in modules_that_generate:
                module.unshard()
        yield
    finally:
        for module, reshards in reshards_in_training.items():
            module.set_reshard_after_forward(reshards, recurse=False)
        engine.reshard(prepared)
        # FSDP2 prefetches weights in the order in which modules last ran. A process that generated
        # nothing has another order than the rest, and the next update would hang.
        if hasattr(prepared, "reset_iter_state"):  # torch 2.13
            prepared.reset_iter_state()
