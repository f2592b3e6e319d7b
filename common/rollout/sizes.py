"""How many responses a process generates and scores at once, where the user leaves it open."""

import os

import psutil
import torch
from accelerate.utils import gather_object

from common import engine
from common.models import lora
from common.models.logprobs import CHUNK_ELEMENTS
from common.models.packing import MOST_MASK

# What a trained parameter takes at most, in bytes: weights 4, gradients 4, Adam's moments 8, and 4
# for a second copy of the weights or the gradients, which some engines hold.
BYTES_PER_TRAINED = 20
# The part of the memory that is planned with. A machine's memory is used by other programs, too.
SHARE_OF_GPU = 0.8
SHARE_OF_MACHINE = 0.5
# Even where the models alone seem to fill the memory, this part of it is planned with.
LEAST_SHARE = 0.02
# A cache is copied while it grows, and the allocator keeps the old pieces for a while.
COPIES_OF_CACHE = 2
# What drawing a token takes for each token of the vocabulary: logits, probabilities, their sums.
BYTES_PER_LOGIT = 32
# Log-probs hold a chunk of logits in fp32, their log-softmax, and its exponential for the entropy.
BYTES_OF_LOGPROBS = 3 * 4 * CHUNK_ELEMENTS


def fill_in(accelerator, args, trained: torch.nn.Module, frozen: list) -> None:
    """Replaces `--generate_batch_size 0` and `--score_batch_size 0` by as many as fit.

    The numbers follow from the total memory of the device, not from what happens to be free of it.
    So they are the same in every run on such a device. All processes get the smallest of theirs.
    All processes must call it.

    Args:
        args: the recipe's arguments, in which the two sizes are set.
        trained: the module with all trained models. Its `model` is the actor, its `config` the
            actor's.
        frozen: the prepared models that are only read; None stands for none.
    """
    if args.generate_batch_size and args.score_batch_size:
        return
    element = 4 if accelerator.mixed_precision == "no" else 2
    config = trained.config.get_text_config()
    memory = memory_for_responses(accelerator, trained, frozen, element)
    to_generate = memory / bytes_to_generate(config, args.max_length, element)
    to_score = (memory - BYTES_OF_LOGPROBS) / bytes_to_score(
        config, args.max_length, args.max_new_tokens, args.n_samples_per_prompt, element
    )
    everyone = gather_object([(to_generate, to_score)])
    to_generate, to_score = [max(1, int(min(numbers))) for numbers in zip(*everyone)]
    args.generate_batch_size = args.generate_batch_size or to_generate
    args.score_batch_size = args.score_batch_size or to_score
    accelerator.print(
        f"a process generates up to {args.generate_batch_size} responses at once and scores up to "
        f"{args.score_batch_size} (--generate_batch_size, --score_batch_size)"
    )


def memory_for_responses(
    accelerator, trained: torch.nn.Module, frozen: list, element: int
) -> float:
    """Returns the bytes of this process's device that the models leave, as far as planned with.

    Args:
        element: bytes of a number in the precision of the forward pass.
    """
    if accelerator.device.type == "cuda":
        total = torch.cuda.get_device_properties(accelerator.device).total_memory
        planned = SHARE_OF_GPU * total
    else:
        processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        total = psutil.virtual_memory().total / processes_here
        planned = SHARE_OF_MACHINE * total
    shards = accelerator.num_processes if engine.is_sharded(accelerator) else 1
    learning = engine.count_trained_parameters(trained)
    states = (BYTES_PER_TRAINED * learning + bytes_of_frozen(trained)) / shards
    if shards > 1:
        # The actor is gathered whole to generate.
        states += element * engine.count_parameters(trained.model)
    for model in frozen:
        # A reference that is the policy without its adapters is no second copy.
        if model is not None and not isinstance(model, lora.WithoutAdapters):
            states += bytes_of_frozen(model)
    return max(planned - states, LEAST_SHARE * total)


def bytes_of_frozen(model: torch.nn.Module) -> int:
    """Returns the bytes of a model's frozen weights, at most; packed ones as they are."""
    total = 0
    for parameter in model.parameters():
        if hasattr(parameter, "quant_state"):
            total += parameter.numel() * parameter.element_size()
        elif not parameter.requires_grad:
            total += parameter.element_size() * engine.size_of(parameter)
    return total


def bytes_to_generate(config, max_length: int, element: int) -> int:
    """Returns the bytes that one response takes while it is generated.

    Args:
        config: of the text model.
        element: bytes of a number in the precision of the forward pass.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    cache = 2 * config.num_hidden_layers * kv_heads * head_size * element * max_length
    reading = bytes_of_a_layer(config, element) * max_length
    return COPIES_OF_CACHE * cache + reading + BYTES_PER_LOGIT * config.vocab_size


def bytes_to_score(
    config, max_length: int, max_new_tokens: int, per_prompt: int, element: int
) -> int:
    """Returns the bytes that one response takes in a forward pass without gradients."""
    # Where responses share a prompt, their row has a mask of its length squared, or none.
    row = max_length + (per_prompt - 1) * max_new_tokens
    mask = min(row**2, MOST_MASK) // per_prompt
    return bytes_of_a_layer(config, element) * max_length + mask


def bytes_of_a_layer(config, element: int) -> int:
    """Returns the bytes of the activations that one token has at once in a forward pass.

    These are those of one layer: hidden states, queries, keys, values, and the inner ones of the
    MLP.
    """
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return (8 * config.hidden_size + 3 * inner) * element
