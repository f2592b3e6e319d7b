"""Loading a tokenizer and models, and refusing what would be trained otherwise than was meant."""

import hashlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils.peft_utils import find_adapter_config_file

from common import cpu, distributed, folders, in_one_line, print_once, record, zero
from preference_recipes.data import chat

# Names of tokens that stand for images and sound.
OTHER_SENSES = re.compile(r"vision|visual|image|video|audio|speech|multi_?modal|\bmm_")


# ============================================================ tokenizers
def tokenizer_of_run(accelerator, args):
    """Loads the tokenizer of the model that is trained. All processes must call it."""
    date = distributed.on_main_process(accelerator, record.find_date, args)
    return tokenizer_of(
        args.model_name_or_path, args.chat_template, args.chat_template_kwargs, date
    )


def tokenizer_of(
    name: str,
    chat_template: str | None = None,
    chat_template_kwargs: str | None = None,
    date: str | None = None,
):
    """Loads the tokenizer of a model, with an EOS and a pad token.

    Args:
        chat_template: a file that replaces the chat template.
        chat_template_kwargs: variables of the chat template, JSON. They become its defaults, so
            that they are saved with it and hold at inference.
        date: what a chat template prints as the date of the day, as in 2026-01-31.
    """
    tokenizer = from_pretrained(AutoTokenizer, name)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # Of Qwen, GPT-2 and Gemma transformers makes an empty one where there is no file.
        sys.exit(f"{name!r} holds no tokenizer: save the model's into its folder")
    if tokenizer.eos_token_id is None:
        sys.exit(
            f"the tokenizer of {name!r} has no EOS token, so a model could not learn to stop: "
            "set tokenizer.eos_token and save it"
        )
    # The loss never reads padding, so any token will do. A new one would resize the model.
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    if chat_template_kwargs is not None:
        chat.set_defaults(tokenizer, chat_template_kwargs)
    tokenizer.chat_date = date if chat.prints_date(tokenizer) else None
    return tokenizer


def separate_pad(tokenizer, pad_token: str | None = None) -> None:
    """Gives a tokenizer that pads with its EOS another pad token, and prints which.

    transformers reads a saved reward model's score at the last token that is not the pad token. So
    any token will do with which no answer ends: that of `--pad_token`, an unused special one, or
    the one for unknown text. The vocabulary stays as it is.
    """
    eos = tokenizer.eos_token
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab() or pad_token == eos:
            sys.exit(
                f"--pad_token {pad_token!r}: expected a token of the vocabulary of "
                f"{tokenizer.name_or_path!r} other than its EOS, {eos!r}"
            )
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token != eos:
        return
    template = str(tokenizer.chat_template or "")
    unused = [
        str(token)
        for token in tokenizer.added_tokens_decoder.values()
        if token.special
        and str(token) not in tokenizer.all_special_tokens
        and str(token) not in template
        and not OTHER_SENSES.search(str(token))
    ]
    unused.sort(key=lambda token: "pad" not in token.lower())  # those for padding first
    found = [token for token in (*unused, tokenizer.unk_token) if token not in (None, eos)]
    if not found:
        sys.exit(
            f"the tokenizer of {tokenizer.name_or_path!r} has no pad token of its own, or pads "
            f"with its EOS, {eos!r}: transformers would read a saved reward model's score before "
            "the EOS. Give --pad_token TOKEN: a token of its vocabulary with which no answer ends"
        )
    tokenizer.pad_token = found[0]
    print_once(
        f"NOTE: pads with {found[0]!r}, because the tokenizer has no pad token other than its "
        f"EOS, {eos!r}; --pad_token names another"
    )


# ============================================================ models
def causal_lm(name: str, tokenizer, args, frozen: bool = False) -> PreTrainedModel:
    """Loads a causal language model in fp32; engines round it when it is used.

    Args:
        tokenizer: that of the policy. A reference policy must read the same token ids.
        args: `SharedArgs`.
        frozen: the model is only read: neither checkpointed nor packed into 4 bits.
    """
    if name != tokenizer.name_or_path:
        refuse_another_vocabulary(name, tokenizer)
    model, missing, unused = load(AutoModelForCausalLM, name, args, frozen)
    for architecture in model.config.architectures or []:
        # With tied embeddings transformers loads it without complaint.
        if "Classification" in architecture or "RewardModel" in architecture:
            sys.exit(
                f"{name!r} is a {architecture}, such as a reward model, and no language model: "
                "give a causal language model as the policy, such as recipes/sft.py saves"
            )
    if unused:
        parts = sorted({weight.split(".")[0] for weight in unused})
        print_once(
            f"NOTE: {name!r} has {len(unused)} weights that {type(model).__name__} does not have, "
            f"of {', '.join(parts)}: they are not loaded, and no saved actor has them"
        )
    if missing:
        sys.exit(
            f"{name!r} lacks weights, such as {min(missing)}: they would have started at random"
        )
    # The saved actor must end its answers as it does here.
    model.generation_config.eos_token_id = sorted(chat.stop_tokens(tokenizer, model))
    published = model.generation_config.to_dict()
    model.generation_config = PublishedGenerationConfig.from_dict(published)
    return model


class PublishedGenerationConfig(GenerationConfig):
    """The generation config of a published model. It may have faults, and is saved as it is."""

    def validate(self, *args, **kwargs) -> None:
        """Accepts all: transformers would refuse to save some configs that it has loaded itself."""


def refuse_another_vocabulary(name: str, tokenizer) -> None:
    """Refuses a reference policy whose own tokenizer, if any, gives a token id another meaning.

    Tokens that only one of both has, such as an added pad token, are no difference.
    """
    try:
        own_tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception:  # whatever says that there is none
        return
    own_tokens = {token_id: token for token, token_id in own_tokenizer.get_vocab().items()}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        own_token = own_tokens.get(token_id, token)
        if own_token != token:
            sys.exit(
                f"{name!r} has another tokenizer than {tokenizer.name_or_path!r}: token {token_id} "
                f"is {own_token!r} there and {token!r} here. The reference policy reads the "
                "policy's token ids: give the model that the policy was trained from"
            )


def score_model(
    name: str, tokenizer, args, frozen: bool = False, new_head: bool = False
) -> PreTrainedModel:
    """Loads a sequence classifier with one label in fp32: a reward model, or a critic.

    Args:
        tokenizer: that of the policy, or of `name` itself.
        args, frozen: see `causal_lm`.
        new_head: gives a model without a score head a new one, see `draw_score_head`.
    """
    if tokenizer_of(name).get_vocab() != tokenizer.get_vocab():
        sys.exit(
            f"{name!r} has another tokenizer than {tokenizer.name_or_path!r}: "
            "the reward model or critic reads the policy's token ids, "
            "so both need the same vocabulary"
        )
    model, missing, _ = load(AutoModelForSequenceClassification, name, args, frozen, num_labels=1)
    if type(getattr(model, "score", None)) is not nn.Linear:
        sys.exit(
            f"{type(model).__name__} has no linear layer 'score' over each position: "
            "this architecture cannot be scored"
        )
    lacks_backbone = missing - {"score.weight"}
    if lacks_backbone or (missing and not new_head):
        sys.exit(
            f"{name!r} lacks weights, such as {min(missing)}: "
            "expected a reward model with one label, as recipes/reward.py saves it"
        )
    if missing:
        print_once(f"{name!r} has no score head: a new one is drawn from the seed")
        draw_score_head(model)
    # transformers reads the score of the last token before the padding.
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model


def draw_score_head(model: PreTrainedModel) -> None:
    """Draws the weights of a new score head from N(0, 0.01 / (hidden size + 1)).

    A tenth of the usual deviation (Stiennon et al. 2020, arXiv:2009.01325; Huang et al. 2024,
    arXiv:2403.17031): the hidden states of chat models are large, and a reward model should begin
    with scores near zero. A still smaller head would slow its backbone down.
    """
    size = model.score.in_features
    # From the seed alone, whatever random numbers the engine used up while it loaded the model.
    generator = torch.Generator().manual_seed(torch.initial_seed())
    start = 0.1 * torch.randn(1, size, generator=generator) / (size + 1) ** 0.5
    with zero.gathered([model.score.weight], writer=0), torch.no_grad():
        model.score.weight.copy_(start)


def load(auto_class, name: str, args, frozen: bool, **settings) -> tuple:
    """Loads a model in fp32; `settings` are further arguments of `from_pretrained`.

    Returns:
        the model; the names of the weights that its folder lacks; of those that it has no use for.
    """
    is_packed = args.load_in_4bit and not frozen
    if is_packed:
        # Weights are packed on the device that computes with them: with cpu.yaml that is no GPU,
        # even where there is one.
        device_map = {"": str(PartialState().device)}
        settings |= {"quantization_config": in_4bit(), "device_map": device_map}
    model, info = from_pretrained(
        auto_class,
        name,
        output_loading_info=True,
        dtype=torch.float32,
        attn_implementation=args.attn_implementation,
        **settings,
    )
    if not is_packed and getattr(model, "hf_quantizer", None) is not None:
        sys.exit(
            f"{name!r} holds quantized weights, which are not loaded as they are: give the model "
            "that they were made of, with --lora_r and --load_in_4bit to pack it"
        )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Else bitsandbytes packs weights of 4 bits anew in the first evaluation on a CPU.
            module.support_avx512bf16_for_cpu = False
    if getattr(model, "_weight_conversions", None):
        # Saving reverts the renamings of loading. Under ZeRO-3 transformers 5.23 also remembers
        # those that no weight needed, and would save Gemma 3 under names that nothing reads.
        used = [renaming for renaming in model._weight_conversions if renaming.was_used()]
        model._weight_conversions = used
    is_on_cpu = PartialState().device.type == "cpu"
    if is_on_cpu and model.config.get_text_config().hidden_size > 128:
        cpu.use_onednn()
    if args.gradient_checkpointing and not frozen:
        contexts = {"context_fn": cpu.contexts_of_checkpoint} if is_on_cpu else {}
        # transformers renamed it, warns of the old name, and will take that away in version 6.
        new_name = "activation_checkpointing_enable"
        enable = new_name if hasattr(model, new_name) else "gradient_checkpointing_enable"
        getattr(model, enable)({"use_reentrant": False, **contexts})
    return model, set(info["missing_keys"]), set(info["unexpected_keys"])


def in_4bit() -> BitsAndBytesConfig:
    """Returns QLoRA's settings: NormalFloat, and the scales of its blocks packed again."""
    precisions = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precisions[AcceleratorState().mixed_precision],
    )


def from_pretrained(auto_class, name: str, **settings):
    """Calls `auto_class.from_pretrained`, and exits with its error in one line.

    Code that a model brings along is never run. transformers would ask on standard input whether
    it may, and take a line of a pipe for the answer. Of an adapter it would load the base with it.
    """
    if is_adapter(name):
        sys.exit(
            f"{name!r} is an adapter, not a whole model: merge it into its base with "
            f"`python -m preference_recipes.tools.export {name} OUT --merge`, and give OUT instead"
        )
    try:
        return auto_class.from_pretrained(name, trust_remote_code=False, **settings)
    except Exception as error:  # torn weights, a missing attention package, any tokenizer's error
        sys.exit(f"{name!r} cannot be loaded by {auto_class.__name__}: {in_one_line(error)}")


def is_adapter(name: str) -> bool:
    """Whether a folder or a hub name holds an adapter instead of a whole model."""
    try:
        return not Path(name).is_file() and find_adapter_config_file(name) is not None
    except Exception:  # no such name, or no network: whoever loads it says so
        return False


def fingerprint(accelerator, name: str, config) -> str:
    """Identifies a model's weights: the same for a copy of them, another for any change.

    All processes must call it.
    """
    return distributed.on_main_process(accelerator, describe_weights, name, config)


def describe_weights(name: str, config) -> str:
    """Returns the commit of a hub name; of a folder, a hash of its weights' and config's files."""
    folder = Path(name)
    if not folder.is_dir():
        return f"commit {getattr(config, '_commit_hash', None)} of {name}"
    files = [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]
    files = sorted(file for file in files if file.is_file())
    # Checksums are computed outside of Python's lock, so threads share the work.
    with ThreadPoolExecutor() as pool:
        checksums = list(pool.map(folders.checksum, files))
    entries = [
        [file.name, file.stat().st_size, crc] for file, crc in zip(files, checksums, strict=True)
    ]
    return f"weights {hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]}"
