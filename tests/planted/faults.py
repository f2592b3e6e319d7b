r"""Faults of the kind that people make, and the fast tests that ought to see each.

`TABLE` names a file and tests, then in each line a piece of the file, which has it once, and what takes its place; `\n`
is the end of a line. Whoever adds something to the product that no test would miss adds it here, too.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    file: str
    tests: tuple[str, ...]  # below `tests/`, and flags of pytest
    piece: str
    other: str  # what takes its place


def faults() -> list[Fault]:
    found = []
    for line in TABLE.strip().splitlines():
        if not line.startswith(" "):
            file, *tests = line.split()
            continue
        piece, other = (part.strip().replace(r"\n", "\n") for part in line.split(" >>"))
        found.append(Fault(file, tuple(tests), piece, other))
    return found


TABLE = r"""
recipes/sft.py models/test_preference_losses.py::test_weights_of_tokens_are_constants
    output["logps"].detach().exp() >> output["logps"].exp()
recipes/sft.py contracts/test_references.py::test_sft_is_the_plain_loop
    int(target_counts[update.indices].sum()) >> update.n_tokens
    (output["correct"], mask) >> (output["correct"], torch.ones_like(mask))
    turns = turns[-1:] >> turns = turns[:1]
recipes/sft.py contracts/test_references.py::test_dropout_is_on_in_sft_and_off_in_its_evaluations
    prepare.policy(accelerator, args, tokenizer) >> prepare.policy(accelerator, args, tokenizer, dropout=False)
recipes/sft.py contracts/test_fp16.py::test_what_overflows_leaves_no_trace[sft-1-1-own3]
    if applied:\n            scheduler.step() >> scheduler.step()
recipes/dpo.py contracts/test_metrics.py
    -F.logsigmoid(-scaled) >> -F.logsigmoid(scaled)
    chosen_log_ratios / chosen_lengths >> chosen_log_ratios / rejected_lengths
    chosen_rewards > rejected_rewards >> chosen_rewards >= rejected_rewards
recipes/dpo.py models/test_preference_losses.py::test_simpo models/test_preference_losses.py::test_orpo
    beta * difference - gamma >> beta * difference + gamma
recipes/dpo.py contracts/test_references.py::test_dpo_is_the_plain_loop
    update.engine_divisor / update.n_samples >> update.engine_divisor / args.train_batch_size
    (chosen_logits, chosen_mask) >> (chosen_logits, rejected_mask)
    dropout=False) >> dropout=True)
recipes/kto.py models/test_preference_losses.py
    max(means.reduce_and_reset()["kl"], 0.0) >> means.reduce_and_reset()["kl"]
    np.roll(rows, -1) >> rows
    * update.engine_divisor / n_answers >> * update.engine_divisor / update.n_samples
    run.args.seed, epoch=0) >> run.args.seed, epoch=1)
recipes/kto.py data/test_turns.py::test_numbers_of_labelled_answers_are_those_of_the_learned_tokens
    (rewards, ~is_good) >> (rewards, is_good)
recipes/kto.py contracts/test_fp16.py::test_what_overflows_leaves_no_trace[kto-1-1-own4]
    if applied:\n            scheduler.step() >> scheduler.step()
recipes/reward.py models/test_reward.py::test_every_logged_number_and_the_weights_of_a_run models/test_reward.py::test_moments_are_of_the_weights_they_are_saved_with
    - rejected_scores - margins >> - rejected_scores + margins
    prepare.disable_dropout(scorer) >> pass
    moments.set(None, None) >> pass
    found["mean of squares"] - found["mean"] ** 2 >> found["mean of squares"]
recipes/reward.py data/test_turns.py::test_a_reward_model_reads_the_whole_answer
    {name: without_loss_keys(value) for >> {name: value for
recipes/grpo.py rollout/test_grpo_values.py
    scores.amax(1) > scores.amin(1) >> scores.amax(1) > 0
    (scores.shape[1] - 1)).sqrt() >> scores.shape[1]).sqrt()
    advantages * n / (n - 1) >> advantages
    advantages[in_update].norm() >> advantages.norm()
    1 + args.clip_range_high >> 1 + args.clip_range
    kl, kl * ratios.detach() >> kl, kl * ratios
    losses + args.kl_coef * terms >> losses + args.kl_coef * kl
    (log_ratios * mask).sum(1, keepdim=True) >> log_ratios.sum(1, keepdim=True)
recipes/grpo.py rollout/test_grpo.py::test_a_run_is_that_of_the_plain_reference
    sums / args.max_new_tokens >> sums / mask.shape[1]
    logps.detach() if is_first_update >> logps if is_first_update
    model(batch, args.temperature, >> model(batch, 1.0,
    is_first_update = run.global_step == state.rollout.step_at_start >> is_first_update = True
recipes/grpo.py contracts/test_fp16.py::test_until_an_update_is_applied_the_policy_has_not_moved[grpo-own0]
    if applied:\n                scheduler.step() >> scheduler.step()
recipes/ppo.py rollout/test_ppo.py::test_every_logged_number_of_a_run
    torch.exp(-difference) - 1 + difference >> torch.exp(difference) - 1 - difference
    missing_eos_penalty * ~ended >> missing_eos_penalty * ended
    gamma * next_values - values[:, t] >> next_values - values[:, t]
    torch.where(mask, advantages + values, 0.0) >> torch.where(mask, advantages, 0.0)
    lr=args.critic_learning_rate >> lr=args.learning_rate
recipes/distill.py rollout/test_distill.py::test_a_run_is_that_of_the_plain_reference
    teacher_logps - old_logps >> teacher_logps - logps
    int(state.rollout.experience["loss_mask"][update_indices].sum()) >> update.n_tokens
    experience["teacher_index"] == number >> experience["teacher_index"] >= number
        args.temperature,\n        teacher >> 1.0,\n        teacher
recipes/distill.py contracts/test_fp16.py::test_until_an_update_is_applied_the_policy_has_not_moved[distill-own1]
    if applied:\n            scheduler.step() >> scheduler.step()
common/batches.py data/test_data.py::test_windows_are_a_permutation_of_each_epoch
    np.append(seed, epoch) >> np.append(seed, 0)
common/batches.py data/test_data.py::test_a_window_is_dealt_out_exactly_once contracts/test_counting.py
    torch.zeros(1)) >> torch.ones(1))
    parts[accelerator.process_index :: processes] >> parts[0::processes]
    n_rows * lengths[start] > max_tokens >> n_rows * lengths[index] > max_tokens
common/progress.py contracts/test_counting.py
    prompts.prompts_done == prompts.prompts_taken >= >> prompts.prompts_taken >=
    (first and self.global_step == 1) >> first
    not at_multiple and self.global_step > 0 >> self.global_step > 0
    math.ceil(round(updates * share, 6)) >> math.ceil(updates * share)
common/run.py contracts/test_metrics.py
    - seconds.pop("excluded", 0.0) >>
common/optim.py models/test_optim.py::test_every_projection_decays_and_no_norm_bias_or_rate models/test_optim.py::test_it_is_fused_on_a_gpu_but_not_with_torchs_own_loss_scaler
    and not is_norm >>
    and "bias" not in name >>
    and name != "A_log" >>
    and accelerator.scaler is None >>
common/optim.py models/test_schedule.py
    return update / warmup >> return (update + 1) / warmup
    total_updates <= 1 or >> total_updates <= 0 or
common/checkpoint.py contracts/test_before_resume.py
    folders.step_of(folder) > self.run >> folders.step_of(folder) >= self.run
    or replaced or not self.run.finished >> or replaced
common/checkpoint.py contracts/test_resume.py::test_a_longer_run_has_its_own_rates_from_the_first_update_on
    self.scheduler.last_epoch -= 1\n        self.scheduler.step() >> pass
common/checkpoint.py contracts/test_resume.py::test_killed_and_resumed_is_the_run_never_killed[dpo-growing-]
    state["open_sums"][accelerator.process_index] >> state["open_sums"][0]
common/stopping.py contracts/test_fp16.py::test_skips_are_said_and_without_end_end contracts/test_stopping.py::test_what_counts_nowhere_may_be_anything contracts/test_stopping.py::test_what_a_reward_function_forks_has_signals_of_its_own
    values.isfinite() | (weights == 0) >> values.isfinite()
    progress.consecutive_skips < MAX_CONSECUTIVE_SKIPS >> progress.consecutive_skips <= MAX_CONSECUTIVE_SKIPS
    int(accelerator.reduce(number, "max")) >> int(number)
common/arguments.py contracts/test_stopping.py::test_what_a_resumed_run_of_any_recipe_may_change users/test_bad_input.py::test_yaml_of_defaults contracts/test_counting.py
    {"output_dir", "run_name", "max_epochs", "max_steps"} >> {"output_dir", "max_epochs", "max_steps", "learning_rate"}
    yaml_to_flags(words[0], parser) + words[1:] >> words[1:] + yaml_to_flags(words[0], parser)
    abs(size - 4) >> abs(size - 8)
common/actor.py contracts/test_saved_actors.py::test_the_direction_of_a_metric contracts/test_saved_actors.py::test_the_best_actor_is_kept_and_a_run_that_gets_no_better_ends
    sign * value > previous_best >> value > previous_best
    stop_after <= self.best.since >> stop_after < self.best.since
preference_recipes/models/logprobs.py models/test_logprobs.py models/test_architectures.py::test_log_probs_and_gradients_are_those_of_its_own_logits
    1 - (block / self.softcap) ** 2 >> 1 - block / self.softcap
    grad_first[chunk, None] * ctx.job.multiplier >> grad_first[chunk, None]
    grad_bias += grad.sum(0) >> grad_bias = grad.sum(0)
    self.softcap / temperature >> self.softcap
recipes/distill.py rollout/test_distillation.py
    masked_fill_(log_ratios > 0, beta) >> masked_fill_(log_ratios < 0, beta)
preference_recipes/models/distillation.py rollout/test_distillation.py
    student_logps *= cap_slope >> pass
    (self.rest(chunk) - student_rest) >> self.rest(chunk)
preference_recipes/models/distillation.py rollout/test_distill.py::test_a_run_is_that_of_the_plain_reference
    self.ids[chunk, 0]).float() >> self.ids[chunk, -1]).float()
preference_recipes/models/packing.py models/test_packing.py
    write(answers[index], row, end, len(prompt)) >> write(answers[index], row, end, 0)
    sum(row_length(row, prompts, answers) for row in rows) >> ids.size
preference_recipes/models/shared_attention.py models/test_packing.py
    longest_answer).tril() >> longest_answer)
    .argsort()[-length:] >> .argsort()[:length]
preference_recipes/models/reference.py models/test_frozen_models.py::test_precomputed_log_probs_change_no_bit
    is_real = sample_weights.bool() >> is_real = sample_weights > -1
preference_recipes/models/scores.py models/test_reward.py::test_every_logged_number_and_the_weights_of_a_run
    token_index = batch["last_token_index"] >> token_index = batch["last_token_index"] - 1
preference_recipes/models/prepare.py models/test_logprobs.py::test_modes_come_back_as_they_were
    model.modules() if module.training] >> model.modules()]
preference_recipes/models/checks.py models/test_packing.py
    if min(windows) < max_length or not takes_masks >> if not takes_masks
preference_recipes/models/load.py users/test_bad_input.py::test_tokens_without_an_embedding
    sizes[smallest] <= token_id >> sizes[smallest] < token_id
preference_recipes/models/lora.py contracts/test_record.py::test_run_yaml_repeats_the_run
    2.0 * args.lora_r >> 1.0 * args.lora_r
preference_recipes/models/ema.py rollout/test_distill.py::test_the_average_of_a_student_teaches_it
    part.float(), 1 - self.decay >> part.float(), self.decay
preference_recipes/data/formats.py data/test_labels.py data/test_data.py::test_truncation_and_rows_left_out
    chosen, rejected = rejected, chosen >> pass
    cut[0].ids == cut[1].ids >> sequences[0].ids == sequences[1].ids
preference_recipes/data/formats.py data/test_formats.py::test_a_column_system_beside_other_columns data/test_formats.py::test_preferences
    if first != "system" else [] >> if True else []
    shared.rfind(HH_MARKER) >> shared.find(HH_MARKER)
preference_recipes/data/chat.py data/test_data.py::test_targets_of_a_conversation data/test_data.py::test_a_turn_ends_where_its_template_ends_it
    [learn_all] * (len(prefix) - len(loss_mask)) >> [True] * (len(prefix) - len(loss_mask))
    notes = [*notes, APPENDS_EOS] >> pass
preference_recipes/data/rendering.py data/test_data.py::test_tokenised_once_and_again_when_anything_changes
    \0{tokenizer.chat_template} >>
preference_recipes/data/dataset.py data/test_data.py::test_tokenised_once_and_again_when_anything_changes data/test_unread.py::test_the_line_about_a_set_says_what_is_not_read
    converter.settings,\n >> \n
    [*notes, *filter(None, [unread_note])] >> notes
preference_recipes/data/files.py users/test_bad_input.py::test_files_that_cannot_be_read
    len(result) < len(pairs) >> len(result) < 0
preference_recipes/rollouts/rollout_state.py rollout/test_grpo.py::test_a_run_is_that_of_the_plain_reference
    self.rollouts_seen, SAMPLING_STREAM >> 0, SAMPLING_STREAM
    self.prompts_taken += len(indices) >> self.prompts_taken += max_prompts
    trained = indices[self.in_update[indices].numpy()] >> trained = indices
preference_recipes/rollouts/results.py rollout/test_answers.py
    (sorted(names))[usable] >> (sorted(names))[: len(usable)]
preference_recipes/rollouts/correction.py rollout/test_grpo_values.py
    is_cut |= ratios < 1 / bound >> pass
    (logps - sampler_logps) * (mask > 0) >> logps - sampler_logps
preference_recipes/rollouts/generation.py rollout/test_generation.py::test_sampling_is_the_inverse_of_the_cumulative_probability
    right=True) >> right=False)
    scores / self.temperature >> scores * self.temperature
preference_recipes/rollouts/decoding.py rollout/test_decoding.py::test_log_probs_of_steps_are_those_of_whole_passes_under_autocast
    self.position[rows].add_(1) >> pass
preference_recipes/rollouts/answers.py rollout/test_answers.py
    if len(words) != 1: >> if not words:
preference_recipes/rollouts/episodes.py rollout/test_environments.py::test_what_is_trained_on_is_what_was_sampled rollout/test_environments.py::test_limits_truncate_an_episode
    draws[n, e.n_sampled :][:longest] >> draws[n, :longest]
    [0.0] * len(ids), is_sampled=False >> [0.0] * len(ids), is_sampled=True
    episode.turns >= args.max_turns >> episode.turns > args.max_turns
preference_recipes/rollouts/reward_functions.py rollout/test_rewards.py::test_what_a_function_changes_reaches_neither_samples_nor_the_next_one
    copy.deepcopy(arguments, uncopied) >> dict(arguments)
preference_recipes/rollouts/rewards.py rollout/test_ppo.py::test_every_logged_number_of_a_run
    (scores - self.mean) / self.std >> scores - self.mean
preference_recipes/rollouts/vllm.py rollout/test_vllm.py::test_answers_that_are_refused
    if len(responses) != request["n"]: >> if not responses:
preference_recipes/tools/export.py contracts/test_saved_actors.py::test_export_takes_what_the_manifest_names_and_does_not_leave_the_checkpoint
    (checkpoint / name).resolve() != checkpoint.resolve() / name >> False
forks/off_policy.diff rollout/test_forks.py
    (advantages < 0) & (lost >> (advantages > 0) & (lost
    ((sampler_logps - logps.detach()) >> ((logps.detach() - sampler_logps)
forks/dppo.diff rollout/test_forks.py
    distance = (p - q).abs() >> distance = p - q
forks/gdpo.diff rollout/test_forks.py
    (n - 1).clamp(min=1) >> n
forks/curriculum.diff rollout/test_forks.py
    (self.tried + 1) >> (self.tried + 2)
forks/sdpo.diff rollout/test_forks.py
    (said[name] - experience["old_logps"]) >> (experience["old_logps"] - said[name])
forks/echo.diff rollout/test_forks.py
    batch["loss_mask"] & ~experience["loss_mask"] >> batch["loss_mask"]
forks/gkd.diff rollout/test_distill.py::test_a_run_is_that_of_the_plain_reference
    loss_mask=columns["completion_loss_mask"] >> loss_mask=[[True] * len(ids) for ids in completions]
recipes/sft.py contracts/test_recipe.py::test_split --quick --recipe=recipes/sft.py
    (losses * token_weights).sum() * update.engine_divisor / n_targets >> (losses * token_weights).sum() / token_weights.sum().clamp(min=1)
recipes/sft.py contracts/test_recipe.py::test_engines --quick --recipe=recipes/sft.py
    optimizer.zero_grad() >> optimizer.zero_grad(); [p.data.mul_(0.999) for p in policy.parameters()]
recipes/sft.py contracts/test_recipe.py::test_last_update --quick --recipe=recipes/sft.py
    (losses * token_weights).sum() * update.engine_divisor / n_targets >> losses.mean()
recipes/sft.py contracts/test_recipe.py::test_log_lines --quick --recipe=recipes/sft.py
    scheduler.get_last_lr()[0] >> scheduler.base_lrs[0] * scheduler.lr_lambdas[0](scheduler.last_epoch + 1)
recipes/sft.py contracts/test_recipe.py::test_evaluation --quick --recipe=recipes/sft.py
    prepare.evaluation_mode(model) >> torch.no_grad()
recipes/sft.py contracts/test_recipe.py::test_overflow --quick --recipe=recipes/sft.py
    if applied:\n            scheduler.step() >> scheduler.step()
recipes/sft.py contracts/test_recipe.py::test_still --quick --recipe=recipes/sft.py
    optimizer.zero_grad() >> optimizer.zero_grad(); [p.data.mul_(1 - 1e-6) for p in policy.parameters()]
recipes/dpo.py contracts/test_recipe.py::test_packed --quick --recipe=recipes/dpo.py
    columns["rejected_loss_mask"] >> [[*row[:-1], row[-1] and not packer.share] for row in columns["rejected_loss_mask"]]
recipes/dpo.py contracts/test_recipe.py::test_last_update --quick --recipe=recipes/dpo.py
    update.engine_divisor / update.n_samples >> update.engine_divisor / args.train_batch_size
recipes/dpo.py contracts/test_recipe.py::test_actor --quick --recipe=recipes/dpo.py
    reference = Reference(accelerator, args, tokenizer, model) >> reference = Reference(accelerator, args, tokenizer, model); reference.model = model
recipes/grpo.py contracts/test_recipe.py::test_last_update --quick --recipe=recipes/grpo.py
    (losses * weights).sum() * update.engine_divisor / total_weight >> losses.mean()
common/metrics.py contracts/test_recipe.py::test_means --quick --recipe=recipes/sft.py
    self.accelerator.gather(mine[None]) >> mine[None]
common/values.py contracts/test_recipe.py::test_values --quick --recipe=recipes/sft.py
    if pending and applied: >> if pending:
common/checkpoint.py contracts/test_recipe.py::test_resume --quick --recipe=recipes/sft.py
    temporary = final.with_name(f".{final.name}.writing") >> temporary = final; folders.replace = print
    self.scheduler.load_state_dict(state["scheduler"]) >> self.scheduler.load_state_dict(state["scheduler"]); torch.set_rng_state(__import__("accelerate").utils.broadcast(torch.get_rng_state()))
common/batches.py contracts/test_recipe.py::test_seed --quick --recipe=recipes/sft.py
    np.random.default_rng(np.append(seed, epoch)) >> np.random.default_rng()
"""
