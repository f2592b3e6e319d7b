"""A fault of rollouts that other programs had, see docs/counting.md: no other test here would notice it."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from runs import launch, recipe, short_run, tiny_llama, training_lines, write_jsonl


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE, so that many a text has more than one sequence of ids."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<pad>", "<eos>"])
    backend.train_from_iterator(["aabbabcabcbcacbbca" * 3, "abc", "bca", "cab"] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", bos_token=None
    )


def test_trained_are_the_ids_that_the_trained_weights_sampled(tmp_path):
    """With adapters, whose weights a sampler may lack, and ids that their own text would not give."""
    tokenizer = merging_tokenizer()
    tiny_llama(tmp_path / "model", vocab_size=max(40, len(tokenizer)))  # see `checks.can_share`
    tokenizer.save_pretrained(tmp_path / "model")
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "abc" * (1 + n % 3)} for n in range(16)])
    (tmp_path / "sampled_ids.py").write_text(
        "import json\n"
        "def longest(prompts, responses, response_ids, **columns):\n"
        "    with open('ids.jsonl', 'a') as file:\n"
        "        file.write(json.dumps([responses, response_ids]) + '\\n')\n"
        "    return [float(sum(ids) % 5) for ids in response_ids]\n"
    )
    sizes = dict(rollout_batch_size=4, n_samples_per_prompt=4, train_batch_size=16, max_steps=4)
    sizes |= dict(micro_train_batch_size=4, max_new_tokens=6, max_length=40)
    adapters = dict(lora_r=4, lora_alpha=64, learning_rate=0.05)
    given = dict(reward_function="sampled_ids:longest", **sizes, **adapters)
    flags = short_run(tmp_path, "prompts", tmp_path / "run", **given)
    launch([], recipe("grpo"), *flags, cwd=tmp_path)
    found = training_lines(tmp_path / "run")
    assert len(found) == 4
    for line in found:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4, line["global_step"]
    # It would be noticed: the policy has moved far from its base, and texts are ambiguous.
    entropies = [line["entropy"] for line in found]
    assert max(entropies) - min(entropies) > 0.05
    ambiguous = 0
    for line in (tmp_path / "ids.jsonl").read_text().splitlines():
        responses, response_ids = json.loads(line)
        for text, ids in zip(responses, response_ids, strict=True):
            ambiguous += tokenizer(text).input_ids != [one for one in ids if one > 1]
    assert ambiguous > 16
