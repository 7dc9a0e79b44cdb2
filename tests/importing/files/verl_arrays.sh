#!/usr/bin/env bash
# DAPO's settings, in arrays and variables, as longer scripts have them.
prompt=$((1024 * 2))
answer=$((prompt * 4))
nodes=$(scontrol show hostnames | wc -l)
if [ "$FAST" = 1 ]; then steps=10; else steps=500; fi

DATA=(
    data.train_files="['/data/a.parquet', '/data/b.parquet']"  # two files
    data.max_prompt_length=${prompt}
    data.max_response_length=${answer}
    data.train_batch_size=512
)
ACTOR="
    actor_rollout_ref.model.path=/models/Qwen2.5-32B
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
"
DATA+=(algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False)

python -m verl.trainer.main_ppo "${DATA[@]}" $ACTOR \
    actor_rollout_ref.rollout.n=16 \
    +algorithm.filter_groups.enable=True \
    trainer.total_training_steps=$steps \
    trainer.nnodes=$nodes trainer.n_gpus_per_node=8 \
    some.new_key=1 2>&1 | tee log.txt
