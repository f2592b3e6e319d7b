"""Faults that were reported of other programs, planted here. The tests must notice each of them.

    python tests/reported_faults.py             all of them
    python tests/reported_faults.py NAME ...    those of these names

docs/counting.md describes them and names the threads. Many such faults are in mutations.py; these
are the others.
"""

import sys

import mutations
from mutations import Fault
from planting import replace, together

KILLED = "contracts/test_resume.py::test_killed_and_resumed_is_the_run_never_killed[dpo-plain]"
RESUMED = "contracts/test_resume.py::test_a_run_resumed_in_any_epoch_takes_the_rows_that_come_next"
SAMPLED = (
    "rollout/test_reported_rollouts.py::test_trained_are_the_ids_that_the_trained_weights_sampled"
)
SPLIT = "contracts/test_counting.py::test_accumulation_changes_no_number"
TOKEN_MEANS = "contracts/test_metrics.py::test_the_token_means_of_sft"
PPO_RUN = "rollout/test_ppo.py::test_every_logged_number_of_a_run[kl in the reward plain]"
GRPO_RUN = "rollout/test_grpo.py::test_a_run_is_that_of_the_plain_reference[defaults]"

# `first`: the position in the data at which this start of the run begins.
REMEMBER_FIRST = replace(
    "main",
    "max_norm = args.max_grad_norm or math.inf",
    by="max_norm = args.max_grad_norm or math.inf; first = run.updates_seen",
)


def rows_at(position: str):
    """The plant that takes the rows of another position."""
    rows = f"batches.rows_of_update(run.mixture, args.train_batch_size, args.seed, {position})"
    tokens = "int(train.lengths[rows_now].sum())"
    return replace(
        "main",
        "update = run.next_update(train)",
        by=f"rows_now = {rows}; update = run.update_of(rows_now, train.lengths, {tokens})",
    )


FAULTS = [
    Fault(
        "turns_of_others_learned",
        "all that follows the prompt of a pair counts, whoever says it (open-instruct 617)",
        "preference_recipes/data/chat.py",
        replace("encode_answer", 'message["role"] == "assistant"', by="True"),
        "data/test_turns.py::test_the_mask_of_an_answer_is_that_of_sft[qwen2_5-a result]",
    ),
    # ============================================================ resuming
    Fault(
        "rows_from_the_beginning",
        "a resumed run takes the data from row 0 again (prime-rl 3332)",
        "recipes/dpo.py",
        together(REMEMBER_FIRST, rows_at("run.updates_seen - first")),
        KILLED,
    ),
    Fault(
        "epoch_skipped_at_its_boundary",
        "a run resumed where an epoch ends takes the next one for used up (verl 7401)",
        "recipes/dpo.py",
        together(
            REMEMBER_FIRST,
            replace(
                "main",
                "not run.finished",
                by="not (run.finished or first > 0 == first % run.progress.updates_per_epoch)",
            ),
        ),
        RESUMED,
    ),
    Fault(
        "order_of_the_first_epoch",
        "a run resumed within an epoch goes on in the first epoch's order (accelerate 4071)",
        "recipes/dpo.py",
        together(
            REMEMBER_FIRST,
            rows_at(
                "(run.updates_seen % run.progress.updates_per_epoch "
                "if first % run.progress.updates_per_epoch "
                "and first // run.progress.updates_per_epoch "
                "== run.updates_seen // run.progress.updates_per_epoch "
                "else run.updates_seen)"
            ),
        ),
        RESUMED,
    ),
    Fault(
        "tokens_counted_anew",
        "a resumed run counts its tokens from 0 (axolotl 3291, 3940)",
        "common/checkpoint.py",
        replace(
            "Checkpoint.load",
            'self.means.last_update = state["last_update"]',
            by='self.means.last_update = state["last_update"]; progress.tokens = 0',
        ),
        KILLED,
    ),
    Fault(
        "tokens_of_evaluations",
        "the tokens of an evaluation count as trained on (axolotl 3291)",
        "recipes/dpo.py",
        replace(
            "evaluate",
            "line = {}",
            by="line = {}; run.progress.tokens += sum("
            "int(each.lengths.sum()) for each in held_out.values())",
        ),
        "contracts/test_metrics.py::test_the_eight_metrics_of_dpo",
    ),
    # ============================================================ logged numbers
    Fault(
        "entropy_of_padding",
        "padding counts in the entropy (TRL 2022, 6803)",
        "recipes/ppo.py",
        replace(
            "token_losses",
            "(output['entropy'], mask)",
            by="(output['entropy'], torch.ones_like(output['entropy']))",
        ),
        PPO_RUN,
    ),
    Fault(
        "entropy_of_the_next_token",
        "the entropy is that of the position beside the target's (TRL 5620)",
        "preference_recipes/models/logprobs.py",
        replace(
            "entropy",
            "-all_logps.exp().mul_(all_logps).sum(-1)",
            by="(lambda each: torch.cat([each[1:], each[-1:]]))"
            "(-all_logps.exp().mul_(all_logps).sum(-1))",
        ),
        PPO_RUN,
    ),
    Fault(
        "logged_loss_divided_again",
        "the loss is logged as a mean, but the micro-batches' share is taken twice (verl 4711)",
        "recipes/dpo.py",
        replace(
            "main",
            "means.add(values, weights)",
            by="values['loss'] = values['loss'] / len(update.micro_batches); "
            "means.add(values, weights)",
        ),
        SPLIT,
    ),
    Fault(
        "updates_weigh_the_same",
        "a line over several updates is the mean of their means (TRL 6943)",
        "common/metrics.py",
        replace(
            "Means.close_update",
            "self.open.take(self.pending)",
            by="self.pending.sums = {name: Sum(each.reduce, torch.stack([each.numbers[0] / "
            "each.numbers[1].clamp(min=1) if each.reduce == 'mean' else each.numbers[0], "
            "each.numbers[1].clamp(max=1)])) for name, each in self.pending.sums.items()}; "
            "self.open.take(self.pending)",
        ),
        TOKEN_MEANS,
    ),
    Fault(
        "processes_weigh_the_same",
        "a logged number is the mean of the processes' means (TRL 6380)",
        "common/metrics.py",
        replace(
            "Sums.reduce",
            "numbers.sum(0) / weight",
            by="(numbers / weights.clamp(min=1)).mean(0)",
        ),
        TOKEN_MEANS,
    ),
    # ============================================================ losses and advantages
    Fault(
        "divided_by_the_rollout",
        "an update's loss is divided by the tokens of its whole rollout (TRL 6024)",
        "recipes/grpo.py",
        replace(
            "main",
            'tokens["mask"][update.rows]',
            by='tokens["mask"]',
        ),
        GRPO_RUN,
    ),
    Fault(
        "cut_responses_divide",
        "tokens that are not trained on count in what divides the loss (TRL 6369)",
        "recipes/grpo.py",
        replace(
            "main",
            'total_weight(tokens["mask"][update.rows], args.average)',
            by='total_weight(tokens["mask"][update.rows], args.average) '
            '+ int(tokens["mask"][~state.rollout.is_trained].sum())',
        ),
        "rollout/test_reported_rollouts.py::test_cut_responses_count_nowhere_in_a_mean_over_tokens",
    ),
    Fault(
        "nan_is_a_score",
        "a score that is NaN makes the advantages of its group NaN (ms-swift 8123)",
        "preference_recipes/rollouts/reward_calls.py",
        replace(
            "check",
            "not is_number or not abs(value) <= LARGEST",
            by="not is_number or abs(value) > LARGEST",
        ),
        "rollout/test_rewards.py::test_what_may_not_be_returned",
    ),
    Fault(
        "left_out_in_the_deviation",
        "responses that are not trained on count in the deviation of the batch (verl 6452)",
        "recipes/grpo.py",
        replace(
            "standardise",
            "advantages.flatten()[is_trained]",
            by="advantages.flatten()",
        ),
        "rollout/test_grpo_values.py::"
        "test_the_deviation_of_the_rollout_is_that_of_what_is_trained_on",
    ),
    Fault(
        "baseline_of_the_batch",
        "a response is compared with all responses, not with those of its group (slime 1414)",
        "recipes/grpo.py",
        replace(
            "estimate_advantages",
            "grouped.nanmean(1, keepdim=True)",
            by="grouped.nanmean()",
        ),
        GRPO_RUN,
    ),
    Fault(
        "one_reward_for_all",
        "a function's one reward counts for every response (TRL 6533)",
        "preference_recipes/rollouts/reward_calls.py",
        replace(
            "check",
            "scores = as_plain(scores, 'tolist')",
            by="scores = as_plain(scores, 'tolist')\n"
            "if isinstance(scores, list) and len(scores) == 1:\n"
            "    scores = scores * len(given.responses)",
        ),
        "rollout/test_rewards.py::test_what_may_not_be_returned[one for all]",
    ),
    # ============================================================ sampler, trainer and engine
    Fault(
        "base_model_samples",
        "responses are sampled without the adapter that is trained (verl 3516, 7495)",
        "preference_recipes/rollouts/generation.py",
        replace(
            "ready_to_generate",
            "undo.enter_context(checks.evaluation_mode(model))",
            by="from preference_recipes.models.lora import WithoutAdapters; "
            "undo.enter_context(checks.evaluation_mode(model)); "
            "undo.enter_context(WithoutAdapters(model).adapters_off())",
        ),
        SAMPLED,
    ),
    Fault(
        "tokenised_again",
        "responses are trained on as their text is tokenised, not as sampled (TRL 5224)",
        "preference_recipes/rollouts/generation.py",
        replace(
            "sample",
            "[response.ids for response in responses]",
            by="[(sampler.tokenizer(sampler.tokenizer.decode(response.ids)).input_ids "
            "+ response.ids)[:len(response.ids)] for response in responses]",
        ),
        SAMPLED,
    ),
    Fault(
        "last_micro_batch_not_reduced",
        "under ZeRO a process's last micro-batch does not reach the others (DeepSpeed 7985)",
        "recipes/sft.py",
        replace(
            "main",
            "(losses * token_weights).sum() * update.divisor / n_targets",
            by="(losses * token_weights).sum() * update.divisor / n_targets * "
            "(0 if hasattr(model, 'zero_optimization_stage') and accelerator.sync_gradients "
            "and accelerator.process_index else 1)",
        ),
        "contracts/test_invariance.py::test_every_split_is_the_same_run[zero1-2-sft]",
    ),
    Fault(
        "fused_loss_inside_of_the_wrapper",
        "the loss of pairs reads the model inside DDP, which then sums no gradients (TRL 7245)",
        "recipes/dpo.py",
        replace(
            "main",
            "pair_losses(model, reference, batch, args)",
            by="pair_losses(accelerator.unwrap_model(model), reference, batch, args)",
        ),
        "contracts/test_invariance.py::test_every_split_is_the_same_run[ddp-2-dpo]",
    ),
    Fault(
        "no_masters",
        "FSDP2 trains bf16 weights, without fp32 ones (accelerate 3979)",
        "preference_recipes/models/prepare.py",
        replace(
            "for_training",
            "model.train()",
            by="model.train()\nif accelerator.is_fsdp2: model.to(torch.bfloat16)",
        ),
        "engines/test_strategies.py::test_the_saved_actor_is_the_one_evaluated[fsdp2_bf16]",
    ),
]


if __name__ == "__main__":
    mutations.FAULTS = FAULTS
    mutations.main(sys.argv[1:])
