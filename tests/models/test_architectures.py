"""The architectures that people bring: read, trained, saved and scored as transformers does."""

import copy
import json
import types

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from architectures import ARCHITECTURES, build, config_of
from common import saving
from preference_recipes.models import architecture, checks, prepare
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer
from preference_recipes.models.scores import ScoreModel
from runs import slow_but, whole_rows
from test_packing import CPU, ON_CPU, UNSHARED_ROWS, can_share

# Those that once went wrong, or stand for a kind of their own.
FAST = [
    *["llama", "gemma2", "cohere", "gpt2"],
    *["gemma3", "llama4_text", "recurrent_gemma", "hyperclovax", "falcon", "qwen3_moe", "gpt_oss"],
]
NAMES = slow_but(FAST, ARCHITECTURES)


def batch():
    """Rows of 20, 9 and 14 tokens, padded on the right; the second half of each is scored."""
    torch.manual_seed(1)
    ids, scored = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.bool)
    for row, length in enumerate((20, 9, 14)):
        ids[row, :length] = torch.randint(3, 300, (length,))
        scored[row, length // 2 : length] = True
    return ids, scored


def own(model, ids, scored, temperature=1.0):
    """One row at a time, unpadded, from the model's own logits."""
    logps, means, hits = (torch.zeros(3, 20) for _ in range(3))
    for row in range(3):
        length = int(scored[row].nonzero().max()) + 1
        logits = model(ids[row : row + 1, :length], use_cache=False).logits[0, :-1].float()
        logits = logits / temperature
        target, mask = ids[row, 1:length], scored[row, 1:length]
        logps[row, 1:length] = logits.log_softmax(-1).gather(1, target[:, None])[:, 0] * mask
        means[row, 1:length] = logits.mean(-1) * mask
        hits[row, 1:length] = (logits.argmax(-1) == target) * mask
    return logps, means, hits


def gradients_of(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(one: dict, other: dict) -> float:
    """Of all gradients together, in proportion to the other's norm."""
    assert one.keys() == other.keys()
    first, second = (torch.cat([grads[name].flatten() for name in other]) for grads in (one, other))
    return ((first - second).norm() / second.norm()).item()


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_and_gradients_are_those_of_its_own_logits(name):
    """Padded rows against each row alone."""
    model = build(name)
    ids, scored = batch()
    weights = torch.rand(3, 20)
    logps, means, hits = own(model, ids, scored)
    (logps * weights).sum().backward()
    expected = gradients_of(model)
    model.zero_grad()
    wrapper = LogProbModel(model).eval()
    checks.check_logprobs(ON_CPU, wrapper)
    scores = wrapper(whole_rows(ids, scored), extra_outputs=("mean_logits", "correct"))
    (scores["logps"] * weights).sum().backward()
    torch.testing.assert_close(scores["logps"], logps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores["mean_logits"], means, rtol=1e-4, atol=1e-4)
    assert torch.equal(scores["correct"], hits)
    assert distance(gradients_of(model), expected) <= 1e-5
    with torch.no_grad():
        cooler = wrapper(whole_rows(ids, scored), temperature=0.7)["logps"]
        torch.testing.assert_close(cooler, own(model, ids, scored, 0.7)[0], rtol=1e-4, atol=1e-4)


# What sees a part of a row alone, has another attention than torch's, or passes something on besides.
UNSHARED = ["qwen3_next", "qwen3_5_text", "gemma2", "gemma3_text", "gemma3", "gemma3n_text"]
UNSHARED += ["gemma4_text", "gemma4", "mistral", "olmo3", "gptj", "gpt_neo", "xglm", "cohere2"]
UNSHARED += ["gpt_oss", "exaone4", "granitemoehybrid", "recurrent_gemma", "falcon_h1", "mamba"]
UNSHARED += ["mamba2", "minimax", "rwkv", "xlstm", "bloom", "mpt", "lfm2", "lfm2_moe", "jamba"]
UNSHARED += ["falcon alibi", "deepseek_v32"]


@pytest.mark.parametrize("name", NAMES)
def test_shared_prompts(name):
    """Where they are allowed each answer is read as alone, also after an empty prompt."""
    wrapper = LogProbModel(build(name)).eval()
    assert can_share(wrapper) == (name not in UNSHARED)
    if name in UNSHARED:
        return
    ids = torch.randint(3, 290, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    prompts = [ids[:6], ids[:6], ids[6:9], ids[:6], [], ids[5:6], []]
    answers = [ids[9:13], ids[13:20], ids[20:29], ids[29:31], ids[31:37], ids[37:40], ids[40:41]]
    learned = [[bool(prompt) or t > 0 for t in range(9)] for prompt in prompts]
    learned = [flags[: len(answer)] for flags, answer in zip(learned, answers)]
    found, gradients = {}, {}
    for share in (False, True):
        rows = Packer(CPU, share).make_batch(prompts, answers, learned)
        wrapper.zero_grad()
        found[share] = wrapper(rows)["logps"]
        (found[share] * torch.linspace(-1, 1, 63).view(7, 9)).sum().backward()
        gradients[share] = gradients_of(wrapper)
    assert rows["inputs"]["input_ids"].shape == (1, 42)  # 6 + 4 + 7 + 2; 3 + 9; 6 + 1; 1 + 3
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-4)
    assert distance(gradients[True], gradients[False]) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_what_text_never_reaches_is_found(name, capsys):
    """What gets no gradient from 60 real tokens: that alone is frozen. The model is as before."""
    model = build(name)
    ids = torch.randint(3, 290, (1, 60), generator=torch.Generator().manual_seed(2))
    before = model(ids, use_cache=False).logits
    before.sum().backward()
    unreached = {path for path, p in model.named_parameters() if p.grad is None}
    model.zero_grad()
    accelerator = types.SimpleNamespace(print=print)
    architecture.freeze_unreached(accelerator, LogProbModel(model))
    assert {path for path, p in model.named_parameters() if not p.requires_grad} == unreached
    assert torch.equal(model(ids, use_cache=False).logits, before)
    said = {
        "gemma3": "such as model.multi_modal_projector.mm_input_projection_weight (text",
        "gemma4": "such as model.embed_vision.embedding_projection.weight (text",
        "deepseek_v32": "such as model.layers.0.self_attn.indexer.k_norm.bias (text",
    }
    assert said.get(name, "") in capsys.readouterr().out
    assert bool(unreached) == (name in said)


@pytest.mark.parametrize("name", FAST)
def test_what_a_frozen_model_holds_in_half_changes_no_bit(name, accelerator, monkeypatch):
    monkeypatch.setattr(accelerator.state, "_mixed_precision", "bf16")
    wrapper = LogProbModel(build(name)).requires_grad_(False)
    rows = whole_rows(*batch())

    def read() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return wrapper(rows, extra_outputs=("mean_logits",))

    before = read()
    prepare.round_frozen(accelerator, wrapper)
    after = read()
    assert torch.equal(before["logps"], after["logps"])
    assert torch.equal(before["mean_logits"], after["mean_logits"])
    in_half = [path for path, p in wrapper.named_parameters() if p.dtype == torch.bfloat16]
    # Falcon's linear layers are of its own kind, and may use their weights in another way.
    others = {"falcon", "falcon alibi"}
    is_recurrent = wrapper.model._is_stateful
    assert bool(in_half) == (name not in others and not is_recurrent), in_half
    kinds = {type(wrapper.get_submodule(path.rpartition(".")[0])) for path in in_half}
    assert kinds <= {torch.nn.Linear, Conv1D}


@pytest.mark.parametrize("name", [*FAST, "mixtral"])  # whose router has a jitter
def test_dropout_is_off(name):
    """Also where layers read it from the config in each forward pass; the saved config keeps it."""
    config = config_of(name)
    text = config.get_text_config()
    values = vars(text).items()
    noises = [key for key, value in values if ("drop" in key or "jitter" in key) and value == 0.0]
    noises += [key for key, value in values if "drop" in key and type(value) is float and value]
    for key in noises:
        setattr(text, key, 0.3)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError):  # some refuse dropout themselves
        return
    wrapper = LogProbModel(model)
    prepare.disable_dropout(wrapper)
    ids = torch.randint(3, 290, (1, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        quiet = model.eval()(ids, use_cache=False).logits
        trained = model.train()(ids, use_cache=False).logits
    torch.testing.assert_close(trained, quiet, rtol=1e-5, atol=1e-5)
    for key in noises:
        assert getattr(model.config.get_text_config(), key) == 0.3, key


@pytest.mark.parametrize("name", FAST)
def test_saved_and_loaded_again(name, tmp_path):
    """Through what saves an actor; the folder loads with plain transformers, bit for bit."""
    wrapper = LogProbModel(build(name))
    prepare.disable_dropout(wrapper)
    state_dict = saving.weights_of(wrapper.model, wrapper.state_dict(), wrapper)
    wrapper.model.save_pretrained(tmp_path, state_dict=state_dict)
    saving.write_config(tmp_path, "float32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(3, 290, (1, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        one = again.eval()(ids, use_cache=False).logits
        other = wrapper.model.eval()(ids, use_cache=False).logits
    assert torch.equal(one, other)


PLAIN, SLIDING = (dict(rope_type="default", rope_theta=base) for base in (1e6, 2e4))
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, original_max_position_embeddings=32)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
BY_LAYER = dict(full_attention=LLAMA3, sliding_attention=SLIDING)
SCALED = dict(rope_theta=5e5, rope_scaling=LLAMA3)


@pytest.mark.parametrize(
    "name, rope, former",
    [
        ("qwen2", PLAIN, dict(rope_theta=1e6)),
        ("llama", LLAMA3, SCALED),
        ("gemma3", BY_LAYER, dict(SCALED, rope_local_base_freq=2e4)),
        (
            "glm4",
            dict(PLAIN, partial_rotary_factor=0.75),
            dict(rope_theta=1e6, partial_rotary_factor=0.75),
        ),
        ("gpt2", None, {}),
    ],
)
def test_rotary_bases_are_saved_under_their_former_names_too(tmp_path, name, rope, former):
    """mlx-lm 0.32, transformers 4 and CTranslate2 know no others; transformers 5 reads what it did before."""
    config = config_of(name)
    config.get_text_config().rope_parameters = copy.deepcopy(rope)
    config.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path)
    saving.write_config(tmp_path, "bfloat16")
    written = json.loads((tmp_path / "config.json").read_text())
    text = written.get("text_config", written)
    names = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
    assert {name: text[name] for name in names if name in text} == former
    assert written["dtype"] == "bfloat16"
    after = AutoConfig.from_pretrained(tmp_path)
    assert after.get_text_config().rope_parameters == before.get_text_config().rope_parameters


@pytest.mark.parametrize("name", FAST)
def test_scores_are_those_of_plain_transformers(name):
    config = config_of(name)
    config.num_labels = 1
    try:
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as error:  # transformers has no classifier of this kind
        assert "Unrecognized configuration class" in str(error)
        return
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        model.score.weight.normal_()
    model.eval()
    config_text = model.config.get_text_config()
    config_text.pad_token_id = model.config.pad_token_id = 0
    ids, _ = batch()
    lengths = [20, 9, 14]
    plain = model(ids, attention_mask=(ids != 0).long()).logits[:, 0]
    plain.sum().backward()
    expected = gradients_of(model)
    model.zero_grad()
    rows = [row[:length].tolist() for row, length in zip(ids, lengths)]
    alone = UNSHARED_ROWS.make_batch([row[:3] for row in rows], [row[3:] for row in rows])
    scores = ScoreModel(copy.deepcopy(model)).eval()
    ours = scores(alone)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    ours.sum().backward()
    assert distance(gradients_of(scores.model), expected) <= 1e-5
