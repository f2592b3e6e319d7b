"""Makes a whole model of an adapter's folder, by adding the adapter to its base."""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import cached_file

from common import adapters, in_one_line
from preference_recipes.models import load, lora


def write(adapter: str, out: Path) -> None:
    """Writes the model that an adapter makes of its base to a folder, in fp32, with its tokenizer.

    Args:
        adapter: a folder or a hub name.
        out: must not exist.

    Raises:
        SystemExit: the base is not there, is an adapter itself, or does not fit; the whole model
            would not compute what base and adapter compute.
    """
    peft = lora.import_library("peft", needed_by=f"the adapter {adapter!r}", extra="lora")
    base_name = None
    try:
        config = peft.PeftConfig.from_pretrained(adapter)
        base_name = config.base_model_name_or_path
        base = load_base(base_name, config.task_type)
        tokenizer = tokenizer_of(adapter, base_name)
        if len(tokenizer) > base.config.get_text_config().vocab_size:
            base.resize_token_embeddings(len(tokenizer))  # the adapter has the new rows
        model = peft.PeftModel.from_pretrained(base, adapter).eval()
        ids = ids_to_compare(len(tokenizer))
        with torch.no_grad():
            expected = model(ids).logits
            merged = model.merge_and_unload(safe_merge=True)  # it looks for what is not finite
            refuse_other_model(merged(ids).logits, expected)
        merged.config.update(moments_of(adapter))
        if config.task_type == "SEQ_CLS":  # transformers finds the last token by it
            merged.config.pad_token_id = tokenizer.pad_token_id
            merged.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        if merged.can_generate():
            published = generation_config_of(adapter, merged).to_dict()
            merged.generation_config = load.PublishedGenerationConfig.from_dict(published)
        merged.save_pretrained(out)
        tokenizer.save_pretrained(out)
    except Exception as error:  # whatever peft and transformers raise
        load.refuse_own_code(base_name or adapter, error)
        reason = in_one_line(error)
        sys.exit(f"the adapter {adapter!r} of {base_name!r} cannot be merged: {reason}")


def ids_to_compare(vocabulary: int) -> torch.Tensor:
    """Returns 32 ids from all over a vocabulary, `[1, 32]`."""
    return torch.linspace(0, vocabulary - 1, 32).long()[None]


def refuse_other_model(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Refuses a merged model whose logits are not those of base and adapter, up to rounding.

    peft 0.21 merges an adapter on tied embeddings wrongly: it adds the change to the one shared
    matrix twice, or gives the output layer a change that it did not have.

    Raises:
        ValueError: with the largest difference.
    """
    difference = (logits - expected).abs().max().item()
    largest = expected.abs().max().item()
    if not difference <= 1e-3 * largest:  # also where one is not finite
        raise ValueError(
            f"the whole model would be another one: its logits differ by up to {difference:.3g} "
            f"from those of base and adapter, which are up to {largest:.3g} in size. Load the "
            "adapter with peft instead, or make one that leaves tied embeddings alone"
        )


def load_base(name: str, task_type: str):
    """Loads the base of an adapter in fp32."""
    if load.is_adapter(name):
        raise ValueError("the base is an adapter itself: merge that one first")
    if task_type == "SEQ_CLS":
        base = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=1, dtype=torch.float32, trust_remote_code=False
        )
    else:
        base = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=False
        )
    if getattr(base, "hf_quantizer", None) is not None:
        raise ValueError(
            "the base holds quantized weights: name the model that they were made of as "
            "base_model_name_or_path in adapter_config.json"
        )
    return base


def moments_of(adapter: str) -> dict[str, float]:
    """Returns the mean and the standard deviation that `adapters.save` wrote for a reward model."""
    file = cached_file(adapter, adapters.MOMENTS_FILE, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}


def tokenizer_of(adapter: str, base: str):
    """Returns the tokenizer in an adapter's folder, or else that of its base."""
    try:
        return AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
    except Exception:  # whatever says that there is none
        return AutoTokenizer.from_pretrained(base, trust_remote_code=False)


def generation_config_of(adapter: str, base) -> GenerationConfig:
    """Returns the generation config in an adapter's folder, or else that of its base."""
    try:
        return GenerationConfig.from_pretrained(adapter)
    except OSError:  # there is none
        return base.generation_config
