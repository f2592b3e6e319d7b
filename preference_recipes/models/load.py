"""Loads tokenizers and models, and refuses what would silently train the wrong thing."""

import contextlib
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.models.auto import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from common import distributed, folders, one_line, print_once, refuse
from preference_recipes.data import rendering
from preference_recipes.models import architecture


# ============================================================ tokenizers
def tokenizer_of_run(accelerator, args):
    """Loads the tokenizer of the model that is trained. All processes must call it."""
    tokenizer = load_tokenizer(args.model_name_or_path)
    if args.chat_template is not None:
        if not Path(args.chat_template).is_file():
            refuse(f"--chat_template {args.chat_template}: no such file (looked in {Path.cwd()})")
        tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
    if args.chat_template_kwargs is not None:
        rendering.set_defaults(tokenizer, args.chat_template_kwargs)
    if "strftime_now" in str(tokenizer.chat_template):  # it prints a date
        tokenizer.chat_date = distributed.on_main_process(accelerator, date_of_run, args)
    if tokenizer.processor is not None:
        tokenizer.processor.chat_template = tokenizer.chat_template
    return tokenizer


def load_tokenizer(name: str):
    """Loads the tokenizer of a model, with an EOS and a pad token; see also `add_processor`."""
    # mistral-common would read a folder's tekken.json and ignore its chat template.
    tokenizer = from_pretrained(AutoTokenizer, name, mistral_format=False)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # For Qwen, GPT-2 and Gemma transformers makes an empty one where there is no file.
        refuse(f"{name!r} holds no tokenizer: save the model's into its folder")
    if tokenizer.eos_token_id is None:
        refuse(f"the tokenizer of {name!r} has no EOS token: set tokenizer.eos_token and save it")
    # The loss never reads padding, so any token will do. A new one would resize the model.
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    add_processor(tokenizer, name)
    return tokenizer


def add_processor(tokenizer, name: str) -> None:
    """Gives a tokenizer its model's image `processor`, or None and the reason in `no_images`."""
    tokenizer.processor, tokenizer.no_images = None, f"{name!r} has no processor of images"
    lenient = dict(
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    files = ("processor_config.json", "preprocessor_config.json")
    if any(cached_file(name, file, **lenient) for file in files):
        from preference_recipes.data import images  # only here: text needs none

        tokenizer.processor, tokenizer.no_images = images.processor_of(name, tokenizer)


def date_of_run(args) -> str:
    """Returns the date for chat templates, as in 2026-01-31: when the run first started, in UTC."""
    checkpoints = [] if args.resume == "never" else [Path(args.resume)]
    if args.resume == "auto":
        checkpoints = folders.by_step(Path(args.output_dir or "", "checkpoints"))[::-1]
    for path in checkpoints:
        with contextlib.suppress(OSError, ValueError, LookupError):  # `Checkpoint.find` names it
            if date := folders.read_json(path / "state.json")["arguments"]["date"]:
                return date
    return f"{datetime.now(timezone.utc):%Y-%m-%d}"


# ============================================================ models
def causal_lm(name: str, tokenizer, args, frozen: bool = False) -> PreTrainedModel:
    """Loads a causal language model in fp32, which may read images, too. Engines round it later.

    Args:
        tokenizer: the policy's. A reference policy must read the same token ids.
        frozen: the model is only read: neither checkpointed nor packed into 4 bits.
    """
    if name != tokenizer.name_or_path:
        refuse_another_vocabulary(name, tokenizer)
    model, missing, unused = load_model(class_for(name, tokenizer), name, args, frozen)
    for kind in model.config.architectures or []:
        # With tied embeddings transformers loads it without complaint.
        if "Classification" in kind or "RewardModel" in kind:
            refuse(f"{name!r} is a {kind}, such as a reward model, not a causal language model")
    if unused:
        parts = sorted({weight.split(".")[0] for weight in unused})
        surplus = f"{len(unused)} weights that {type(model).__name__} does not have"
        print_once(f"NOTE: {name!r} has {surplus}, of {', '.join(parts)}: no saved actor has them")
    if missing:
        refuse(f"{name!r} lacks weights, such as {min(missing)}: they would have started at random")
    # The saved actor must end its answers as it does here.
    model.generation_config.eos_token_id = sorted(rendering.stop_tokens(tokenizer, model))
    published = model.generation_config.to_dict()
    model.generation_config = PublishedGenerationConfig.from_dict(published)
    return model


def class_for(name: str, tokenizer):
    """Returns the auto class that loads a language model whole, with any vision tower."""
    has_processor = getattr(tokenizer, "processor", None) is not None
    config = from_pretrained(AutoConfig, name) if has_processor else None
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def load_model(auto_class, name: str, args, frozen: bool, **settings) -> tuple:
    """Loads a model in fp32; returns it, and the names of weights that are missing and unused."""
    in_4bit = args.load_in_4bit and not frozen
    if in_4bit:
        from preference_recipes.models import lora

        settings |= lora.packed_in_4bit()
    model, info = from_pretrained(
        auto_class,
        name,
        output_loading_info=True,
        dtype=torch.float32,
        attn_implementation=args.attn_implementation,
        **settings,
    )
    if not in_4bit and getattr(model, "hf_quantizer", None) is not None:
        refuse(f"{name!r} holds quantized weights: give the model that they were made from")
    if args.max_length > (limit := architecture.longest_row(model)):
        refuse(f"--max_length {args.max_length}: {name!r} has {limit} positions: give {limit}")
    if frozen or args.lora_r:  # no checkpoint holds its weights
        model.fingerprint = distributed.on_main_process(
            PartialState(), describe_weights, name, model.config
        )
    if getattr(model, "_weight_conversions", None):
        # Saving reverts the renamings of loading. Under ZeRO-3 transformers 5.23 also keeps unused
        # ones, and would save Gemma 3 under names that nothing reads.
        used = [renaming for renaming in model._weight_conversions if renaming.was_used()]
        model._weight_conversions = used
    contexts = {}
    if PartialState().device.type == "cpu":
        from common import cpu
        from preference_recipes.models import onednn

        contexts["context_fn"] = cpu.contexts_of_checkpoint
        if model.config.get_text_config().hidden_size > 128:
            onednn.use_onednn()
    if args.gradient_checkpointing and not frozen:
        # transformers renamed the method; version 6 will no longer have the old name.
        new_name = "activation_checkpointing_enable"
        enable = new_name if hasattr(model, new_name) else "gradient_checkpointing_enable"
        getattr(model, enable)({"use_reentrant": False, **contexts})
    return model, set(info["missing_keys"]), set(info["unexpected_keys"])


def from_pretrained(auto_class, name: str, **settings):
    """Calls `auto_class.from_pretrained`, and exits with its error in one line.

    A model's own code is never run: transformers would ask on standard input.
    """
    if is_adapter(name):
        merge = f"`python -m preference_recipes.tools.export {name} OUT --merge`"
        refuse(f"{name!r} is an adapter, not a whole model: {merge}, and give OUT")
    if (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).exists():
        refuse(f"the model's folder {name!r} does not exist (looked in {Path.cwd()})")
    try:
        return auto_class.from_pretrained(name, trust_remote_code=False, **settings)
    except Exception as error:  # torn weights, a missing attention package, any tokenizer's error
        is_empty = Path(name).is_dir() and not Path(name, "config.json").exists()
        reason = "it is a folder without config.json" if is_empty else one_line(error)
        refuse(f"{name!r} cannot be loaded by {auto_class.__name__}: {reason}")


# ============================================================ unsuitable models
def is_adapter(name: str) -> bool:
    """Whether a folder or a hub name holds an adapter instead of a whole model."""
    try:
        return not Path(name).is_file() and find_adapter_config_file(name) is not None
    except Exception:  # no such name or no network: loading it reports that
        return False


def refuse_another_vocabulary(name: str, tokenizer) -> None:
    """Refuses a model whose own tokenizer, if any, gives a shared token id another meaning."""
    try:
        model_tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, mistral_format=False
        )
    except Exception:  # it has none
        return
    model_tokens = {token_id: token for token, token_id in model_tokenizer.get_vocab().items()}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        model_token = model_tokens.get(token_id, token)
        if model_token != token:
            difference = f"token {token_id} is {model_token!r} there and {token!r} here"
            problem = f"another tokenizer than {tokenizer.name_or_path!r}, whose ids it reads"
            refuse(f"{name!r} has {problem}: {difference}")


def check_embeddings(data, name: str, *others: str | None, draws: bool = False) -> dict[str, int]:
    """Returns how many tokens each of these models has an embedding for, by their configs alone.

    Ends the run if an embedding is missing: for a token in a run's `Data` or, with `draws`, for one
    that the first model may draw and another model reads.
    """
    sizes = {}
    for model_name in (name, *filter(None, others)):
        sizes[model_name] = from_pretrained(AutoConfig, model_name).get_text_config().vocab_size
        data.refuse_ids_beyond(sizes[model_name], model_name)
    smallest = min(sizes, key=sizes.get)
    tokenizer = data.converter.tokenizer
    for token, token_id in tokenizer.get_vocab().items() if draws else ():
        if sizes[smallest] <= token_id < sizes[name] and token != tokenizer.pad_token:
            missing_token = f"token {token_id}, {token!r}, which {name!r} may draw: resize it"
            refuse(f"{smallest!r} has {sizes[smallest]} embeddings, and none for {missing_token}")
    return sizes


class PublishedGenerationConfig(GenerationConfig):
    """The generation config of a published model, which transformers might refuse to save."""

    def validate(self, *args, **kwargs) -> None:
        """Accepts any values."""


# ============================================================ fingerprints
def describe_weights(name: str, config) -> str:
    """Returns a hub name's commit, or a hash of a folder's weight files and config."""
    folder = Path(name)
    if not folder.is_dir():
        return f"commit {getattr(config, '_commit_hash', None)} of {name}"
    files = sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")])
    # Checksums are computed outside of Python's lock, so threads speed them up.
    with ThreadPoolExecutor() as pool:
        entries = [
            [file.name, *digest] for file, digest in zip(files, pool.map(folders.describe, files))
        ]
    return f"weights {hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]}"
